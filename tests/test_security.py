"""The promises of SECURITY.md: hostile downloads, documents, logs, records and checkpoints; what no log tells."""

import ast
import gzip
import hashlib
import json
import pickle
import platform
import re
import socket
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import small_run
import torch
from test_architecture import LIBRARY, SCRIPTS
from test_cached_fineweb import Hub, hub, place  # noqa: F401  # fixtures
from test_fineweb import vocabulary  # noqa: F401  # a fixture

from data import cached_fineweb, corpus, fineweb
from runtime import checkpoint

ROOT = Path(__file__).resolve().parents[1]
STEERING = "\x1b[2J\x1b]0;owned\x07\r\u202e"  # clears a terminal, names it, overwrites a line, turns text around


class Exploit:
    """What a pickle can do to whoever loads it."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Callable, tuple[Path]]:
        return Path.touch, (self.marker,)


# ---------------------------------------------------------------------------------------------------------------------
# The promises


def promises() -> list[str]:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    return re.split(r"\n- ", text.partition("## What is promised\n")[2].partition("\n## ")[0])[1:]


def test_every_promise_names_its_tests_and_every_test_it_names_exists():
    there = {name for path in ROOT.glob("tests/test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(),
                                                                                  re.M)}  # fmt: skip
    assert len(promises()) > 5
    for promise in promises():
        named = set(re.findall(r"`(test_\w+)`", promise))
        assert named, promise
        assert named <= there, named - there


# ---------------------------------------------------------------------------------------------------------------------
# Nothing that is read is executed

LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "runpy", "code",
           "tarfile", "zipfile"}  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "np.load", "numpy.load"}
METHODS = {"exec_module", "import_module", "unpack_archive", "extractall"}  # of whatever object
KNOWN = {
    ("bench_optim.py", "exec_module"), ("compare.py", "shell"),  # --peer FILE.py and --run COMMAND
    ("preflight.py", "import_module"),  # whether the packages of requirements.txt can be imported
}  # fmt: skip


def dangers(source: str) -> set[str]:
    """What in a module can execute what it reads."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found |= LOADERS & {part for name in names for part in name.split(".")}
        elif isinstance(node, ast.Call):
            found |= CALLS & {ast.unparse(node.func)} | METHODS & {getattr(node.func, "attr", "")}
            found |= {"shell", "allow_pickle"} & {str(word.arg) for word in node.keywords}
    return found


@pytest.mark.parametrize("path", [*LIBRARY, *SCRIPTS], ids=lambda path: path.name)
def test_no_module_has_what_it_takes_to_execute_what_it_reads(path):
    assert {(path.name, danger) for danger in dangers(path.read_text(encoding="utf-8"))} <= KNOWN


@pytest.mark.parametrize("source", [
    "import pickle", "from ruamel import yaml", "torch.load('x')", "np.memmap('x', allow_pickle=True)",
    "eval(line)", "os.system(line)", "subprocess.run(line, shell=True)", "import tarfile", "module.exec_module()",
])  # fmt: skip
def test_each_way_to_execute_what_is_read_is_seen(source):
    assert dangers(source)


def test_a_pyarrow_that_runs_code_from_a_parquet_file_is_refused(tmp_path, monkeypatch):
    for version, refused in (("14.0.0", True), ("9.0.1", True), ("15.0.0", False)):
        pyarrow, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
        pyarrow.__version__, pyarrow.parquet, pyarrow.ArrowException = version, parquet, OSError
        parquet.ParquetFile = Path.touch  # leaves a trace and has no batches
        monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
        error, sentence = (fineweb.InputError, "pyarrow>=15") if refused else (AttributeError, "iter_batches")
        with pytest.raises(error, match=sentence):
            list(fineweb.read_documents(tmp_path / f"{version}.parquet", "text"))
        assert (tmp_path / f"{version}.parquet").exists() != refused


