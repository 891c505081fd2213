"""Compilation: tried where it is wanted, with a reason where it does not work."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from small_run import ROOT, brief

import train_gpt
from runtime import warmup
from runtime.clock import Clock
from runtime.machine import Machine
from runtime.warmup import compile_loss, warm_up

pytestmark = pytest.mark.usefixtures("two_layers")


def fail(error):
    raise error


@pytest.fixture
def trainer(data, tmp_path, monkeypatch):
    """A trainer with --compile auto on a GPU, whose compiler works at once."""
    found = []
    brief(data, tmp_path, {1: lambda run: found.append(run.trainer)}, compile="auto")
    found[0].machine = Machine(torch.device("cuda"))
    found[0].model.compiled = lambda: "compiled"
    monkeypatch.setattr(warmup, "try_largest_micro_batch", lambda trainer: None)
    return found[0]


def test_auto_compiles_only_on_cuda_and_off_never(trainer):
    assert (compile_loss(trainer), trainer.loss) == (None, "compiled")
    for device in ("cpu", "mps"):
        trainer.machine = Machine(torch.device(device))
        assert "--compile on forces it" in compile_loss(trainer)
    trainer.config = replace(trainer.config, compile="on")
    assert compile_loss(trainer) is None
    trainer.config = replace(trainer.config, compile="off")
    assert compile_loss(trainer) == "--compile off"


def test_under_auto_a_model_that_does_not_compile_is_run_as_it_is(trainer, monkeypatch):
    trainer.model.compiled = lambda: fail(AssertionError("does not build\nand a page of it"))
    reason = "compilation failed: AssertionError: does not build"
    assert compile_loss(trainer) == reason
    monkeypatch.setattr(warmup, "rehearse", lambda trainer: fail(EOFError()))  # far enough
    with pytest.raises(EOFError):
        warm_up(trainer, Clock())
    assert trainer.loss is trainer.model
    trainer.model.compiled = lambda: fail(MemoryError())
    with pytest.raises(MemoryError):  # no obstacle to compilation
        compile_loss(trainer)


def test_under_on_a_model_that_does_not_compile_is_refused_with_the_reason(
    data, tmp_path, monkeypatch
):
    broken = AssertionError("does not build\nand a page of it")
    monkeypatch.setattr(train_gpt.GPT, "compiled", lambda model: fail(broken))
    outcome = brief(data, tmp_path, compile="on")
    assert (outcome.code, outcome.logs) == (2, [])
    assert "--compile on: compilation failed: AssertionError: does not build. " in outcome.err
    outcome = brief(data, tmp_path, compile="auto")
    assert outcome.code == 0
    assert outcome.events("header")[0]["env"]["compiled"] is False


# ---- What the log is told


def test_the_log_is_told_compiler_settings_that_are_not_defaults(tmp_path):
    """In a process of its own: a setting that was changed once counts as changed for ever."""
    code = """
import sys
from runtime.warmup import compile_flags
print(compile_flags(), "torch._inductor.config" in sys.modules)
import torch._inductor.config as config
before = compile_flags()
config.inplace_buffers = True  # its default, as a compilation may set it
config.coordinate_descent_tuning = True
print([flag for flag in compile_flags() if flag not in before])
"""
    variables = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | variables, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "['TORCHINDUCTOR_MAX_AUTOTUNE=1'] False",
        "['torch._inductor.config.coordinate_descent_tuning = True']",
    ], done.stderr
