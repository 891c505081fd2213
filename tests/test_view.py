"""The page that shows runs: its data, its server, and the page itself in a real browser."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading

import browser as chromium
import pytest
from filelock import FileLock
from scipy.stats import ttest_ind
from small_run import ROOT

from runtime.errors import Refused
from runtime.log import RunLog
from scripts.view import main
from view import runs as view_runs
from view.page import build_page, write_page
from view.runs import Store, find_folders
from view.server import Server

RECORD = ROOT / "records" / "small" / "2026-11-24_Record89"
HOSTILE = "<img src=x onerror=alert(1)></script><script>window.hacked = 1</script>"


def log_lines(
    seed=0, steps=40, done=None, skip=(), vals=None, track="tiny", adam_every=1, **config
):
    """The lines of a run of 100 tokens and 10 ms a step; `done` steps: it still runs.

    vals: losses of earlier validations by step. adam_every: a step without Adam takes half as long,
    and its norm has no part of Adam's.
    """
    settings = {"recipe": "record89", "steps": steps, "matrix_lr": 0.02, "seed": seed} | config
    loss = 3.1 + seed / 10
    vals = (vals or {}) | ({steps: loss} if done is None else {})
    yield {
        "event": "header", "t_ms": 0, "schema": 3, "run_id": f"run_{seed}", "track": track,
        "target": 3.5, "seed": seed, "source_sha256": "ab" * 32, "env": {"gpu_count": 0},
        "config_sha256": str(sorted(config.items())), "config": settings,
    }  # fmt: skip
    for step in range(1, (done or steps) + 1):
        adam = step % adam_every == 0
        yield {
            "event": "step", "t_ms": 10 * step, "step": step, "tokens": 100 * step,
            "train_time_ms": 10.0 * step - (0 if adam else 5),
            "train_loss": 4 - step / steps + seed / 10, "lr_mul": 1 - step / steps,
            "grad_norm": 1 + 1 / step if adam else 0.5,
            "grad_norms": {"matrix": 0.5, "adam": float(adam)},
            "window": 128 if step < 20 else 256, "skipped": step in skip,
        }  # fmt: skip
        if step in vals:
            yield {"event": "val", "t_ms": 10 * step, "step": step, "val_loss": vals[step],
                   "total_steps": steps, "train_time_ms": 10.0 * step}  # fmt: skip
    if done is None:
        yield {"event": "end", "t_ms": 1, "status": "done", "val_loss": loss,
               "probes": {"loss_on_new": loss + 0.5, "loss_held_out": loss + 0.25}}  # fmt: skip


def write_log(folder, name="a", **run):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in log_lines(**run))
    (folder / f"{name}.jsonl").write_text(text)
    return folder / f"{name}.jsonl"


def read(*paths):
    return Store(find_folders(paths)).reply(seconds=1000)


# ---- Data


def test_a_run_is_told_as_its_log_tells_it(tmp_path):
    write_log(tmp_path / "logs", seed=1, skip={7})
    (run,) = read(tmp_path / "logs")["runs"]
    assert (run["status"], run["loss"], run["seconds"], run["done"]) == ("done", 3.2, 0.4, 40)
    assert run["curve"]["step"] == list(range(1, 41))
    assert run["curve"]["loss"][3] == pytest.approx(4.0)
    assert run["curve"]["window"][17:20] == [128, 128, 256]
    assert run["curve"]["norm"][1] == 1.5
    assert set(run["curve"]["speed"]) == {10_000}
    assert run["skips"] == {"step": [7], "tokens": [700], "seconds": [0.07]}
    assert run["val"] == {"step": [40], "tokens": [4000], "seconds": [0.4], "loss": [3.2]}
    assert "seed" not in run["config"], "seeds of one configuration share a group"
    assert (run["new_tokens"], run["held_out"]) == (3.7, 3.45)


def test_runs_of_one_source_and_configuration_are_one_group_but_not_the_arms_of_a_judgement(
    tmp_path,
):
    write_log(tmp_path / "logs", seed=1)
    write_log(tmp_path / "logs", "b", seed=1, matrix_lr=0.04)
    write_log(tmp_path / "other", seed=2)
    groups = [run["group"] for run in read(tmp_path / "logs", tmp_path / "other")["runs"]]
    assert groups[0] == groups[2] != groups[1]
    for arm in "AB":
        write_log(tmp_path / "judge" / "one" / arm)
    runs = read(tmp_path / "judge" / "one")["runs"]
    assert [run["arm"] for run in runs] == ["one/A", "one/B"]
    assert runs[0]["group"] != runs[1]["group"]


def test_a_long_run_is_thinned_and_its_mean_loss_stays(tmp_path):
    write_log(tmp_path / "logs", steps=2002, skip={700}, vals={1000: 3.5})
    (run,) = read(tmp_path / "logs")["runs"]
    curve = run["curve"]
    assert run["val"]["tokens"][0] == 100_000, "though its step is not among those kept"
    assert len(curve["loss"]) <= view_runs.POINTS + 1
    assert curve["step"][0] == 11
    assert curve["loss"][0] == pytest.approx(4 - 6 / 2002, abs=1e-6)  # of steps 1 to 11
    assert (curve["step"][-1], run["skips"]["step"], run["status"]) == (2002, [700], "done")
    assert curve["loss"][-1] == pytest.approx(4 - 1997 / 2002, abs=1e-6)  # of 1,992 to 2,002


@pytest.mark.parametrize("steps", [40, 602])  # the second is thinned
def test_steps_that_adam_leaves_out_draw_no_zigzag(tmp_path, steps):
    write_log(tmp_path / "logs", steps=steps, adam_every=2)
    (run,) = read(tmp_path / "logs")["runs"]
    curve = run["curve"]
    assert {speed for speed in curve["speed"] if speed is not None} == {10_000}
    norms = [norm for norm in curve["norm"] if norm is not None]
    assert norms == sorted(norms, reverse=True)
    assert min(norms) > 1
    assert len(norms) == len([step for step in curve["step"] if step % 2 == 0])


def test_a_run_whose_log_is_open_is_live_however_long_it_is_silent(tmp_path):
    log, header = RunLog(tmp_path, "run_0"), next(log_lines())
    log.begin({name: header[name] for name in header.keys() - {"event", "t_ms"}})
    os.utime(log.path, (0, 0))
    store = Store(find_folders([tmp_path]))
    reply = store.reply()
    assert reply["live"] == reply["ids"] != []
    log.close()  # as if its process had died
    assert store.reply()["live"] == []


def test_a_record_and_a_folder_of_records_give_their_runs_as_references():
    (folder,) = find_folders([RECORD])
    assert (folder.name, folder.record) == (RECORD.name, True)
    assert len(find_folders([RECORD, os.path.relpath(RECORD)])) == 1, "each once"
    assert len(find_folders([RECORD.parent])) == len(list(RECORD.parent.glob("*/runs")))
    assert len(read(RECORD)["ids"]) == len(list((RECORD / "runs").glob("*_small_*.jsonl")))


def test_a_text_log_and_a_run_without_an_end_are_shown(tmp_path):
    with write_log(tmp_path, done=30, vals={10: 3.9, 20: 3.4}).open("a") as file:
        file.write('{"event": "step", "st')  # torn
    text = "step:0/20 val_loss:10.8 train_time:0ms\nstep:20/20 val_loss:4.5 train_time:9ms\n"
    (tmp_path / "b.txt").write_text(text)
    running, text_log = read(tmp_path)["runs"]
    assert (running["status"], running["done"], running["total"]) == (None, 30, 40)
    assert running["why"] == "torn last line"
    vals = {"step": [10, 20], "tokens": [1000, 2000], "seconds": [0.1, 0.2], "loss": [3.9, 3.4]}
    assert (running["val"], running["loss"], running["new_tokens"]) == (vals, 3.4, "nan")
    assert (text_log["status"], text_log["loss"], text_log["curve"]["loss"]) == ("done", 4.5, [])


def test_only_logs_that_changed_are_read_again_and_no_reply_waits_until_all_are(
    tmp_path, monkeypatch
):
    write_log(tmp_path, "a")
    log = write_log(tmp_path, "b", seed=1, done=5)
    store, parsed, read_runs = Store(find_folders([tmp_path])), [], view_runs.read_runs

    def note(path):
        parsed.append(path)
        return read_runs(path)

    monkeypatch.setattr(view_runs, "read_runs", note)
    assert store.reply(seconds=-1)["more"]
    reply = store.reply()
    assert (reply["more"], len(reply["runs"]), len(parsed)) == (False, 2, 2)
    assert store.reply(reply["version"])["runs"] == []
    assert len(parsed) == 2
    write_log(tmp_path, "b", seed=1, done=9)
    reply = store.reply(reply["version"])
    assert [run["done"] for run in reply["runs"]] == [9]
    assert parsed[2:] == [log]
    log.unlink()
    assert len(store.reply(reply["version"])["ids"]) == 1


def test_what_is_no_log_or_a_link_is_named_and_not_read_and_the_others_are_shown(tmp_path):
    secret, logs = write_log(tmp_path / "private", seed=5), tmp_path / "logs"
    for name in ("a", "d"):
        write_log(logs, name)
    (logs / "b.jsonl").write_text("nonsense\nmore\n")
    (logs / "c.jsonl").write_text('{"event": "header", "schema": 99}\n')
    for link in ("a.2.jsonl", "e.jsonl"):
        (logs / link).symlink_to(secret)
    reply = read(logs)
    assert [run["more"]["log"] for run in reply["runs"]] == [str(logs / "d.jsonl")]
    assert [re.search(r"/logs/(.*?)\.jsonl", reason)[1] for reason in reply["unread"]] == [
        "a.2", "b", "c", "e"]  # fmt: skip
    assert str(reply["unread"]).count("it is a link or no regular file") == 2


@pytest.mark.parametrize("value", ["NaN", "1e999", '"nan"', "[NaN]", "null", '{"a": [[["b"]]]}'])
def test_any_value_in_a_header_can_be_sent(tmp_path, value):
    log = write_log(tmp_path, matrix_lr="VALUE", target_of="x")
    log.write_text(log.read_text().replace('"VALUE"', value))
    json.dumps(read(tmp_path), allow_nan=False)


# ---- Command


def test_a_folder_that_does_not_exist_or_is_empty_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert main([str(tmp_path), "--out", str(tmp_path / "x.html")]) == 2
    assert "error: no run log" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_a_page_that_is_written_asks_nothing_of_the_network_and_no_data_end_its_script(tmp_path):
    write_log(tmp_path / "logs", recipe=HOSTILE)
    assert main([str(tmp_path / "logs"), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert set(re.findall(r"https?://[^\s'\")]+", page)) == {
        "https://github.com/leeoniya/uPlot", "http://www.w3.org/2000/svg"}  # fmt: skip
    assert '<link rel="icon" href="data:' in page
    assert HOSTILE not in page
    assert page.count("</script>") == build_page().count("</script>")


# ---- Server


@pytest.fixture
def served(tmp_path):
    """A folder with a run, and its server."""
    write_log(tmp_path / "logs")
    with Server(Store(find_folders([tmp_path / "logs"])), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield tmp_path / "logs", server
        server.shutdown()


def ask(port, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply, body


def test_the_server_gives_the_page_and_its_runs_and_takes_no_port_of_another(served):
    folder, server = served
    assert ask(server.server_port, "/")[1].startswith(b"<!DOCTYPE html>")
    (run,) = json.loads(ask(server.server_port, "/runs?since=0")[1])["runs"]
    assert (run["name"], run["more"]["log"]) == ("run_0", str(folder / "a.jsonl"))
    with pytest.raises(Refused, match="--port"):
        Server(server.store, server.server_port)


@pytest.mark.parametrize(("status", "asked"), [
    (404, [("GET", path) for path in (
        "/a.jsonl", "/../a.jsonl", "/etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd",
        "/runs?since=-1", "/runs?since=x", "/compare", "/compare?a=x&b=y")]),
    (501, [(method, "/") for method in ("HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")]),
], ids=["knows no paths", "only reads"])  # fmt: skip
def test_the_server(status, asked, served):
    for method, path in asked:
        assert ask(served[1].server_port, path, method)[0].status == status, path


def test_a_web_page_of_another_name_cannot_ask_the_server(served):
    address, port = served[1].server_address
    assert address == "127.0.0.1"
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", ""):
        assert ask(port, "/runs", Host=host)[0].status == 403
    reply, _ = ask(port, "/runs", Host=f"localhost:{port}")
    assert reply.status == 200
    assert "Access-Control-Allow-Origin" not in reply.headers
    assert reply.headers["X-Content-Type-Options"] == "nosniff"


def test_the_command_serves_through_clients_that_leave_in_mid_reply_until_interrupted(tmp_path):
    write_log(tmp_path)
    words = [sys.executable, ROOT / "scripts" / "view.py", tmp_path, "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline()
        port = int(re.search(r"http://127.0.0.1:(\d+)/ shows", said)[1])
        for path in ["/", "/runs?since=0"] * 20:
            with socket.create_connection(("127.0.0.1", port)) as client:
                request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
                client.sendall(request.encode())
        assert len(json.loads(ask(port, "/runs")[1])["ids"]) == 1
        process.send_signal(2)
        assert process.wait(timeout=20) == 130


# ---- The page in a browser


@pytest.fixture(scope="module")
def started():
    if not chromium.CHROMIUM:
        pytest.skip("needs chromium, which is not installed")
    found = chromium.Browser()
    yield found
    found.close()


@pytest.fixture
def page(started):
    started.show(1280, 800)
    started.errors.clear()
    yield started
    started.call("Page.navigate", url="about:blank")  # before its server ends
    assert started.errors == []


TEXT = "document.body.innerText"
ROWS = "document.querySelectorAll('#rows tr')"
LINES = "charts.loss.lines"


def inked(page, chart="loss"):
    """How many pixels of a chart's canvas are drawn on."""
    return page.evaluate(f"""(() => {{
        const canvas = document.querySelector("#{chart} canvas");
        const {{data}} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.filter((value, i) => i % 4 === 3 && value > 0).length }})()""")


