"""Compilation: tried where it can work, with a reason where it does not."""

import os
import shutil
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
from runtime.warmup import compile_loss, planned_passes, warm_up, why_not_compile

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALONE = Machine(CPU)
LONG = 3e11  # tokens times layers: two weeks on two cores


def fail(error):
    raise error


def trainer_with(mode, machine=ALONE, passes=LONG):
    """All that compilation asks of a trainer."""
    config = SimpleNamespace(compile=mode, micro_batch=16, val_tokens=0, minutes=0)
    train = SimpleNamespace(shares=lambda step: (1, 1))
    return SimpleNamespace(
        config=config, machine=machine, model=SimpleNamespace(blocks=[0]), loss=None,
        train_tokens=passes, validations=[], changes=[(0, 8, 4)], state_dict=dict,
        data=SimpleNamespace(train=train, validation=[]), env={},
    )  # fmt: skip


def test_what_compilation_lacks_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    assert why_not_compile(CUDA) == "Triton is not installed"
    monkeypatch.setattr(shutil, "which", {"my-compiler": "/bin/my-compiler"}.get)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.delenv("CXX", raising=False)
    assert why_not_compile(CPU) == "there is no C++ compiler"
    monkeypatch.setenv("CXX", "my-compiler")
    assert why_not_compile(CPU) == "the Python headers (Python.h) are not installed"
    with pytest.raises(Refused, match=r"^--compile on: the Python headers"):
        warm_up(trainer_with("on"), Clock())
    reason = "the Python headers (Python.h) are not installed"
    assert compile_loss(trainer_with("auto")) == reason
    (tmp_path / "Python.h").touch()
    assert why_not_compile(CPU) is None


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that works at once."""
    monkeypatch.setattr(compiling, "why_not_compile", lambda device: None)
    monkeypatch.setattr(compiling, "try_largest_micro_batch", lambda trainer: None)
    monkeypatch.setattr(torch, "compile", lambda model, **rest: ("compiled", model))
    return monkeypatch


def test_a_model_that_compiles_is_run_compiled_and_one_that_does_not_is_told_why(compiler):
    trainer = trainer_with("auto")
    assert (compile_loss(trainer), trainer.loss) == (None, ("compiled", trainer.model))
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


# ---- Whether it pays


def compiled_by(mode, machine=ALONE, passes=0.0):
    return compile_loss(trainer_with(mode, machine, passes)) is None


# Measured on two cores: 32 steps of `tiny` take 25 s eager, and 77 s with an empty cache.
TINY = 4 * (32 * 2048 + 262_144 / 3)


def test_a_cpu_compiles_what_runs_long_a_gpu_everything_and_off_nothing(compiler):
    assert not compiled_by("auto", passes=TINY)
    assert compiled_by("auto", passes=40 * TINY)
    assert compiled_by("auto", Machine(CUDA))
    assert compiled_by("on")
    assert not compiled_by("off", passes=LONG)


@pytest.mark.parametrize(("batches", "graphs"), [([8], 1), ([8, 16, 8], 2)])
def test_validation_costs_a_third_of_training_and_each_size_of_batch_a_graph(batches, graphs):
    trainer = SimpleNamespace(
        config=SimpleNamespace(val_tokens=30, minutes=0), train_tokens=100, validations=[0, 5],
        model=SimpleNamespace(blocks=range(7)), changes=[(0, batch, 4) for batch in batches],
    )  # fmt: skip
    assert planned_passes(trainer) == 120 * 7 / graphs


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
