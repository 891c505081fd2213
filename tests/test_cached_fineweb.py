"""The downloader against a real HTTP server that speaks the hub's protocol, in processes."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from data import cached_fineweb
from data.shards import write_shard

ROOT = Path(__file__).resolve().parents[1]
NAMES = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]


class Handler(BaseHTTPRequestHandler):
    """Answers with the files of the pinned commit and with their list."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.server
        hub.headers_seen += [name.lower() for name in self.headers]
        name = self.path.rpartition("/")[2]
        content = b""
        if self.path.startswith("/api/datasets/kjj0/fineweb10B-gpt2/tree/"):
            content = file_list(hub.files)
        elif cached_fineweb.REVISION in self.path:
            content = hub.files.get(name, b"")
        self.send_response(200 if content else 404)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", cached_fineweb.REVISION)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
            hub.sent.append(name)

    def log_message(self, *arguments):
        pass


def file_list(files):
    found = []
    for name, content in files.items():
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        found.append({"type": "file", "path": name, "size": len(content), "oid": "0" * 40})
        found[-1]["lfs"] = lfs
    return json.dumps(found).encode()


@pytest.fixture
def hub(tmp_path):
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.files, hub.sent, hub.headers_seen = {}, [], []
    for seed, name in enumerate(NAMES):
        write_shard(tmp_path / name, np.random.default_rng(seed).integers(0, 50257, 300_000))
        hub.files[name] = (tmp_path / name).read_bytes()
    threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True).start()
    yield hub
    hub.shutdown()
    hub.server_close()


@pytest.fixture
def fetch(tmp_path, hub):
    """Downloads N shards from the hub into tmp_path/out; returns exit code, stdout and stderr."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret"}

    def fetch(count):
        command = [sys.executable, "-m", "data.cached_fineweb", str(count)]
        command += ["--out", str(tmp_path / "out")]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return fetch


def shards_in(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def test_shards_arrive_whole_and_once_from_the_pinned_commit_without_a_token(hub, fetch, tmp_path):
    code, out, err = fetch(1)
    assert code == 0, err
    assert f"fetching 2 shards, 0.4 GB, into {tmp_path / 'out'}" in out
    assert set(shards_in(tmp_path / "out")) == {NAMES[0], NAMES[2]}
    code, out, err = fetch(2)
    assert code == 0, err
    assert shards_in(tmp_path / "out") == hub.files
    assert sorted(set(hub.sent) & set(NAMES)) == sorted(name for name in hub.sent if name in NAMES)
    assert "authorization" not in hub.headers_seen
    hub.shutdown()
    assert fetch(2)[0] == 0, "with all shards in place no hub is needed"


def test_a_cut_shard_is_refused_with_the_fix(fetch, tmp_path):
    assert fetch(1)[0] == 0
    os.truncate(tmp_path / "out" / NAMES[0], 5000)
    code, _, err = fetch(1)
    assert code == 2
    assert f"{NAMES[0]}: 300,000 tokens take" in err
    assert "Delete the file" in err


@pytest.mark.parametrize("count", [0, 104])
def test_a_number_of_shards_that_does_not_exist_is_refused(tmp_path, capsys, count):
    assert cached_fineweb.main([str(count), "--out", str(tmp_path / "out")]) == 2
    assert f"N is {count}; kjj0/fineweb10B-gpt2 has 1 to 103" in capsys.readouterr().err


def test_a_fault_told_by_a_hub_does_not_steer_the_terminal(monkeypatch, capsys):
    def fail(count, folder):
        raise OSError("hub is down\x1b[2J")

    monkeypatch.setattr(cached_fineweb, "fetch", fail)
    assert cached_fineweb.main(["1"]) == 1
    assert "\x1b" not in capsys.readouterr().err
