"""Records from claim to leaderboard: what the pages say follows from the logs."""

import hashlib
import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import small_record
import small_run
from scipy import stats
from small_record import LOSSES, TARGET, call, contents, make_claim, read_logs, write_record

from claims.checks import find_failures
from claims.record import TRACKS, read_evidence, write_claim, write_source
from runtime.source import digest
from scripts import record


@pytest.fixture(autouse=True)
def contest(monkeypatch, tmp_path):
    monkeypatch.setitem(TRACKS, "tiny", small_record.RULES)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(record, "RECORDS", tmp_path)


def made(root: Path, name: str, *, worse: float = 0.0, **changed) -> Path:
    """The record of a claim of four runs."""
    losses = [loss + worse for loss in LOSSES[:4]]
    folder = write_record(root, make_claim(name, 4, **changed), losses)
    assert record.main(["make", str(folder)]) == 0
    return folder


def in_year(year: int, **config) -> dict:
    """What a claim of that year has of its own: seeds, settings and date."""
    return {"seed": 10 * year, "config": config, "created": f"{year}-01-01T00:00:00+00:00"}


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path, "Good")


def page_of(folder: Path) -> str:
    return (folder / "README.md").read_text()


def test_real_runs_one_of_them_resumed_become_a_record_that_only_a_loaded_machines_clock_may_fail(
    tmp_path, capsys, monkeypatch
):
    """Claim, four runs of the trainer, record, verification: what no synthetic log can show."""
    monkeypatch.chdir(tmp_path)  # here nobody has tried a seed
    data = small_run.write_data(tmp_path / "data")
    tokens = small_run.documents(3, 30).astype(np.uint16).tobytes()
    val_sha256 = hashlib.sha256(tokens).hexdigest()[:16]
    rules = small_record.RULES._replace(val_sha256=val_sha256, train_sha256="")
    monkeypatch.setitem(TRACKS, "tiny", rules)
    sizes = small_run.SIZES | {"target": TARGET}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    config = record.ask_trainer(record.ROOT, ["--track=tiny", "--recipe=record89", *flags])
    monkeypatch.setattr(record, "ask_trainer", lambda *_: config)  # it would refuse this track
    words = ["Real", "--n", 4, "--seed", 7, "--about", "Why.", "--", "--recipe=record89", *flags]
    code, said = call(capsys, "claim", *words)
    assert code == 1, "here is no repository"
    assert "Commit it before its runs, as a proof.\nMake its runs:" in said
    folder = next((tmp_path / "tiny").glob("*_Real"))
    logs, claim = tmp_path / "logs", folder / "claim.json"
    assert json.loads(claim.read_text())["flags"][:3] == ["--track", "tiny", "--recipe=record89"]
    flags = {"claim": claim, "seed": 7, "trials": 4, "target": TARGET, "resume": "auto"}
    with small_run.acting({8: small_run.signalled(signal.SIGTERM)}):
        assert small_run.run(data, logs, **flags).code == 128 + signal.SIGTERM
    code, said = call(capsys, "make", folder, logs)
    assert (code, "fix: if it was interrupted, repeat its command with" in said) == (1, True)
    outcome = small_run.run(data, logs, **flags)
    assert outcome.code == 0, outcome.err
    code, said = call(capsys, "make", folder, logs)
    page = page_of(folder)
    assert re.search(r"\nSeed 7 was resumed at step \d+ \(0 ms .*\); it counts\.\n", page), page
    failures = [failure.what for failure in find_failures(read_evidence(folder))]
    # Here the trainer runs inside pytest, whose modules are from elsewhere.
    expected = ("untimed work:", "modules from elsewhere")
    assert [what for what in failures if not what.startswith(expected)] == []
    assert len(read_evidence(folder).complete) == 4
    assert code == bool(failures), said


