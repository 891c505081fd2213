"""torch.compile where it works, and the reason where it does not."""

import contextlib
import getpass
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from runtime.errors import Refused
from runtime.machine import Machine, first_line, out_of_memory

# One graph a shape: --micro-batch auto tries several, and validation rows come in many parts.
MOST_GRAPHS = 1024


# Whether compiling pays on a CPU. Measured with `tiny` on two cores of an AMD EPYC: filling the
# compiler's cache takes 52 s longer than an eager start, finding the graphs there 6 s longer. A
# trained token, 20.4 MFLOPs, takes 83 us eager and 67 us compiled. Slower machines compile more
# slowly too, so the choice needs no measurement here and is the same each time.
FIRST_S, CACHED_S = 52.0, 6.0
SAVED_S_PER_FLOP = (83e-6 - 67e-6) / 20.4e6


@dataclass(frozen=True)
class Plan:
    """What is to be computed: FLOPs of all runs of this process, and a name for its graphs.

    Equal names mean equal graphs: the source, the settings and torch are the same.
    """

    flops: float
    graphs: str

    @property
    def saved_s(self) -> float:
        return self.flops * SAVED_S_PER_FLOP

    @property
    def cost_s(self) -> float:
        return CACHED_S if self._marker.exists() else FIRST_S

    @property
    def _marker(self) -> Path:
        """A file in torch's cache, which is removed together with the graphs."""
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        return Path(folder or f"{tempfile.gettempdir()}/torchinductor_{user}", self.graphs)

    def note_cached(self) -> None:
        with contextlib.suppress(OSError):
            self._marker.touch()


def why_not_compile(device: torch.device) -> str | None:
    """Return what torch.compile lacks here, or None."""
    if device.type == "cuda":
        return None if find_spec("triton") else "Triton is not installed"
    if device.type == "mps":
        return "it is untested on Apple GPUs"
    compiler = os.environ.get("CXX", "cl" if sys.platform == "win32" else "g++")
    if not shutil.which(compiler) and not shutil.which("clang++"):
        return "there is no C++ compiler"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the Python headers (Python.h) are not installed"
    return None


def try_compile(
    function: Callable[..., Any], mode: str, machine: Machine, plan: Plan,
    first_call: Callable[[Any], object],
) -> tuple[Callable[..., Any], str | None]:  # fmt: skip
    """Return `function` compiled and None, or `function` itself and the reason.

    `first_call` must work with the compiled function. If it fails, `mode` "auto" falls back and
    "on" raises Refused; "off" does not try. On a CPU "auto" compiles only what that makes faster.
    Out-of-memory errors are raised unchanged.
    """
    if mode == "off":
        return function, "--compile off"
    if obstacle := why_not_compile(machine.device):
        if mode == "on":
            raise Refused(f"--compile on: {obstacle}. Install it, or use --compile auto.")
        return function, obstacle
    cost = "about a minute the first time, then cached"
    if machine.device.type == "cpu":
        cost_s = machine.on_main(lambda: plan.cost_s)
        cost = f"it takes about {cost_s:.0f} s and saves {plan.saved_s:.0f} s on two cores"
        if mode == "auto" and plan.saved_s <= cost_s:
            return function, f"{cost}; --compile on forces it"
    machine.say(f"compiling: {cost}")
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
    plan.note_cached()
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
