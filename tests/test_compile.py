"""Compilation: tried where it can work, with one reason on all ranks where it does not."""

import os
import shutil
import subprocess
import sys
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import compile as compiling
from runtime.compile import check_compile, fits, try_compile, why_not_compile
from runtime.errors import Refused
from runtime.machine import Machine

ROOT = Path(__file__).resolve().parents[1]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALONE = Machine(CPU)


def fail(error):
    raise error


# ---- What it needs


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
        check_compile("on", CPU)
    check_compile("auto", CPU)
    (tmp_path / "Python.h").touch()
    assert why_not_compile(CPU) is None


# ---- Trying


def test_a_function_that_compiles_is_returned_compiled_and_one_that_does_not_as_it_is(monkeypatch):
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


@dataclass(frozen=True)
class Two(Machine):
    """Rank 0 of two; what the other gathers is played."""

    other: Any = None
    met: list = field(default_factory=list)
    meet: Any = lambda: None

    def gather(self, value):
        self.met.append(self.meet())
        return [value, self.other]


def two(other, meet=lambda: None):
    return Two(CPU, 0, 2, ("a pid 1", "b pid 2"), other, meet=meet)


def test_what_one_rank_cannot_compile_none_does_and_the_rank_is_named():
    found = try_compile(abs, "auto", two("there is no C++ compiler"), fail)
    assert found == (abs, "rank 1 (b pid 2): there is no C++ compiler")


def test_memory_that_one_rank_lacks_is_too_little_for_all():
    assert fits(lambda: None, two((False, None)))
    assert not fits(lambda: None, two((True, None)))
    assert not fits(lambda: fail(torch.OutOfMemoryError()), two((False, None)))


def test_an_error_of_one_rank_is_raised_on_all():
    with pytest.raises(RuntimeError, match=r"^rank 1 \(b pid 2\): KeyError: 'x'$"):
        fits(lambda: fail(MemoryError()), two((False, "KeyError: 'x'")))
    with pytest.raises(KeyError):
        fits(lambda: fail(KeyError("x")), two((True, None)))


def test_what_failed_holds_no_memory_when_the_ranks_meet():
    held = []

    def function():
        tensor = torch.ones(1000)
        held.append(weakref.ref(tensor))
        try:
            raise KeyError("within")
        except KeyError as error:
            raise RuntimeError("can't allocate memory") from error

    machine = two((False, None), meet=lambda: held[0]() is None)
    assert not fits(function, machine)
    assert machine.met == [True]


# ---- What the log is told


def test_the_log_is_told_compiler_settings_that_are_not_defaults(tmp_path):
    """In a process of its own: a setting that was changed once counts as changed for ever."""
    code = """
import sys
from runtime.compile import compile_facts
print(compile_facts()["compile_flags"], "torch._inductor.config" in sys.modules)
import torch._inductor.config as config
before = compile_facts()["compile_flags"]
config.inplace_buffers = True  # its default, as a compilation may set it
config.coordinate_descent_tuning = True
print([flag for flag in compile_facts()["compile_flags"] if flag not in before])
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
