"""Code that is not in the source hash does not run unseen."""

import json
import os
import py_compile
import shutil
import subprocess
import sys

import pytest
from small_run import ROOT

from runtime.log import read_sources, write_files

TOLD = "print(json.dumps(provenance(Path.cwd())))"
SEEN = "import json\nfrom pathlib import Path\nfrom runtime.claim import provenance\n" + TOLD


@pytest.fixture
def clone(tmp_path):
    """A copy of the source."""
    write_files(read_sources(ROOT), tmp_path / "clone")
    return tmp_path / "clone"


def python(clone, code, *pythonpath):
    """What a program in the clone says."""
    variables = {"PYTHONPATH": os.pathsep.join(map(str, [clone, *pythonpath]))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=clone, capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if name[:6] != "PYTHON"} | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bytecode_that_was_changed_beside_the_source_is_not_read(clone):
    path = clone / "runtime" / "errors.py"
    honest, when = path.read_text(), path.stat()
    path.write_text(f"print('tampered')\n{honest}"[: len(honest) - 1] + "\n")
    os.utime(path, ns=(when.st_atime_ns, when.st_mtime_ns))
    py_compile.compile(str(path))
    path.write_text(honest)
    os.utime(path, ns=(when.st_atime_ns, when.st_mtime_ns))
    assert python(clone, "import runtime.errors") == "tampered\n"  # as a library it can be

    program = """
import runpy, sys
sys.argv = ["train_gpt.py", "--print-config"]
try:
    runpy.run_path("train_gpt.py", run_name="__main__")
except SystemExit as ended:
    assert ended.code in (0, None), ended.code
"""
    said = python(clone, program + SEEN)
    assert "tampered" not in said
    seen = json.loads(said.splitlines()[-1])
    assert seen["sys_flags"]["pycache"] == "fresh"
    assert seen["sys_flags"]["pythonpath"] == str(clone)
    assert seen["modules_from_elsewhere"] == []


def test_modules_neither_ours_nor_installed_are_named_and_bytecode_of_ours_is_told(clone, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "sitecustomize.py").write_text("import math\n")
    (clone / "tomllib.py").write_text("")  # hides a module of Python's
    shutil.copy(clone / "tomllib.py", outside / "patches.py")
    seen = json.loads(python(clone, f"import tomllib, patches\n{SEEN}", outside))
    assert seen["modules_from_elsewhere"] == [
        f"patches {outside / 'patches.py'}", f"sitecustomize {outside / 'sitecustomize.py'}",
        f"tomllib {clone / 'tomllib.py'}",
    ]  # fmt: skip
    assert seen["sys_flags"]["pycache"] == "beside the source"
