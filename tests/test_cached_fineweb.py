"""The downloader against a real HTTP server that speaks the hub's protocol, in processes."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from data import cached_fineweb
from data.shards import write_shard

ROOT = Path(__file__).resolve().parents[1]
NAMES = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]


class Hub:
    """Serves the files of the pinned commit."""

    def __init__(self, folder):
        self.files = {}
        for seed, name in enumerate(NAMES):
            tokens = np.random.default_rng(seed).integers(0, 50257, 300_000)
            write_shard(folder / name, tokens)
            self.files[name] = (folder / name).read_bytes()
        self.gets = Counter()
        self.authorized = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def tree(self):
        files = []
        for name, content in self.files.items():
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}
            file = {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
            files.append(file | {"lfs": lfs | {"pointerSize": 134}})
        return json.dumps(files).encode()

    def handler(hub):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def answer(self, body):
                hub.authorized |= "authorization" in self.headers
                name = self.path.rpartition("/")[2]
                content = hub.files.get(name)
                if self.path.startswith("/api/datasets/kjj0/fineweb10B-gpt2/tree/"):
                    content = hub.tree()
                elif cached_fineweb.REVISION not in self.path:
                    content = None
                elif body:
                    hub.gets[name] += 1
                self.send_response(200 if content else 404)
                self.send_header("ETag", f'"{hashlib.sha256(content or b"").hexdigest()}"')
                self.send_header("X-Repo-Commit", cached_fineweb.REVISION)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                if body and content:
                    self.wfile.write(content)

        return Handler


@pytest.fixture
def hub(tmp_path):
    (tmp_path / "hub").mkdir()
    hub = Hub(tmp_path / "hub")
    yield hub
    hub.close()


@pytest.fixture
def fetch(tmp_path, hub):
    """Downloads N shards from the hub into tmp_path/out; returns exit code, stdout and stderr."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("hf_secret")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    environment |= {"NO_PROXY": "127.0.0.1", "HF_TOKEN": "hf_secret"}

    def fetch(count):
        command = [sys.executable, "-m", "data.cached_fineweb", str(count)]
        command += ["--out", str(tmp_path / "out")]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return fetch


def shards_in(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def test_shards_arrive_whole_from_the_pinned_commit_and_are_fetched_once(hub, fetch, tmp_path):
    code, out, err = fetch(1)
    assert code == 0, err
    assert f"fetching 2 shards, 0.4 GB, into {tmp_path / 'out'}" in out
    assert set(shards_in(tmp_path / "out")) == {NAMES[0], NAMES[2]}
    code, out, err = fetch(2)
    assert code == 0, err
    assert "fetching 1 shards" in out
    assert shards_in(tmp_path / "out") == hub.files
    assert hub.gets == dict.fromkeys(NAMES, 1)
    hub.close()
    assert fetch(2)[0] == 0, "with all shards in place no hub is needed"


def test_no_hub_is_sent_a_token(hub, fetch):
    assert fetch(1)[0] == 0
    assert hub.gets.total() == 2
    assert not hub.authorized


def test_a_cut_shard_is_refused_and_fetched_again_once_it_is_deleted(hub, fetch, tmp_path):
    assert fetch(1)[0] == 0
    os.truncate(tmp_path / "out" / NAMES[0], 5000)
    code, _, err = fetch(1)
    assert code == 2
    assert f"{NAMES[0]}: 300,000 tokens take" in err
    assert "Delete the file" in err
    (tmp_path / "out" / NAMES[0]).unlink()
    assert fetch(1)[0] == 0
    assert shards_in(tmp_path / "out")[NAMES[0]] == hub.files[NAMES[0]]


@pytest.mark.parametrize("count", [0, 104])
def test_a_number_of_shards_that_does_not_exist_is_refused(tmp_path, capsys, count):
    assert cached_fineweb.main([str(count), "--out", str(tmp_path / "out")]) == 2
    assert f"N is {count}; kjj0/fineweb10B-gpt2 has 1 to 103" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_fault_told_by_a_hub_does_not_steer_the_terminal(monkeypatch, capsys):
    def fail(count, folder):
        raise OSError("hub is down\x1b[2J")

    monkeypatch.setattr(cached_fineweb, "fetch", fail)
    assert cached_fineweb.main(["1"]) == 1
    assert "\x1b" not in capsys.readouterr().err
