"""The downloader against a real HTTP server that speaks the hub's protocol, each time in a process of its own."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data import cached_fineweb

ROOT = Path(__file__).resolve().parents[1]
OLD, NEW = "a" * 40, "b" * 40
PINNED = cached_fineweb.VARIANTS["10B"].revision
# main() with delays that a test can wait for
QUICK = "import sys, data.cached_fineweb as m; m.FIRST_DELAY_S = 0.01; sys.exit(m.main(sys.argv[1:]))"


def shard_bytes(seed: int, tokens: int = 3000) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    body = np.random.default_rng(seed).integers(0, 50257, tokens).astype("<u2")
    return header.tobytes() + body.tobytes()


class Hub:
    """The same files at three commits; `faults` names what goes wrong with the next GETs of a file, one by one."""

    def __init__(self) -> None:
        names = [f"{kind}_{split}.bin" for kind in ("fineweb", "finewebedu") for split in self.splits()]
        self.commits = {
            commit: {name: shard_bytes(first + index) for index, name in enumerate(names)}
            for first, commit in ((0, OLD), (100, NEW), (200, PINNED))
        }
        self.branches = {"main": OLD}
        self.faults: dict[str, list[str]] = {}
        self.gets: Counter[tuple[str, str]] = Counter()  # (revision, file)
        self.stalled = threading.Event()
        self.released = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @staticmethod
    def splits() -> list[str]:
        return ["val_000000", "train_000001", "train_000002", "train_000003"]

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def handler(hub):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def refuse(self, status: int, code: str) -> None:
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def answer(self, body: bool) -> None:
                owner, _, rest = self.path.removeprefix("/datasets/").partition("/resolve/")
                revision, _, name = rest.partition("/")
                commit = hub.branches.get(revision, revision)
                if not owner.startswith("kjj0/"):
                    return self.refuse(404, "EntryNotFound")
                if commit not in hub.commits:
                    return self.refuse(404, "RevisionNotFound")
                content = hub.commits[commit].get(name)
                if content is None:
                    return self.refuse(404, "EntryNotFound")
                fault, *later = hub.faults.get(name) or [""]
                if body:
                    hub.gets[revision, name] += 1
                    hub.faults[name] = later
                    if fault == "unavailable":
                        return self.refuse(503, "Unavailable")
                self.send_response(200)
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", commit)
                sent, claimed = content, len(content)
                if fault == "truncated":
                    sent, claimed = content[:-500], len(content) - 500
                elif fault == "wrong size" and body:
                    sent, claimed = content + b"\0\0", len(content) + 2
                elif fault == "changed":
                    sent = content[:-2] + bytes([content[-2] ^ 1, 0])
                elif fault in ("cut", "stall"):
                    sent = content[: len(content) // 2]
                self.send_header("Content-Length", str(claimed))
                self.end_headers()
                if body:
                    self.wfile.write(sent)
                if body and fault == "stall":
                    self.wfile.flush()
                    hub.stalled.set()
                    hub.released.wait(30)

        return Handler


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def place(tmp_path):
    """An empty folder for shards, and a command line whose hub is on the loopback."""
    home = tmp_path / "home"

    def environment(url: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(("HF_", "HUGGING"))}
        return kept | {"HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT)}

    def start(url: str, *arguments: str, program: tuple[str, ...] = ("-c", QUICK)) -> subprocess.Popen:
        command = [sys.executable, *program, *arguments, "--out", str(tmp_path / "out")]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment(url), cwd=tmp_path, **streams)

    def run(url: str, *arguments: str, **options) -> SimpleNamespace:
        process = start(url, *arguments, **options)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in err, err
        return SimpleNamespace(code=process.returncode, out=out, err=err)

    return SimpleNamespace(out=tmp_path / "out", start=start, run=run)


def shards_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def expected(hub: Hub, commit: str, prefix: str, count: int) -> dict[str, bytes]:
    names = [f"{prefix}_{split}.bin" for split in hub.splits()[: count + 1]]
    return {name: hub.commits[commit][name] for name in names}


def test_shards_arrive_whole_from_the_pinned_commit_and_are_fetched_once(hub, place):
    first = place.run(hub.url, "2", program=(str(ROOT / "data" / "cached_fineweb.py"),))
    assert first.code == 0, first.err
    assert "3/3 fineweb_train_000002.bin" in first.out
    assert shards_in(place.out) == expected(hub, PINNED, "fineweb", 2)
    assert hub.gets == {(PINNED, name): 1 for name in shards_in(place.out)}
    assert {path.name for path in place.out.iterdir()} == {*shards_in(place.out), "source.json"}

    (place.out / "fineweb_val_000000.bin").write_bytes(b"half a shard")
    second = place.run(hub.url, "2", program=("-m", "data.cached_fineweb"))
    assert second.code == 0, second.err
    assert shards_in(place.out) == expected(hub, PINNED, "fineweb", 2)
    assert hub.gets.total() == 4  # the broken one alone came again

    hub.close()
    third = place.run(hub.url, "2")
    assert third.code == 0, "with all shards in place no hub is needed"


def test_a_folder_keeps_the_revision_and_the_dataset_it_was_started_with(hub, place):
    assert place.run(hub.url, "1", "--variant", "edu10B").code == 0
    source = json.loads((place.out / "source.json").read_text())
    assert source == {"dataset": "kjj0/finewebedu10B-gpt2", "revision": OLD}

    hub.branches["main"] = NEW
    assert place.run(hub.url, "2", "--variant", "edu10B").code == 0
    assert shards_in(place.out) == expected(hub, OLD, "finewebedu", 2)

    moved = place.run(hub.url, "3", "--variant", "edu10B", "--revision", "main")
    assert moved.code == 2
    assert OLD in moved.err
    assert NEW in moved.err
    other = place.run(hub.url, "1", "--variant", "10B")
    assert other.code == 2
    assert "kjj0/finewebedu10B-gpt2" in other.err
    assert shards_in(place.out) == expected(hub, OLD, "finewebedu", 2)


def test_a_revision_asked_for_is_used_and_an_unknown_one_is_refused(hub, place):
    unknown = place.run(hub.url, "1", "--revision", "v9")
    assert unknown.code == 2
    assert "'v9'" in unknown.err
    assert list(place.out.iterdir()) == []
    assert place.run(hub.url, "1", "--revision", NEW).code == 0
    assert shards_in(place.out) == expected(hub, NEW, "fineweb", 1)


def test_a_cut_connection_a_short_file_and_a_busy_hub_are_survived(hub, place):
    hub.faults = {
        "fineweb_val_000000.bin": ["cut"],
        "fineweb_train_000001.bin": ["truncated", "wrong size", "changed"],
        "fineweb_train_000002.bin": ["unavailable"],
    }
    result = place.run(hub.url, "2")
    assert result.code == 0, result.err
    assert shards_in(place.out) == expected(hub, PINNED, "fineweb", 2)
    assert hub.gets[PINNED, "fineweb_val_000000.bin"] == 2
    assert hub.gets[PINNED, "fineweb_train_000001.bin"] == 4
    assert "fineweb_train_000001.bin: attempt 3 of 5 failed" in result.err


@pytest.mark.parametrize("fault", ["truncated", "wrong size", "changed"])
def test_a_file_that_never_comes_whole_is_an_error_and_leaves_nothing(hub, place, fault):
    hub.faults = {"fineweb_train_000001.bin": [fault] * 100}
    result = place.run(hub.url, "2")
    assert result.code == 1
    assert "gave up on fineweb_train_000001.bin" in result.err.splitlines()[-1]
    assert shards_in(place.out) == expected(hub, PINNED, "fineweb", 0)
    assert list(place.out.glob(".partial/*.bin")) == []
    assert hub.gets[PINNED, "fineweb_train_000001.bin"] == cached_fineweb.ATTEMPTS


def test_a_missing_file_is_named_and_not_asked_for_again(hub, place):
    del hub.commits[PINNED]["fineweb_train_000002.bin"]
    result = place.run(hub.url, "3")
    assert result.code == 1
    assert "fineweb_train_000002.bin is not in kjj0/fineweb10B-gpt2" in result.err
    assert "1 to 103" in result.err
    assert "attempt" not in result.err
    assert shards_in(place.out) == expected(hub, PINNED, "fineweb", 1)


def test_without_a_network_the_end_is_one_sentence(place):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    result = place.run(url, "1")
    assert result.code == 1
    *attempts, last = result.err.splitlines()
    assert len(attempts) == cached_fineweb.ATTEMPTS - 1
    assert last.startswith("error: gave up")
    assert url in last
    assert "HF_ENDPOINT" in last
    assert list(place.out.iterdir()) == []


def test_an_interrupt_leaves_no_half_file_and_the_next_call_goes_on(hub, place):
    hub.faults = {"fineweb_train_000001.bin": ["stall"]}
    process = place.start(hub.url, "1")
    assert hub.stalled.wait(30)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert shards_in(place.out) == expected(hub, PINNED, "fineweb", 0)
    hub.released.set()
    assert place.run(hub.url, "1").code == 0
    assert shards_in(place.out) == expected(hub, PINNED, "fineweb", 1)


@pytest.mark.parametrize(
    ("count", "variant", "allowed"),
    [("104", "10B", "1 to 103"), ("100", "edu10B", "1 to 99"), ("0", "100B", "1 to 1030")],
)
def test_a_number_of_shards_that_does_not_exist_is_refused(tmp_path, capsys, count, variant, allowed):
    assert cached_fineweb.main([count, "--variant", variant, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"N is {count}" in error
    assert allowed in error
    assert not (tmp_path / "out").exists()


def test_too_little_disk_space_is_found_before_the_first_byte(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cached_fineweb.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    assert cached_fineweb.main(["9", "--out", str(tmp_path)]) == 1
    assert "10 shards need 2.0 GB, but 1.0 GB are free" in capsys.readouterr().err