@pytest.fixture
def opened(served, page):
    folder, server = served
    page.open(server.url)
    page.wait(f"{ROWS}.length === 2")
    return folder, page


def test_it_draws_charts_over_each_axis_and_stays_so_when_reloaded_or_on_a_phone(opened):
    _, page = opened
    assert page.evaluate("document.getElementById('live').textContent") == "live"
    for chart in ("loss", "norm", "lr", "window", "speed"):
        assert inked(page, chart) > 1000, chart
    assert "3.1000" in page.evaluate(TEXT)
    assert "reached" in page.evaluate(TEXT)
    for axis, last in (("tokens", 4000), ("seconds", 0.4), ("step", 40), ("tokens", 4000)):
        page.click(f"#axis [data-value={axis}]")
        page.wait(f"charts.loss.plot.data[0].at(-1) === {last}")
    page.call("Page.reload")
    page.wait("charts.loss && charts.loss.plot.data[0].at(-1) === 4000")
    page.show(390, 844)
    page.wait("charts.loss.plot.width < 390")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    row = "[...document.querySelectorAll('#rows tr:last-child td')].filter(cell => cell.innerText)"
    right = page.evaluate(f"{row}.map(cell => Math.round(cell.getBoundingClientRect().right))")
    assert [edge <= 390 for edge in right if edge] == [True] * 3
    visible = f"{row}.filter(cell => getComputedStyle(cell).display !== 'none')"
    shown = page.evaluate(f"{visible}.map(cell => cell.innerText.trim())")
    assert shown == ["run_0", "3.1000", "reached"]
    page.click("#axis [data-value=seconds]")
    page.wait("charts.loss.plot.data[0].at(-1) === 0.4")


