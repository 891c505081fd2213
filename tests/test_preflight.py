"""A fit machine is a go, each fault is told, and --dry-run leaves nothing behind."""

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
from runtime.preflight import GIB

ROOT = Path(__file__).resolve().parents[1]


# ---- check_env.py


def check_env_py(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", str(ROOT / "scripts" / "check_env.py")]
    environment = os.environ | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_this_machine_is_a_go_from_any_folder_and_nothing_is_left_behind(tmp_path):
    done = check_env_py(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "go"
    for word in ("torch", "numpy", "GPU", "compile"):
        assert word in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", ["raise ModuleNotFoundError('none')", "raise OSError('\\x1b')"])
def test_a_torch_that_is_missing_or_broken_is_a_no_go_and_no_traceback(tmp_path, code):
    (tmp_path / "torch.py").write_text(code)
    done = check_env_py(tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("stop  cannot import torch: ")
    assert "pip install -r requirements.txt\n" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1] == "no-go"


def test_another_version_than_the_pinned_one_is_a_warning(monkeypatch, tmp_path):
    pins = tmp_path / "requirements.txt"
    pins.write_text("torch==2.11.0  # tensors\nnumpy==1.2.3  # shards\n")
    monkeypatch.setattr(preflight, "REQUIREMENTS", pins)
    monkeypatch.setattr("importlib.metadata.version", {"torch": "2.11.0", "numpy": "1.2.4"}.get)
    warning = ("warn", "numpy 1.2.4, but requirements.txt has 1.2.3")
    assert list(preflight.findings())[:2] == [("ok", "torch 2.11.0"), warning]


@pytest.mark.parametrize(("capability", "level"), [((9, 0), "ok"), ((7, 5), "warn")])
def test_gpus_are_listed_and_one_without_bf16_is_a_warning(monkeypatch, capability, level):
    memory = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB)
    stubs = {
        "is_available": True, "device_count": 2, "get_device_properties": memory,
        "get_device_capability": capability,
    }  # fmt: skip
    for name, value in stubs.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    *gpus, _ = preflight._hardware()
    for index, (found, what) in enumerate(gpus):
        assert found == level
        assert what.startswith(f"cuda:{index} NVIDIA H100, 80 GiB")


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
    assert re.search(r"^peak memory of rank 0, measured: [\d,]+ MiB$", outcome.out, re.M)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_dry_run_without_room_for_checkpoints_is_a_no_go(data, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    outcome = run_words([*arguments(data, tmp_path), "--dry-run"], tmp_path)
    assert outcome.code == 2
    assert f"{tmp_path}/checkpoints: 0.0 GiB free" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("no-go: make room")
