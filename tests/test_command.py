"""What every command does: it finds its packages, and it ends quietly when nobody reads on."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import ROOT

from scripts import record


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone without an environment."""
    ignored = shutil.ignore_patterns("__pycache__", ".venv", ".git", "records", "tests", "logs")
    return shutil.copytree(ROOT, tmp_path / "clone", ignore=ignored)


def run_bare(clone: Path, *words: str) -> subprocess.CompletedProcess:
    """Start a program in a Python that has only the standard library."""
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True)


@pytest.mark.parametrize("program", ["scripts/significance.py", "-m data.own", "train_gpt.py"])
def test_a_program_that_lacks_a_package_starts_again_with_the_environment_of_run_sh(clone, program):
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "environment: $@"\n')
    python.chmod(0o755)
    done = run_bare(clone, *program.split(), "a folder", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"environment: {program} a folder --json\n"


def test_without_an_environment_every_program_says_in_one_line_what_to_do(clone):
    scripts = [path for path in clone.glob("scripts/*.py") if "__main__" in path.read_text()]
    assert len(scripts) >= 8
    modules = [["-m", "data.own"], ["-m", "data.prose"]]
    for program in (*([str(path)] for path in scripts), *modules, ["train_gpt.py"]):
        done = run_bare(clone, *program, "logs", "--to", "model")
        assert done.returncode == 2, program
        assert re.fullmatch("error: .*, which makes .venv, .*\n", done.stderr), done.stderr


def test_no_part_of_a_flag_stands_for_one_that_runs_code_of_others(capsys):
    with pytest.raises(SystemExit, match="2"):
        record.main(["verify", "records/small/2026-11-24_Record89", "--re"])
    assert "unrecognized arguments: --re" in capsys.readouterr().err


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
@pytest.mark.parametrize(("words", "code"), [
    ("train_gpt.py --track tiny --steps 0", 2), ("scripts/bench.py step -- --steps 0", 2),
    ("scripts/significance.py records/small/2026-11-24_Record89", 0),
])  # fmt: skip
def test_a_closed_output_changes_no_exit_code(words, code, closed):
    words = f"{sys.executable} {words} {closed}"
    done = subprocess.run(words, shell=True, cwd=ROOT, capture_output=True)
    assert (done.returncode, b"Traceback" in done.stderr) == (code, False)