def test_a_closed_group_is_a_median_with_a_band_and_an_open_one_draws_each_run(opened):
    folder, page = opened
    for seed, loss in ((1, 3.9), (2, 3.7)):
        write_log(folder, str(seed), seed=seed, vals={20: loss})
    page.wait(f"{ROWS}.length === 4 && {LINES}.length === 3")
    page.click("#rows .group button")
    page.wait(f"{LINES}.length === 1")
    validations = "charts.loss.lines.map(line => line.dots.map(dot => [dot.x, dot.y]))"
    assert page.evaluate(validations) == [[[20, pytest.approx(3.8)], [40, 3.2]]]
    # Of 4 - step / 40 + seed / 10 for seeds 0, 1 and 2, the mean of steps 17 to 20.
    line, mean = page.evaluate(f"{LINES}[0]"), 4 - 18.5 / 40
    assert line["y"][19] == pytest.approx(mean + 0.1)
    assert (line["low"][19], line["high"][19]) == pytest.approx((mean + 0.01, mean + 0.19))
    page.click("#rows .group button")
    page.wait(f"{LINES}.length === 3")
    assert [[20, 3.7], [40, 3.3]] in page.evaluate(validations)
    page.click("#rows .run input")
    page.wait(f"{LINES}.length === 2 && document.querySelectorAll('.off').length === 1")


