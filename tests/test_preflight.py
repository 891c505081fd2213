"""A fit machine is a go, each fault has its fix, and --dry-run leaves nothing behind."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_run import STEPS, arguments, run_words, write_data

from runtime import preflight
from runtime.preflight import GIB, disk_finding

ROOT = Path(__file__).resolve().parents[1]


def faults(findings):
    return [(finding.level, finding.what) for finding in findings if finding.level != "ok"]


# ---- check_env.py


def check_env_py(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", str(ROOT / "scripts" / "check_env.py")]
    environment = os.environ | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_this_machine_is_a_go_from_any_folder_and_nothing_is_left_behind(tmp_path):
    done = check_env_py(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "go"
    for word in ("Python", "torch", "numpy", "GPU", "CPU", "compilation", "GiB free"):
        assert word in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", ["raise ModuleNotFoundError('none')", "raise OSError('\\x1b')"])
def test_a_torch_that_is_missing_or_broken_is_a_no_go_and_no_traceback(tmp_path, code):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text(code)
    done = check_env_py(tmp_path, PYTHONPATH=str(broken))
    assert (done.returncode, done.stderr) == (2, "")
    assert "\nstop  torch cannot be imported: " in done.stdout
    assert "\n      fix: pip install -r requirements.txt" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1] == "no-go"


@pytest.mark.parametrize("path", ["runtime/preflight", "scripts/command", "scripts/check_env"])
def test_an_old_python_can_read_what_tells_it_so(path, monkeypatch):
    ast.parse((ROOT / f"{path}.py").read_text(), feature_version=(3, 9))
    monkeypatch.setattr(sys, "version_info", (3, 10, 14))
    assert next(preflight._packages()).level == "stop"


# ---- Findings


def test_another_version_than_the_pinned_one_is_a_warning_unless_torch_is_known_to_work(
    monkeypatch, tmp_path
):
    pins = tmp_path / "requirements.txt"
    pins.write_text("torch==2.11.0  # tensors\nnumpy==1.2.3  # shards\n")
    monkeypatch.setattr(preflight, "REQUIREMENTS", pins)
    found = {"torch": "2.12.1+cu130", "numpy": "1.2.4"}
    monkeypatch.setattr("importlib.metadata.version", found.get)
    numpy = "numpy 1.2.4, requirements.txt has 1.2.3"
    assert faults(preflight._packages()) == [("warn", numpy)]
    found["torch"] = "2.1.3"
    torch_too = "torch 2.1.3, requirements.txt has 2.11.0"
    assert faults(preflight._packages()) == [("warn", torch_too), ("warn", numpy)]


@pytest.mark.parametrize(("capability", "level"), [((9, 0), "ok"), ((7, 5), "warn")])
def test_gpus_are_listed_and_one_without_bf16_is_a_warning(monkeypatch, capability, level):
    memory = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB)
    stubs = {
        "is_available": True, "device_count": 2, "get_device_properties": memory,
        "get_device_capability": capability,
    }  # fmt: skip
    for name, value in stubs.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    _, *gpus, _ = preflight._hardware()
    listed = [(gpu.level, gpu.what) for gpu in gpus]
    assert listed == [(level, f"cuda:{i} NVIDIA H100, 80 GiB") for i in range(2)]


def test_a_full_disk_and_a_path_below_a_file_are_stops(monkeypatch, tmp_path):
    usage = SimpleNamespace(free=GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    folder = tmp_path / "new" / "folder"
    assert disk_finding(folder, GIB).level == "ok"
    assert disk_finding(folder, 2 * GIB)[:2] == ("stop", f"{folder}: 1.0 GiB free, 2.0 needed")
    (tmp_path / "file").touch()
    level, what, _ = disk_finding(tmp_path / "file" / "logs", 0)
    assert level == "stop"
    assert what.endswith("file cannot be written to")
    assert not folder.exists()


# ---- --dry-run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def test_a_dry_run_says_what_a_run_takes_and_leaves_nothing_behind(data, tmp_path):
    outcome = run_words([*arguments(data, tmp_path), "--dry-run"], tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1] == "go"
    steps = re.findall(r"^ +\d+:\d\d:\d\d .*: (\d+) steps of [\d.,]+ ms$", outcome.out, re.M)
    assert sum(map(int, steps)) == STEPS
    assert re.search(r"^ +0:00:\d\d 4 validations of [\d.,]+ ms$", outcome.out, re.M)
    assert re.search(r"^peak memory of rank 0: [\d,]+ MiB$", outcome.out, re.M)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_dry_run_without_room_for_checkpoints_is_a_no_go(data, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    outcome = run_words([*arguments(data, tmp_path), "--dry-run"], tmp_path)
    assert outcome.code == 2
    assert f"stop  {tmp_path}/checkpoints: 0.0 GiB free" in outcome.out
    assert outcome.out.splitlines()[-1] == "no-go"