def test_making_a_record_again_changes_nothing(folder, capsys):
    before = contents(folder)
    for logs in ([], [folder / "runs"]):
        code, said = call(capsys, "make", folder, *logs)
        assert code == 0, said
        assert contents(folder) == before
    code, said = call(capsys, "verify", folder)
    assert (code, said.count("\n")) == (0, 3)
    assert said.endswith("not checked: whether its claim was first; there is no git history here\n")
    assert re.search(r": verified\n +shown: .* tokens below 3\.25: 3\.\d{6} in 4 runs", said)


def test_every_number_of_the_record_is_scipys_on_the_logs(folder):
    logs = [segments[0] for segments in read_logs(folder)]
    losses = [events[-1]["val_loss"] for events in logs]
    seconds = [events[-1]["train_time_ms"] / 1000 for events in logs]
    test, sd = stats.ttest_1samp(losses, TARGET, alternative="less"), stats.tstd(losses)
    bound = test.confidence_interval(0.99).high
    page = page_of(folder)
    assert "**Shown**: mean loss on all validation tokens below 3.25: " in page
    row = f"| 4 | {np.mean(losses):.6f} | {sd:.6f} | {test.statistic:.4f} | {test.pvalue:.3g} |"
    assert f"{row} {bound:.5f} | {np.median(seconds):.2f} |" in page
    for seed, loss, second in zip(range(1000, 1004), losses, seconds, strict=True):
        assert f"| {seed} | {loss:.6f} | {second:.3f} |" in page
    assert "The runs used 8 x NVIDIA H100 80GB HBM3 and torch 2.13.0+cu128;" in page


def test_a_page_says_what_was_tried_before(tmp_path):
    for year, steps in ((2001, 14), (2002, 20), (2003, 14)):
        write_record(tmp_path, make_claim("Early", 4, **in_year(year, steps=steps)), [])
    folder = made(tmp_path, "Late")
    page = page_of(folder)
    assert "Claimed before it on this track: 2 step counts (14, 20).\n" in page
    assert "Its log folder had no other run on this track before its first." in page
    registry = folder / "runs" / "registry_2.jsonl"
    early = {"time": "2020-01-01T00:00:00+00:00", "claim": None}
    others = ((1, "a", "tiny"), (2, "a", "tiny"), (3, "b", "tiny"), (4, "c", "small"))
    for seed, sha256, track in others:
        facts = {"run_id": f"run{seed}", "seed": seed, "config_sha256": sha256, "track": track}
        small_record.register(registry, "start", **early, **facts)
    assert record.main(["make", str(folder)]) == 0
    assert "Its log folder had 3 other runs of 2 configurations on this track" in page_of(folder)


@pytest.mark.parametrize(("words", "changed", "sentence"), [
    (["Few", "--n", "3"], {}, "n = 3 must be 4 to 10000"),
    (["Few"], {"target": 3.3}, "--target 3.3: that of the track is 3.25. Leave --target out."),
    (["Few"], {"vocab_size": 32}, "--vocab-size 32: that of the track is 64. Leave --vocab"),
    (["Few"], {"val_tokens": 512}, "--val-tokens 512: that of the track is 1024. Leave --val"),
    (["../Few"], {}, "name '../Few' must be a CamelName"),
    (["Good"], {}, "File exists"),
    (["Few", "--", "--n", "4"], {}, "--n stands after --, where flags of the trainer are. Give it"),
    (["Few", "--", "--seed=4"], {}, "--seed: a claim chooses its seeds"),
    (["Few"], {"quick": True}, "--quick: a claim validates on all tokens of its track. Leave"),
])  # fmt: skip
def test_a_claim_that_breaks_a_rule_is_not_written(
    words, changed, sentence, folder, tmp_path, capsys, monkeypatch
):
    today = f"{record.datetime.now(record.UTC):%Y-%m-%d}_Good"
    shutil.copytree(folder, folder.with_name(today))
    known = {"val_tokens": small_record.VAL_TOKENS, "recipe": "record89"}
    config = make_claim().config | known | changed
    monkeypatch.setattr(record, "ask_trainer", lambda root, flags: config)
    before = contents(tmp_path)
    code, said = call(capsys, "claim", "--about", "x", *words)
    assert code == 2
    assert sentence in said, said
    assert contents(tmp_path) == before


