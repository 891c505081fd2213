"""Code that is not in the source hash does not run unseen."""

import json
import os
import subprocess
import sys

from small_run import ROOT

from runtime.source import read_sources, write_files

PROGRAM = """
import json, patches, tomllib
from pathlib import Path
from runtime.claim import provenance
print(json.dumps(provenance(Path.cwd())))
"""


def test_modules_neither_ours_nor_installed_are_named(tmp_path):
    clone, outside = tmp_path / "clone", tmp_path / "outside"
    write_files(read_sources(ROOT), clone)
    outside.mkdir()
    modules = {
        "patches": outside / "patches.py",
        "sitecustomize": outside / "sitecustomize.py",
        "tomllib": clone / "tomllib.py",  # hides a module of Python's
    }
    for path in modules.values():
        path.write_text("import math\n")
    environment = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
    environment["PYTHONPATH"] = f"{clone}{os.pathsep}{outside}"
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, cwd=clone, env=environment, capture_output=True, check=True)
    named = [f"{name} {path}" for name, path in modules.items()]
    assert json.loads(found.stdout)["modules_from_elsewhere"] == named
