"""Runs side by side: as many as cores, memory and the user allow; a failure ends the others."""

import subprocess
import sys
import time

import pytest

from scripts import side_by_side
from scripts.side_by_side import ONE_BY_ONE, RUN_BYTES, Job, Sharing, run_side_by_side, share

SMALL = {"track": "small", "device": "auto", "compile": "auto"}


@pytest.fixture
def machine(monkeypatch):
    """Set what the machine has."""

    def has(cores, memory=2**40, gpu=None, threads=""):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        monkeypatch.setattr(side_by_side, "cores", lambda: cores)
        monkeypatch.setattr(side_by_side, "free_memory", lambda: memory)
        monkeypatch.setattr(side_by_side, "gpu_memory", lambda: gpu)
        monkeypatch.setattr(side_by_side, "which", lambda name: name if gpu else None)

    return has


@pytest.mark.parametrize(("has", "expected"), [
    ({"cores": 1}, Sharing(1, 1)),
    ({"cores": 8}, Sharing(8, 1)),
    ({"cores": 17}, Sharing(8, 2)),
    ({"cores": 8, "memory": 3 * RUN_BYTES + 1}, Sharing(3, 1)),
    ({"cores": 8, "memory": 0}, Sharing(1, 1)),
    ({"cores": 8, "threads": "4"}, Sharing(2, 4)),
    ({"cores": 8, "threads": "16"}, Sharing(1, 16)),
])  # fmt: skip
def test_runs_share_cores_and_memory_and_the_users_number_of_threads_stays(machine, has, expected):
    machine(**has)
    assert share([SMALL, SMALL]) == expected


@pytest.mark.parametrize(("gpu", "changed", "expected"), [
    (None, {"track": "short"}, ONE_BY_ONE),
    (None, {"device": "mps"}, ONE_BY_ONE),
    (3 * RUN_BYTES, {}, ONE_BY_ONE),  # each would compile
    (3 * RUN_BYTES, {"compile": "off"}, Sharing(3, 2)),
    (3 * RUN_BYTES, {"device": "cpu"}, Sharing(8, 2)),
])  # fmt: skip
def test_large_runs_and_runs_that_compile_on_a_gpu_go_one_by_one(machine, gpu, changed, expected):
    machine(cores=16, gpu=gpu)
    assert share([SMALL, SMALL | changed] if gpu is None else [SMALL | changed]) == expected


def sleeper(tmp_path, seconds, code=0):
    program = f"import time, sys; time.sleep({seconds}); print('out'); sys.exit({code})"
    return Job([sys.executable, "-c", program], tmp_path / "console", (seconds, code))


def test_a_failure_ends_the_other_processes_at_once(tmp_path):
    def ended(job, code):
        assert code == 5
        raise ValueError("failed")

    began = time.monotonic()
    with pytest.raises(ValueError, match="failed"):
        run_side_by_side(
            [sleeper(tmp_path, 60), sleeper(tmp_path, 0, 5), sleeper(tmp_path, 60)],
            Sharing(2, 1), ended,
        )  # fmt: skip
    assert time.monotonic() - began < 30
    left = subprocess.run(["pgrep", "-f", "time.sleep.60"], capture_output=True, text=True).stdout
    assert left == ""
