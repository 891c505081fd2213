"""Code that is not in the source hash does not run unseen."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from small_run import ROOT

from runtime.source import read_sources, write_files

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


def test_modules_neither_ours_nor_installed_are_named(clone, tmp_path):
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
