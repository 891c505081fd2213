"""The check of the environment as a command: what it prints, its exit code, and a torch that is missing or broken."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.preflight import Finding
from scripts import check_env

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "check_env.py"


def command(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", str(SCRIPT), *words], cwd=folder, env=os.environ | variables, capture_output=True,
        text=True,
    )  # fmt: skip


def broken_package(folder: Path, name: str, code: str) -> str:
    """A folder for PYTHONPATH in which importing `name` runs this code."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(code)
    return str(folder)


def test_this_machine_is_a_go_from_any_folder_and_nothing_is_left_behind(tmp_path):
    done = command(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("go, ")
    for word in ("Python", "torch", "numpy", "GPU", "process groups", "CPU", "compilation", "GiB free", "open files"):
        assert word in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "No module named 'torch'"),
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart.so.13"),
        ("import torch.nn", "'torch' is not a package"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise ImportError('one\\n  two \\x1b[31m' + 1000 * 'x')", "ImportError: one two"),
    ],
    ids=["missing", "library", "package", "bug", "long"],
)
def test_a_torch_that_is_missing_or_broken_is_a_no_go_and_no_traceback(tmp_path, code, reason):
    done = command(tmp_path, PYTHONPATH=broken_package(tmp_path / "broken", "torch", code))
    assert done.returncode == 2
    assert done.stderr == ""
    [line] = [line for line in done.stdout.splitlines() if line.startswith("stop")]
    assert line.startswith("stop  torch cannot be imported: ")
    assert reason in line
    assert len(line) < 300
    assert "\x1b" not in line
    assert "ok    numpy" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("no-go: 1 to mend")


def test_json_holds_the_verdict_and_every_finding(monkeypatch, capsys):
    findings = [Finding("ok", "disk"), Finding("stop", "torch is broken", "install it")]
    monkeypatch.setattr(check_env, "environment_findings", lambda: findings)
    assert check_env.main(["--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {
        "go": False,
        "findings": [
            {"level": "ok", "what": "disk", "fix": ""},
            {"level": "stop", "what": "torch is broken", "fix": "install it"},
        ],
    }


def test_an_unknown_flag_is_bad_input(capsys):
    with pytest.raises(SystemExit) as stopped:
        check_env.main(["--jsn"])
    assert stopped.value.code == 2
