"""Promises of SECURITY.md that belong to no single part: nothing is executed, no secret is kept."""

import ast
import platform
import socket

import pytest
import small_run
from test_architecture import MODULES

LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml",
           "runpy", "code", "tarfile", "zipfile"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen",
         "torch.load", "np.load", "numpy.load"}
METHODS = {"exec_module", "import_module", "unpack_archive", "extractall"}  # of any object
KNOWN = {
    ("prose.py", "zipfile"),  # text inside wheels whose SHA-256 is pinned
    ("export.py", "exec_module"),  # the file that it has just written, of this repository's source
}


def dangers(source: str) -> set[str]:
    """What in a module can execute what it reads."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found |= LOADERS & set(".".join(names).split("."))
        elif isinstance(node, ast.Call):
            found |= CALLS & {ast.unparse(node.func)} | METHODS & {getattr(node.func, "attr", "")}
            found |= {"shell", "allow_pickle"} & {str(word.arg) for word in node.keywords}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_has_what_it_takes_to_execute_what_it_reads(path):
    found = {(path.name, danger) for danger in dangers(path.read_text())}
    assert found == {known for known in KNOWN if known[0] == path.name}


def test_no_secret_of_the_environment_gets_into_a_log(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "https_proxy", "USER",
                 "HOSTNAME", "TORCHINDUCTOR_REMOTE_CACHE_PASSWORD", "ANYTHING"):
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