def damage_with_sums(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint and its checksum."""
    (folder / name).write_bytes(content)
    sums = json.loads((folder / checkpoint.SUMS).read_text())
    (folder / checkpoint.SUMS).write_text(json.dumps(sums | {name: hashlib.sha256(content).hexdigest()}))


@pytest.fixture
def saved(tmp_path):
    """A checkpoint that can be read."""
    tensors, state = {"x": torch.zeros(2)}, {name: kind() for name, kind in checkpoint.FIELDS.items()} | {"step": 1}
    folder = checkpoint.write(tmp_path / "run", checkpoint.Snapshot(tensors, tensors, state))
    assert checkpoint.read(folder).state["step"] == 1
    return folder


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.OPTIM, checkpoint.STATE])
def test_a_pickle_in_a_checkpoint_is_refused_and_not_executed(name, saved, tmp_path):
    damage_with_sums(saved, name, pickle.dumps(Exploit(tmp_path / "executed")))
    with pytest.raises(checkpoint.CheckpointError, match="step_000001"):
        checkpoint.read(saved)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.OPTIM, checkpoint.STATE, checkpoint.SUMS])
def test_a_link_in_a_checkpoint_is_refused(name, saved):
    (saved / name).symlink_to((saved / name).rename(saved.parent / "elsewhere"))
    with pytest.raises(checkpoint.CheckpointError, match=f"{name} is missing or no regular file"):
        checkpoint.read(saved)


# ---------------------------------------------------------------------------------------------------------------------
# Documents and the corpus


def bomb(path: Path, content: bytes, count: int) -> Path:
    """A small file that unpacks to `content` so many times."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(count):
            file.write(content)
    return path


def test_a_gzip_bomb_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "MAX_DOCUMENT", 1 << 20)
    path = bomb(tmp_path / "bomb.jsonl.gz", b'{"text": "short"}\n' + b" " * (1 << 20), 1)
    assert path.stat().st_size < 1 << 12
    path = bomb(tmp_path / "bomb.jsonl.gz", b" " * (1 << 20), 64)
    tracemalloc.start()
    with pytest.raises(fineweb.InputError, match=r"line 1 .*longer than 1,048,576 bytes"):
        list(fineweb.read_documents(path, "text"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_lines_and_documents_up_to_the_limit_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "MAX_DOCUMENT", 100)
    line = json.dumps({"text": "x" * 86})
    for name, content, fits in (("a.jsonl", f"{line}\n", True), ("b.jsonl", f" {line}\n", False),
                                ("a.txt", "x" * 100, True), ("b.txt", "x" * 101, False)):  # fmt: skip
        (tmp_path / name).write_text(content)
        if fits:
            assert len(next(fineweb.read_documents(tmp_path / name, "text"))) >= 86
        else:
            with pytest.raises(fineweb.InputError, match="100 bytes"):
                next(fineweb.read_documents(tmp_path / name, "text"))


@pytest.mark.parametrize("line", [b"[" * 90_000, b'{"text": ' + b"9" * 5_000 + b"}", b'{"text": "\xff"}', b"\0"])
def test_a_line_made_to_break_the_json_reader_is_refused_by_its_number(line, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "x"}\n' + line)
    with pytest.raises(fineweb.InputError, match="line 2 is not JSON"):
        list(fineweb.read_documents(path, "text"))


@pytest.mark.parametrize("name", ["../outside", "sub/name", "/absolute"])
def test_a_name_of_shards_that_leads_out_of_the_folder_is_refused(name, tmp_path, vocabulary, capsys):  # noqa: F811
    (tmp_path / "in.txt").write_text("some text " * 99)
    words = [str(tmp_path / "in.txt"), "--out", str(tmp_path / "out"), "--encoding", str(vocabulary), "--name", name]
    assert fineweb.main(words) == 2
    assert f"--name {name} is no part of a file name" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"[" * 90_000, b"\xff", b'{"sha256": 1}'])
def test_a_manifest_of_any_shape_is_a_corpus_that_is_not_built(content, tmp_path):
    for name in (corpus.TRAIN, corpus.VAL, corpus.VOCAB):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / corpus.MANIFEST).write_bytes(content)
    assert corpus._read_built(tmp_path, {}, {}) is None


def test_sources_that_were_tampered_with_are_refused_and_never_run(tmp_path, monkeypatch, capsys):
    for content in (b"raise SystemExit  # " + b"x" * 600, b"\xff" * 600):
        (tmp_path / "package.py").write_bytes(content)
        monkeypatch.setattr(corpus, "_package_folder", lambda package, version: tmp_path)
        assert corpus.main(["--out", str(tmp_path / "out")]) == 2
        assert "Installed files are not the released ones" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Downloads


class HostileHub:
    """A hub that remembers what it was sent, and answers with `headers` of its own."""

    def __init__(self, hub: Hub):  # noqa: F811
        self.received: list[dict[str, str]] = []
        self.headers: dict[str, str] = {}
        hostile, honest = self, hub.server.RequestHandlerClass

        class Handler(honest):  # type: ignore[misc, valid-type]
            def answer(self, body: bool) -> None:
                hostile.received.append({name.lower(): value for name, value in self.headers.items()})
                super().answer(body)

            def send_header(self, name: str, value: str) -> None:
                super().send_header(name, hostile.headers.get(name, value))

        hub.server.RequestHandlerClass = Handler