def test_a_run_opens_its_end_before_its_settings_and_a_group_closes(opened):
    _, page = opened
    page.click("#rows .run button")
    page.wait("document.getElementById('dialog').open")
    facts = page.evaluate("document.getElementById('facts').textContent")
    assert 0 < facts.index("end.val_loss: 3.1") < facts.index("settings.matrix_lr: 0.02")
    page.click("#dialog button")
    page.wait("!document.getElementById('dialog').open")
    page.click("#rows .group button")
    page.wait(f"{ROWS}.length === 1")


def spot(page, step, loss):
    """Where this point of the chart is in the window."""
    page.evaluate("charts.loss.plot.over.scrollIntoView()")
    return page.evaluate(
        "(() => { const {plot} = charts.loss, b = plot.over.getBoundingClientRect();"
        f"return [b.left + plot.valToPos({step}, 'x'), b.top + plot.valToPos({loss}, 'y')] }})()"
    )


def test_a_drag_zooms_and_a_double_click_undoes_it(opened):
    _, page = opened
    page.mouse("mousePressed", *spot(page, 10, 3.5), button="left", clickCount=1)
    page.mouse("mouseMoved", *spot(page, 20, 3.5), button="left", buttons=1)
    page.mouse("mouseReleased", *spot(page, 20, 3.5), button="left", clickCount=1)
    page.wait("charts.loss.plot.scales.x.max < 22 && charts.lr.plot.scales.x.min > 8")
    page.evaluate("charts.loss.plot.over.dispatchEvent(new MouseEvent('dblclick'))")
    page.wait("charts.loss.plot.scales.x.max > 39")


