"""torch.compile where it works, with the reason where it does not, and what the log says of it."""

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

# A graph for each shape: --micro-batch auto tries several, validation rows come in many parts.
MOST_GRAPHS = 1024


def why_not_compile(device: torch.device) -> str | None:
    """Return what torch.compile lacks here, or None."""
    if device.type == "cuda":
        return None if find_spec("triton") else "Triton is not installed"
    compiler = os.environ.get("CXX", "cl" if sys.platform == "win32" else "g++")
    if not shutil.which(compiler) and not shutil.which("clang++"):
        return "there is no C++ compiler"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the Python headers (Python.h) are not installed"
    return None


def check_compile(mode: str, device: torch.device) -> None:
    """Raise Refused if compilation is demanded ("on") where it cannot work."""
    obstacle = why_not_compile(device) if mode == "on" else None
    if obstacle:
        raise Refused(f"--compile on: {obstacle}. Install it, or use --compile auto.")


def try_compile(
    function: Callable[..., Any], mode: str, machine: Machine, first_call: Callable[[Any], object]
) -> tuple[Callable[..., Any], str | None]:
    """Return `function` compiled and None, or as it is and the reason; the same on all ranks.

    `first_call` must work with the compiled function; like `fits` it raises on all ranks or on
    none. `mode` "off" does not try, "auto" falls back, "on" raises Refused. Lack of memory is
    raised as it is: it is no obstacle to compilation.
    """
    obstacle = "as asked" if mode == "off" else why_not_compile(machine.device)
    for rank, found in enumerate(machine.gather(obstacle)):
        if found is not None:
            return function, f"{machine.name(rank)}: {found}" if rank else found
    machine.say("compiling: tens of seconds the first time, then cached")
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = MOST_GRAPHS
    compiled = torch.compile(function, dynamic=False, fullgraph=True)
    try:
        first_call(compiled)
    except Exception as error:  # whatever a compiler raises, the eager function can still run
        if out_of_memory(error):
            raise
        obstacle = f"compilation failed: {type(error).__name__}: {first_line(error)}"
        if mode == "on":
            raise Refused(f"--compile on: {obstacle}. Use --compile auto to go without.") from error
        return function, obstacle
    return compiled, None


def fits(function: Callable[[], object], machine: Machine) -> bool:
    """Call `function` on every rank; return whether memory sufficed on all of them.

    `function` must not wait for other ranks. Any other error is raised on every rank.
    """
    failure, short = None, False
    try:
        function()
    except Exception as error:
        short = out_of_memory(error)
        failure = None if short else error
        traceback.clear_frames(error.__traceback__)  # they hold tensors: make room for what follows
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
    word = None if failure is None else f"{type(failure).__name__}: {first_line(failure)}"
    shorts, words = zip(*machine.gather((short, word)), strict=True)
    if failure is not None:
        raise failure
    for rank, word in enumerate(words):
        if word is not None:
            raise RuntimeError(f"{machine.name(rank)}: {word}")
    return not any(shorts)


def compile_facts() -> dict[str, object]:
    """Return the compiler's non-default flags, the graphs of this process and what the cache had.

    Contest tracks allow no flags. Imports nothing: what was not compiled has no counters.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    counters: dict[str, Any] = utils.counters if utils else {}
    facts: dict[str, object] = {"compile_flags": _compile_flags()}
    facts["graphs"] = counters.get("stats", {}).get("unique_graphs", 0)
    for kind in ("hit", "miss", "bypass"):
        facts[f"cache_{kind}"] = counters.get("inductor", {}).get(f"fxgraph_cache_{kind}", 0)
    return facts


def _compile_flags() -> list[str]:
    """Settings of the compiler that differ from their defaults, by code and by environment."""
    config: Any = sys.modules.get("torch._inductor.config")
    lines = config.codegen_config().splitlines() if config else []
    flags = [line for line in lines if not _is_default(config, line)]
    for name in sorted(os.environ):
        if name.startswith("TORCHINDUCTOR_") and "CACHE" not in name:
            flags.append(f"{name}={os.environ[name]}")
    return flags


def _is_default(config: Any, line: str) -> bool:
    """Whether a line of `codegen_config` states a default: compiling itself writes some of them."""
    name, _, value = line.removeprefix("torch._inductor.config.").partition(" = ")
    entry = config._config.get(name)
    return entry is not None and repr(entry.default) == value
