"""Promises of SECURITY.md that belong to no single part: nothing is executed, no secret is kept."""

import platform
import re
import socket

import pytest
import small_run
from test_architecture import MODULES

# What can execute what it reads.
DANGERS = re.compile(
    r"^ *(?:import|from) +(pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve|yaml|runpy|code"
    r"|tarfile|zipfile)\b"
    r"|(?<![\w.])(eval|exec|__import__|os\.system|os\.popen|torch\.load|np\.load)\("
    r"|\.(exec_module|import_module|unpack_archive|extractall)\("
    r"|\b(shell|allow_pickle)=",
    re.MULTILINE,
)
KNOWN = {
    "prose.py": ["zipfile"],  # text inside wheels whose SHA-256 is pinned
    "export.py": ["exec_module"],  # the file that it has just written, of this source
}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_has_what_it_takes_to_execute_what_it_reads(path):
    found = DANGERS.finditer(path.read_text(encoding="utf-8"))
    assert [match[match.lastindex] for match in found] == KNOWN.get(path.name, [])


def test_no_secret_of_the_environment_gets_into_a_log(tmp_path, monkeypatch):
    remote_cache = "TORCHINDUCTOR_REMOTE_CACHE_PASSWORD"
    for name in ("HF_TOKEN", "https_proxy", "USER", "HOSTNAME", remote_cache, "ANYTHING"):
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
