"""torch.compile where it works, and the reason where it does not."""

import os
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from runtime.errors import Refused
from runtime.machine import Machine, first_line, out_of_memory

# One graph a shape: --micro-batch auto tries several, and validation rows come in many parts.
MOST_GRAPHS = 1024


def why_not_compile(device: torch.device) -> str | None:
    """Return what torch.compile lacks here, or None."""
    if device.type == "cuda":
        return None if find_spec("triton") else "Triton is not installed"
    if device.type == "mps":
        return "nobody has tried it on Apple's GPUs"
    compiler = os.environ.get("CXX", "cl" if sys.platform == "win32" else "g++")
    if not shutil.which(compiler) and not shutil.which("clang++"):
        return "there is no C++ compiler"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the Python headers (Python.h) are not installed"
    return None


def try_compile(
    function: Callable[..., Any], mode: str, machine: Machine, first_call: Callable[[Any], object]
) -> tuple[Callable[..., Any], str | None]:
    """Return `function` compiled and None, or `function` itself and the reason.

    `first_call` must work with the compiled function. If it fails, `mode` "auto" falls back and
    "on" raises Refused; "off" does not try. Lack of memory is raised as it is.
    """
    if mode == "off":
        return function, "as asked"
    if obstacle := why_not_compile(machine.device):
        if mode == "on":
            raise Refused(f"--compile on: {obstacle}. Install it, or use --compile auto.")
        return function, obstacle
    machine.say("compiling: about a minute the first time, then cached")
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = MOST_GRAPHS
    compiled = torch.compile(function, dynamic=False, fullgraph=True)
    try:
        first_call(compiled)
    except Exception as error:  # whatever a compiler raises, the eager function can still run
        if out_of_memory(error):
            raise
        cause = getattr(error, "inner_exception", error)  # what torch's own error is about
        obstacle = f"compilation failed: {type(cause).__name__}: {first_line(cause)}"
        if mode == "on":
            raise Refused(f"--compile on: {obstacle}. Use --compile auto to go without.") from error
        return function, obstacle
    return compiled, None


def fits(function: Callable[[], object], machine: Machine) -> bool:
    """Call `function` on every rank. Return whether memory sufficed on all of them.

    `function` must not wait for other ranks.
    """
    short = False
    try:
        function()
    except Exception as error:
        if not out_of_memory(error):
            raise
        short = True
        traceback.clear_frames(error.__traceback__)  # they hold tensors: make room for what follows
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
    return not any(machine.gather(short))


def compile_flags() -> list[str]:
    """Return the compiler settings that code or environment changed. Imports nothing.

    The log records them, because the contest's tracks allow none.
    """
    flags = []
    for name, value in sorted(os.environ.items()):
        if name.startswith("TORCHINDUCTOR_") and "CACHE" not in name:
            flags.append(f"{name}={value}")
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None:
        # `codegen_config()` would list defaults too: compiling writes some of them.
        for name, value in config.get_config_copy().items():
            if value != config._config[name].default:
                flags.append(f"torch._inductor.config.{name} = {value!r}")
    return flags