def cells(page, selector):
    return page.evaluate(
        f"[...document.querySelectorAll('{selector}')].map(cell => cell.innerText.trim())"
    )


def point_at(page, step, loss):
    """Move the pointer there; returns what the page says."""
    page.mouse("mouseMoved", *spot(page, step, loss))
    page.wait("!document.getElementById('tip').hidden")
    return cells(page, "#tip td")


def test_pointing_anywhere_names_all_curves_there_the_best_first(opened):
    folder, page = opened
    write_log(folder, "b", seed=1, vals={20: 3.9}, matrix_lr=0.04)
    page.wait(f"{LINES}.length === 2")
    told = ["record89", "3.5375", "3.1000 at 40", "record89 · matrix_lr 0.04", "3.6375", "3.9000"]
    assert point_at(page, 20, 3.2) == point_at(page, 20, 3.95) == told


def test_columns_sort_and_rows_are_shown_alone_hidden_or_filtered_and_two_groups_compared(opened):
    folder, page = opened
    for name, rate, seeds in (("b", 0.04, (3, 4)), ("c", 0.01, (1, 2))):
        for seed in seeds:
            write_log(folder, f"{name}{seed}", seed=seed, matrix_lr=rate)
    page.wait(f"{LINES}.length === 3")
    usual, high, low = "▸ record89", "▸ record89 · matrix_lr 0.04", "▸ record89 · matrix_lr 0.01"
    rows = "#rows td button:first-of-type"
    page.click("#columns th:nth-child(3) button")
    assert cells(page, rows) == [usual, low, high]
    page.click("#columns th:nth-child(3) button")
    assert cells(page, rows) == [high, low, usual]
    for way in ("", "-"):  # nobody chooses by the held-out slice
        page.evaluate(f"set({{sort: '{way}Held out'}})")
        assert cells(page, rows) == [usual, high, low]
    assert page.evaluate("document.querySelectorAll('#columns button').length") == 8
    page.evaluate("set({sort: '-Loss'})")
    page.click("#rows tr .only")
    page.wait(f"{LINES}.length === 1 && charts.loss.lines[0].label.includes('0.04')")
    focused = page.evaluate("document.activeElement.id")
    page.evaluate("render()")
    assert page.evaluate("document.activeElement.id") == focused != "", "focus survives a redraw"
    page.evaluate("document.querySelectorAll('#rows input')[1].click()")
    low, high = ttest_ind([3.2, 3.3], [3.4, 3.5], equal_var=False).confidence_interval()
    found = f"loss -0.20000 ({low:+.5f} to {high:+.5f}), not shown to be lower or higher"
    page.wait(f"document.getElementById('comparison').innerText.includes('{found}')")
    for lines in (1, 3):  # that alone, then all
        page.click("#rows tr .only")
        page.wait(f"{LINES}.length === {lines}")
    page.evaluate("set({filter: 'matrix_lr=0.99'})")
    page.wait(f"{TEXT}.includes('No run matches matrix_lr=0.99')")
    page.evaluate("set({filter: 'matrix_lr'})")  # a word is looked for in names
    assert page.evaluate(f"{ROWS}.length") == 2
    page.click("#filter")
    page.call("Input.insertText", text="=0.01 seed=1")
    page.wait(f"{LINES}.length === 1 && {ROWS}.length === 1")
    page.click("#rows .group button")
    page.wait(f"{ROWS}.length === 2 && {TEXT}.includes('run_1')")