@pytest.mark.parametrize("runs", [0, 1])
def test_a_record_with_too_few_runs_for_a_test_says_so_without_nan(runs, tmp_path, capsys):
    folder = write_record(tmp_path, make_claim(n=4), LOSSES[:runs])
    code, said = call(capsys, "make", folder)
    assert code == 1
    assert f"below 3.25: {runs} runs that count, too few for a test\n" in said
    assert "nan" not in said


@pytest.mark.parametrize(("day", "config"), [
    ("02", {}), ("02", {"val_every": 1000}),  # which changes no weight
    ("01", {}),  # in the same second
])  # fmt: skip
def test_the_luckiest_seeds_of_an_earlier_claim_make_no_second_one(day, config, tmp_path, capsys):
    write_record(tmp_path, make_claim("First"), LOSSES)
    created = f"2026-01-{day}T00:00:00+00:00"
    later = make_claim("Second", 4, 1004, created=created, config=config)
    code, said = call(capsys, "make", write_record(tmp_path, later, LOSSES[:4]))
    assert code == 1
    assert "seeds [1004, 1005, 1006, 1007] were claimed before, by First" in said


def test_no_record_is_verified_whose_track_does_not_fix_the_validation_tokens(
    folder, capsys, monkeypatch
):
    monkeypatch.setitem(TRACKS, "tiny", small_record.RULES._replace(val_sha256=""))
    code, said = call(capsys, "verify", folder)
    assert (code, "tiny has no val_sha256: add it" in said) == (1, True)


def test_runs_of_two_machines_are_one_record(tmp_path, capsys):
    folder = write_record(tmp_path / "records", make_claim(n=4), LOSSES[:4])
    runs = read_logs(folder)
    shutil.rmtree(folder / "runs")
    for name, part in (("here", runs[:1]), ("there", runs[2:])):
        small_record.write_logs(tmp_path / name, part)
    here, there = (tmp_path / name / "runs" for name in ("here", "there"))
    code, said = call(capsys, "make", folder, here)
    assert code == 1
    assert "seeds [1001, 1002, 1003] have no run, and 1 of 4 runs count" in said
    small_record.write_logs(tmp_path / "here", runs[:2])  # its registry has grown
    assert call(capsys, "make", folder, here, there)[0] == 0
    names = sorted(path.name for path in folder.glob("runs/registry*"))
    assert names == ["registry.jsonl", "registry_2.jsonl"]


def test_the_board_lists_records_in_order_and_claims_that_miss_the_target(tmp_path, capsys):
    for year, (name, steps) in enumerate((("Long", 14), ("Good", 12), ("Again", 12)), 2001):
        made(tmp_path, name, **in_year(year, steps=steps))
    failed = made(tmp_path, "Short", worse=1.0, config={"steps": 3})
    write_claim(tmp_path, make_claim("Planned", 4, 3000), small_record.SOURCE)
    code, said = call(capsys, "verify", failed)
    assert (code, "verified, and NOT shown" in said) == (0, True)
    assert "**Not shown**: mean loss" in page_of(failed)
    assert call(capsys, "make")[0] == 0
    pattern = (
        r"^\| ([^|]*) \| \S+ \| \[(\w+)\].*"
        r" \| 8 x NVIDIA H100 80GB HBM3 \| (\d+) \| ([\d.]+) \| \d+ \|"
    )
    tokens = {steps: f"{steps * small_record.BATCH / 1e6:.3f}" for steps in (3, 12, 14)}
    assert re.findall(pattern, page_of(tmp_path), re.M) == [
        ("", "Long", "14", tokens[14]), ("", "Again", "12", tokens[12]),
        ("**record**", "Good", "12", tokens[12]), ("target", "Short", "3", tokens[3]),
    ]  # fmt: skip


