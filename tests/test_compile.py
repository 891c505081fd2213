"""Compilation: tried where it is wanted, with a reason where it does not work."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from small_run import ROOT

from runtime import warmup as compiling
from runtime.clock import Clock
from runtime.errors import Refused
from runtime.machine import Machine
from runtime.warmup import compile_loss, warm_up

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def fail(error):
    raise error


def trainer_with(mode, device=CUDA):
    """All that compilation asks of a trainer."""
    return SimpleNamespace(config=SimpleNamespace(compile=mode), machine=Machine(device),
                           model=SimpleNamespace(compiled=lambda: "compiled"), loss=None,
                           state_dict=dict, env={})  # fmt: skip


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that works at once."""
    monkeypatch.setattr(compiling, "try_largest_micro_batch", lambda trainer: None)
    return monkeypatch


def test_a_model_that_compiles_is_run_compiled_and_one_that_does_not_is_told_why(compiler):
    trainer = trainer_with("auto")
    assert (compile_loss(trainer), trainer.loss) == (None, "compiled")
    assert compile_loss(trainer_with("off")) == "--compile off"
    broken = AssertionError("does not build\nand a page of it")
    compiler.setattr(
        compiling, "try_largest_micro_batch",
        lambda trainer: trainer.loss is trainer.model or fail(broken),
    )  # fmt: skip
    reason = "compilation failed: AssertionError: does not build"
    assert compile_loss(trainer_with("auto")) == reason
    trainer = trainer_with("auto")
    compiler.setattr(compiling, "rehearse", lambda trainer: fail(EOFError()))  # far enough
    with pytest.raises(EOFError):
        warm_up(trainer, Clock())
    assert trainer.loss is trainer.model
    with pytest.raises(Refused, match=f"^--compile on: {reason}"):
        warm_up(trainer_with("on"), Clock())
    compiler.setattr(compiling, "try_largest_micro_batch", lambda trainer: fail(MemoryError()))
    with pytest.raises(MemoryError):  # no obstacle to compilation
        compile_loss(trainer_with("auto"))


def test_auto_compiles_on_cuda_alone(compiler):
    for device, compiled in ((CUDA, True), (CPU, False), (torch.device("mps"), False)):
        assert (compile_loss(trainer_with("auto", device)) is None) == compiled
    assert compile_loss(trainer_with("on", CPU)) is None


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
