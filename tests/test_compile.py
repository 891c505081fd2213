"""Compilation: tried where it can work, with a reason where it does not."""

import os
import shutil
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from runtime import compile as compiling
from runtime.compile import fits, try_compile, why_not_compile
from runtime.errors import Refused
from runtime.machine import Machine

ROOT = Path(__file__).resolve().parents[1]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALONE = Machine(CPU)


def fail(error):
    raise error


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
        try_compile(abs, "on", ALONE, abs)
    reason = "the Python headers (Python.h) are not installed"
    assert try_compile(abs, "auto", ALONE, abs) == (abs, reason)
    (tmp_path / "Python.h").touch()
    assert why_not_compile(CPU) is None


def test_a_function_that_compiles_is_returned_compiled_and_one_that_does_not_as_it_is(monkeypatch):
    monkeypatch.setattr(compiling, "why_not_compile", lambda device: None)
    monkeypatch.setattr(torch, "compile", lambda function, **rest: lambda x: function(x) + 1)
    compiled, obstacle = try_compile(abs, "auto", ALONE, lambda function: function(3))
    assert (compiled(-2), obstacle) == (3, None)
    assert try_compile(abs, "off", ALONE, fail) == (abs, "as asked")
    broken = lambda function: fail(AssertionError("does not build\nand a page of it"))  # noqa: E731
    reason = "compilation failed: AssertionError: does not build"
    assert try_compile(abs, "auto", ALONE, broken) == (abs, reason)
    with pytest.raises(Refused, match=f"^--compile on: {reason}"):
        try_compile(abs, "on", ALONE, broken)
    with pytest.raises(MemoryError):  # no obstacle to compilation
        try_compile(abs, "auto", ALONE, lambda function: fail(MemoryError()))


# ---- Memory


@dataclass(frozen=True)
class Two(Machine):
    """Rank 0 of two. The other rank is short of memory or not."""

    other_is_short: bool = False

    def gather(self, value):
        return [value, self.other_is_short]


def test_memory_that_one_rank_lacks_is_too_little_for_all():
    enough = Two(CPU)
    assert fits(lambda: None, enough)
    assert not fits(lambda: None, Two(CPU, other_is_short=True))
    assert not fits(lambda: fail(torch.OutOfMemoryError()), enough)
    with pytest.raises(KeyError):
        fits(lambda: fail(KeyError("x")), enough)


def test_what_failed_holds_no_memory_afterwards():
    held = []

    def function():
        tensor = torch.ones(1000)
        held.append(weakref.ref(tensor))
        try:
            raise KeyError("within")
        except KeyError as error:
            raise RuntimeError("can't allocate memory") from error

    assert not fits(function, ALONE)
    assert held[0]() is None


# ---- What the log is told


def test_the_log_is_told_compiler_settings_that_are_not_defaults(tmp_path):
    """In a process of its own: a setting that was changed once counts as changed for ever."""
    code = """
import sys
from runtime.compile import compile_flags
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