def test_the_board_changes_only_with_records_that_verify(tmp_path, capsys):
    made(tmp_path, "Long", **in_year(2001, steps=14))
    failed = made(tmp_path, "Short", worse=1.0, config={"steps": 3})
    before = contents(tmp_path)
    assert "tiny/tokens.svg" in before
    assert call(capsys, "make")[0] == 0
    assert contents(tmp_path) == before
    (failed / "README.md").write_text(page_of(failed).replace("**Not shown**", "**Shown**"))
    before = contents(tmp_path)
    code, said = call(capsys, "make", tmp_path / "tiny" / "2001-01-01_Long")
    assert (code, "NOT VERIFIED" in said, contents(tmp_path) == before) == (1, True, True)
    assert call(capsys, "make")[0] == 0
    assert contents(tmp_path)["README.md"] == before["README.md"]
    assert "**Not shown**" in page_of(failed), "pages follow from the logs"


def test_a_claim_of_a_track_without_a_board_is_verified_and_stands_on_none(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(TRACKS, "tiny", small_record.RULES._replace(ranked=False))
    folder = made(tmp_path, "Hello")
    assert call(capsys, "verify", folder)[0] == 0
    assert call(capsys, "make")[0] == 0
    assert "Hello" not in page_of(tmp_path)
    assert not (tmp_path / "tiny" / "tokens.svg").exists()


def test_on_a_track_won_by_time_each_hardware_has_its_own_records(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(TRACKS, "short", small_record.RULES._replace(in_time=True))
    made_in_this_order = [
        ("Eight", 8, "H100", 12, "8 x H100", ""), ("One", 1, "4090", 14, "1 x 4090", ""),
        ("Equal", 1, "4090", 13, "1 x 4090", "**record**"),
        ("Faster", 8, "H100", 11, "8 x H100", "**record**"),
        ("Fewer", 4, "H100", 10, "4 x H100", "**record**"),
        ("Later", 1, "4090", 13, "1 x 4090", ""),
        ("Processor", 1, None, 13, "1 x Xeon, threads: 2", "**record**"),
    ]  # fmt: skip
    for year, (name, ranks, gpu, steps, _, _) in enumerate(made_in_this_order, 2001):
        claim = make_claim(name, 4, track="short", **in_year(year, track="short", steps=steps))
        folder = write_record(tmp_path, claim, LOSSES[:4])
        runs = read_logs(folder)
        for ((header, *_),) in runs:
            header |= {"world_size": ranks, "env": small_record.ENV | {"gpu": gpu}}
        small_record.write_logs(folder, runs)
        assert call(capsys, "make", folder)[0] == 0
    assert call(capsys, "make")[0] == 0
    pattern = r"^\| ([^|]*) \| \S+ \| \[(\w+)\].*?\) \| (.+?) \| \d+ \|"
    rows = re.findall(pattern, page_of(tmp_path), re.M)
    places = {name: (hardware, place) for name, _, _, _, hardware, place in made_in_this_order}
    assert {name: (hardware, place) for place, name, hardware in rows} == places
    order = ["One", "Later", "Equal", "Processor", "Fewer", "Eight", "Faster"]
    assert [name for _, name, _ in rows] == order, "by hardware, the record last"


def test_a_page_shows_the_diff_from_the_claim_before_and_no_line_of_it_leaves_its_block(tmp_path):
    made(tmp_path, "First", **in_year(2001))
    files = small_record.SOURCE | {"optim/muon.py": b"````\n</details><b>\x1b[2J\n"}
    write_source(tmp_path, files)
    page = page_of(made(tmp_path, "Second", source_sha256=digest(files)))
    assert "The diff from the claim before it, First, has 7 lines in 1 files:" in page
    block = page.partition("`````diff\n")[2].partition("\n`````\n")[0]
    changed = ["-step:1/2 val_loss:1.0", "+````", "+</details><b>\\x1b[2J", " "]
    assert block.splitlines()[3:] == changed
