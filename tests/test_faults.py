"""The suite of faults in its reduced form, and that it can lose."""

import hashlib
import json
import operator
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import faults
import pytest
from faults import FAULTS, FIRST, SMALL, Case, Fault, Losses, Process, examine

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("model.safetensors", "optim.safetensors", "state.json")
NEED_DISKS = {"log-disk-full", "log-disk-full-a-while", "log-read-only", "checkpoint-read-only"}  # so root, and Linux


def test_of_all_kinds_of_fault_in_the_reduced_form_nothing_is_lost() -> None:
    command = [sys.executable, str(ROOT / "tests/faults.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    found = {outcome["name"]: outcome for outcome in json.loads(done.stdout or "[]")}
    assert found.keys() == {name for name, fault in FAULTS.items() if not fault.long}, done.stderr
    assert [outcome["told"] for outcome in found.values() if outcome["lost"]] == []
    assert {name for name, outcome in found.items() if not outcome["tried"]} <= NEED_DISKS
    assert found["kill"]["tried"] > 1
    assert found["kill-worst-moments"]["tried"] == len(faults.MOMENTS)
    assert done.returncode == 0


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)  # so that what get_ready sets is put back
    faults.get_ready()


def told(befall: Callable[[Case], object], folder: Path, expected: Losses | None = None) -> str:
    """Why the fault counts as lost."""
    outcome = examine("x", Fault("x", lambda case: befall(case) and None), Case(folder, SMALL), lambda: expected or [])
    assert (outcome.tried, outcome.lost) == (1, 1)
    return outcome.told


def test_a_traceback_is_a_loss(tmp_path: Path) -> None:
    assert "no traceback" in told(partial(faults.alone, patch=operator.truediv, code=1), tmp_path / "case")


def test_an_exit_code_that_is_not_the_documented_one_is_a_loss(tmp_path: Path) -> None:
    assert "exit code 0, not 2" in told(lambda case: case.start(steps=-1)[0].ends(0), tmp_path / "case")


def test_a_process_that_hangs_is_a_loss_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Process] = []

    def hang(case: Case) -> None:
        started.extend(case.start(faults.hold))
        started[0].held(FIRST)
        monkeypatch.setattr(faults, "LIMIT", 0.1)
        started[0].ends(0)

    assert "ends within" in told(hang, tmp_path / "case")
    assert started[0].code == -9


def test_a_loss_that_differs_in_its_last_bit_is_a_loss(tmp_path: Path) -> None:
    found: list[Losses] = []

    def finish(case: Case) -> None:
        found.append(faults.uninterrupted(case))
        case.expected = [(step, (loss or 0) * (1 + 2**-52)) for step, loss in found[0]]
        case.finished()

    assert "bit for bit" in told(finish, tmp_path / "case")
    assert [step for step, _ in found[0]] == [*range(1, 31), 0, 10, 20, 30]


def test_a_checkpoint_that_is_not_whole_counts_for_nothing(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_000002"
    checkpoint.mkdir()
    assert not faults.is_whole(checkpoint)
    for name in NAMES:
        (checkpoint / name).write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    (checkpoint / "checksums.json").write_text(json.dumps(dict.fromkeys(NAMES, digest)))
    assert faults.is_whole(checkpoint)
    (checkpoint / "state.json").write_bytes(b"y")
    assert not faults.is_whole(checkpoint)


@pytest.mark.parametrize(("words", "named"), [
    (["--only", "flood"], "--only flood: no such fault"), (["--kills", "0"], "--kills 0: must be 1 or more"),
    (["--quick", "--only", "kill-tiny"], "no such fault in --quick"),
])  # fmt: skip
def test_bad_arguments_are_named(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        faults.main(words)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