def test_one_track_is_drawn_at_a_time_with_its_target_and_the_live_one_comes_first(opened):
    folder, page = opened
    log = write_log(folder, "live", done=5, track="small", matrix_lr=0.04)
    os.utime(log, (0, 0))
    with FileLock(folder / ".live.lock"):
        page.wait("document.querySelectorAll('#track button').length === 2")
        assert cells(page, "#track [aria-pressed=true]") == ["small"]
        assert "1 running" in page.evaluate(TEXT)
        assert page.evaluate(f"{LINES}.length") == 1
        page.click("#track button:last-child")
        page.wait(f"{LINES}[0].dots.length === 1")
        assert cells(page, "#track [aria-pressed=true]") == ["tiny"]
        page.click("#track button:first-child")
    page.wait(f"{TEXT}.includes('1 stopped')")


def test_validation_stands_out_from_training_and_the_target_says_of_what(opened):
    _, page = opened
    stroke = page.evaluate("charts.loss.plot.series[1].stroke()")
    assert stroke != page.evaluate(f"{LINES}[0].color")
    assert page.evaluate("charts.lr.plot.series[1].stroke()") == page.evaluate(f"{LINES}[0].color")
    page.evaluate("""window.written = [];
        CanvasRenderingContext2D.prototype.fillText = text => written.push(text);
        render()""")
    page.wait("written.includes('target of validation: 3.5')")
    assert page.evaluate("written.includes('steps')")


def test_a_page_in_a_file_draws_a_record_as_a_reference(tmp_path, page):
    write_log(tmp_path / "logs", track="small")
    write_page(Store(find_folders([tmp_path / "logs", RECORD])), tmp_path / "page.html")
    page.open((tmp_path / "page.html").as_uri())
    page.wait(f"{LINES}.length === 2")
    assert inked(page) > 1000
    dashed = page.evaluate(f"{LINES}.map(line => line.dash.length > 0 && Boolean(line.low))")
    assert dashed == [False, True]


def test_hostile_names_are_shown_as_text(opened):
    folder, page = opened
    log = write_log(folder, "b", seed=1, recipe=HOSTILE, optimizer=HOSTILE)
    log.write_text(log.read_text().replace("run_1", HOSTILE.replace("/", "\\/")))
    page.wait("document.querySelectorAll('#rows .group').length === 2")  # they begin closed
    page.evaluate("[...document.querySelectorAll('#rows .group button:not(.only)')].at(-1).click()")
    assert page.evaluate(TEXT).count(HOSTILE) >= 2
    page.evaluate("[...document.querySelectorAll('#rows .run button:not(.only)')].at(-1).click()")
    page.wait("document.getElementById('dialog').open")
    assert page.evaluate("document.images.length") == 0
    assert page.evaluate("window.hacked === undefined")


def test_an_empty_folder_says_so_and_its_first_run_is_followed_to_its_end(served, page):
    folder, server = served
    (folder / "a.jsonl").unlink()
    page.open(server.url)
    page.wait(f"{TEXT}.includes('No runs yet. Start one: ./run.sh --steps 20')")
    write_log(folder, done=5)
    page.wait(f"{TEXT}.includes('5 of 40')")
    assert "running, 0.4 s left" in page.evaluate(TEXT)
    assert inked(page) > 1000
    stroke = page.evaluate("charts.loss.plot.series[1].stroke()")
    assert stroke != page.evaluate(f"{LINES}[0].color"), "it has no validation yet"
    write_log(folder, done=30)
    page.wait("charts.loss.plot.data[0].at(-1) === 30")
    write_log(folder)
    page.wait(f"{TEXT}.includes('1 reached')")
