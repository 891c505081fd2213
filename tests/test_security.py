"""The promises of SECURITY.md: each names tests that exist; nothing that is read is executed.

The tests of hostile shards, logs, records and checkpoints stand with those of their readers.
"""

import ast
import platform
import re
import socket
from pathlib import Path

import pytest
import small_run

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("optim", "kernels", "data", "runtime", "claims", "scripts")
MODULES = [ROOT / "train_gpt.py"]
for folder in FOLDERS:
    MODULES += sorted((ROOT / folder).rglob("*.py"))

LOADERS = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "runpy", "code"}
LOADERS |= {"tarfile", "zipfile"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
CALLS |= {"torch.load", "np.load", "numpy.load"}
METHODS = {"exec_module", "import_module", "unpack_archive", "extractall"}  # of whatever object
KEYWORDS = {"shell", "allow_pickle"}
KNOWN = {
    ("bench.py", "runpy"),  # --against FILE.py
    ("compare.py", "shell"),  # --run COMMAND
    ("preflight.py", "import_module"),  # can the packages of requirements.txt be imported?
}


def dangers(source: str) -> set[str]:
    """What in a module can execute what it reads."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names.append(getattr(node, "module", None) or "")
            for name in names:
                found |= LOADERS & set(name.split("."))
        elif isinstance(node, ast.Call):
            found |= CALLS & {ast.unparse(node.func)}
            found |= METHODS & {getattr(node.func, "attr", "")}
            found |= KEYWORDS & {str(word.arg) for word in node.keywords}
    return found


def test_every_promise_names_its_tests_and_every_test_it_names_exists() -> None:
    there = set()
    for path in ROOT.glob("tests/test_*.py"):
        there |= set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M))
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = text.partition("## What is promised\n")[2].partition("\n## ")[0]
    promises = re.split(r"\n- ", section)[1:]
    assert len(promises) > 5
    for promise in promises:
        named = set(re.findall(r"`(test_\w+)`", promise))
        assert named, promise
        assert named <= there, named - there


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_has_what_it_takes_to_execute_what_it_reads(path: Path) -> None:
    found = {(path.name, danger) for danger in dangers(path.read_text(encoding="utf-8"))}
    assert found <= KNOWN


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from ruamel import yaml", "torch.load('x')", "import tarfile", "eval(line)",
     "np.memmap('x', allow_pickle=True)", "os.system(line)", "subprocess.run(line, shell=True)",
     "module.exec_module()"],
)  # fmt: skip
def test_each_way_to_execute_what_is_read_is_seen(source: str) -> None:
    assert dangers(source)


def test_no_secret_of_the_environment_gets_into_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "https_proxy", "USER", "HOSTNAME", "ANYTHING",
                 "TORCHINDUCTOR_REMOTE_CACHE_PASSWORD"):  # fmt: skip
        monkeypatch.setenv(name, f"secret-of-{name}")
    monkeypatch.setenv("HOME", str(tmp_path / "secret-home"))
    for module, function in ((platform, "node"), (socket, "gethostname")):
        monkeypatch.setattr(module, function, lambda: "secret-host")
    done = small_run.run(small_run.write_data(tmp_path / "data"), tmp_path / "logs", steps=4)
    assert done.code == 0, done.err
    written = [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    assert {path.suffix for path in written} >= {".jsonl", ".py"}
    for path in written:
        assert b"secret-" not in path.read_bytes(), path
    assert "secret-" not in done.out + done.err