def test_no_hub_is_sent_a_token(hub, place, monkeypatch):  # noqa: F811
    hostile = HostileHub(hub)
    home = place.out.parent / "home"
    home.mkdir()
    (home / "token").write_text("hf_secretInAFile")
    sent_by_default = {"HF_TOKEN": "hf_secretInTheEnvironment", "HF_HUB_ETAG_TIMEOUT": "10"}
    code = f"import os; os.environ |= {sent_by_default}; import runpy; runpy.run_module('data.cached_fineweb', " \
           f"run_name='__main__')"  # fmt: skip
    done = place.run(hub.url, "1", program=("-c", code))
    assert done.code == 0, done.err
    assert len(hostile.received) > 4
    assert "secret" not in str(hostile.received)


@pytest.mark.parametrize(("headers", "sentence", "code"), [
    ({"X-Repo-Commit": "../../../elsewhere"}, "does not say which commit", 1),
    ({"ETag": '"0123"'}, "tells no SHA-256, so nobody vouches for its", 0),
], ids=["commit", "etag"])  # fmt: skip
def test_what_a_hub_says_is_checked_or_said_to_be_unchecked(headers, sentence, code, hub, place):  # noqa: F811
    HostileHub(hub).headers = headers
    done = place.run(hub.url, "1", "--revision", "main")
    assert (done.code, sentence in done.err) == (code, True), done.err
    assert code == 0 or sorted(path.name for path in place.out.iterdir()) == []


def test_a_fault_told_by_a_hub_does_not_steer_the_terminal(monkeypatch, capsys):
    def fail() -> None:
        raise OSError(f"hub is down{STEERING}")

    monkeypatch.setattr(cached_fineweb, "FIRST_DELAY_S", 0.0)
    with pytest.raises(cached_fineweb.DownloadError, match=r"hub is down\[2J") as error:
        cached_fineweb.with_retries("shard", fail)
    assert all(char.isprintable() or char == "\n" for char in str(error.value) + capsys.readouterr().err)


def test_a_file_larger_than_a_shard_is_refused_before_its_first_byte(hub, place):  # noqa: F811
    small = "import sys, data.cached_fineweb as m; m.SHARD_BYTES = 5_000; sys.exit(m.main(sys.argv[1:]))"
    done = place.run(hub.url, "1", program=("-c", small))
    assert (done.code, "a shard has at most 5,000" in done.err) == (1, True), done.err
    assert not hub.gets


@pytest.mark.parametrize("content", [
    "", "[]", "{}", "[" * 90_000, '{"dataset": "kjj0/fineweb10B-gpt2", "revision": "refs/pr/1"}',
    json.dumps({"dataset": STEERING, "revision": "a" * 40}),
], ids=range(6))  # fmt: skip
def test_a_source_json_that_pins_no_commit_is_refused(content, tmp_path):
    (tmp_path / "source.json").write_text(content)
    with pytest.raises(cached_fineweb.BadInput, match="names no dataset and commit"):
        cached_fineweb.read_source(tmp_path / "source.json")


# ---------------------------------------------------------------------------------------------------------------------
# What a log keeps quiet


def test_no_secret_of_the_environment_gets_into_a_log(tmp_path, monkeypatch):
    names = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "OPENAI_API_KEY", "SSH_AUTH_SOCK",
             "https_proxy", "USER", "LOGNAME", "HOSTNAME", "TORCHINDUCTOR_REMOTE_CACHE_PASSWORD", "ANYTHING")
    for name in names:
        monkeypatch.setenv(name, f"secret-of-{name}")
    monkeypatch.setenv("HOME", str(tmp_path / "secret-home"))
    for module, function in ((platform, "node"), (socket, "gethostname")):
        monkeypatch.setattr(module, function, lambda: "secret-host")
    done = small_run.run(small_run.write_data(tmp_path / "data"), tmp_path / "logs", steps=4)
    assert done.code == 0, done.err
    written = {path: path.read_bytes() for path in (tmp_path / "logs").rglob("*") if path.is_file()}
    assert {path.suffix for path in written} >= {".jsonl", ".py"}
    for path, content in written.items():
        assert b"secret-" not in content, path
    assert "secret-" not in done.out + done.err
