"""The length of OpenMP's spin reaches the runtime that torch loads, however a program starts."""

import os
import subprocess
import sys

import pytest
from small_run import ROOT

PROGRAMS = [["train_gpt.py", "--print-config"], ["scripts/bench.py", "--help"],
            ["-m", "torch.distributed.run", "--nproc_per_node=1", "--standalone", "--local-addr",
             "127.0.0.1", "train_gpt.py", "--print-config"]]  # fmt: skip


def display(program, **variables):
    """What GNU's OpenMP prints about its settings when the program loads it."""
    chosen = {"GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"}
    inherited = {name: value for name, value in os.environ.items() if name not in chosen}
    done = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True,
                          env=inherited | {"OMP_DISPLAY_ENV": "verbose"} | variables)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU's OpenMP in wheels for Linux")
@pytest.mark.parametrize("program", PROGRAMS, ids=["trainer", "script", "torchrun"])
def test_a_program_that_imports_torch_spins_briefly(program):
    assert "GOMP_SPINCOUNT = '1000'" in display(program)


@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU's OpenMP in wheels for Linux")
@pytest.mark.parametrize(
    ("variables", "count"),
    [({"GOMP_SPINCOUNT": "77"}, "'77'"), ({"OMP_WAIT_POLICY": "passive"}, "'0'")],
)
def test_a_users_own_choice_stays(variables, count):
    assert f"GOMP_SPINCOUNT = {count}" in display(PROGRAMS[0], **variables)
