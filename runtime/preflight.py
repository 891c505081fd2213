"""Is this machine fit, and what will a run take? For check_env.py, --dry-run and the start.

Importing this needs no torch, so that it can report that torch is missing.
"""

import importlib
import importlib.metadata
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from runtime.errors import Refused
from runtime.log import existing

GIB = 2**30
REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"
CHECKPOINTS_ON_DISK = 3  # two are kept while the next is written


def findings() -> Iterator[tuple[str, str]]:
    """Yield (level, text) for packages, devices and compiler.

    Levels: ok; warn: a run works, with a drawback; stop: it does not.
    """
    if REQUIREMENTS.exists():
        pins = REQUIREMENTS.read_text()
    else:  # installed by pip, which keeps the same lines
        pins = "\n".join(importlib.metadata.requires("speedrun") or [])
    pattern = r"^(\w+)==([\w.]+)(?:.*# (optional))?"
    for name, pin, optional in re.findall(pattern, pins, re.MULTILINE):
        try:
            importlib.import_module(name)
            version = importlib.metadata.version(name).partition("+")[0]
        except Exception as error:  # whatever a broken package raises
            level = "warn" if optional else "stop"
            yield level, f"cannot import {name}: {error!r:.200}. pip install -r requirements.txt"
            continue
        if version == pin:
            yield "ok", f"{name} {version}"
        else:
            yield "warn", f"{name} {version}, but requirements.txt has {pin}"
    if "torch" in sys.modules:
        yield from _hardware()


def _hardware() -> Iterator[tuple[str, str]]:
    import torch

    from runtime.compile import why_not_compile
    from runtime.machine import native_bf16

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        yield "ok", f"no GPU that torch can use; CPU with {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        what = f"cuda:{index} {gpu.name}, {gpu.total_memory / GIB:.0f} GiB"
        if native_bf16(torch.device("cuda", index)):
            yield "ok", what
        else:
            yield "warn", f"{what}: it has no bf16, so runs are several times slower"
    obstacle = why_not_compile(device)
    if obstacle is None:
        yield "ok", "torch.compile can work"
    else:
        yield "warn", f"runs are not compiled, slower: {obstacle}"


def require_packages(config: Any) -> None:
    """Refused if a package is missing that a setting asks for."""
    wanted = []
    if config.progress == "live":
        wanted.append(("--progress live", "rich"))
    if config.log_to != "none":
        wanted.append((f"--log-to {config.log_to}", config.log_to))
    for flag, package in wanted:
        if importlib.util.find_spec(package) is None:
            raise Refused(f"{flag}: the package {package} is missing. pip install {package}")


def report(
    trainer: Any, clock: Any, stage_ms: Mapping[str, tuple[int, float]], validations: int
) -> int:
    """Print on rank 0 what a run takes and whether the disk has room. Returns 0 or 2.

    `clock` has the phases up to one validation. `stage_ms` has for each stage its number of steps
    and the milliseconds of one.
    """
    from runtime.machine import peak_mib

    machine, folder = trainer.machine, trainer.config.checkpoint_dir
    ready_ms = sum(phase.ms for phase in clock.phases if phase.name not in ("train", "validate"))
    validation_ms = clock.phases[-1].ms
    rows = [("set-up, compilation and warm-up", ready_ms)]
    for name, (steps, ms) in stage_ms.items():
        rows.append((f"{name}: {steps:,} steps of {ms:,.1f} ms", steps * ms))
    name = f"{validations:,} validations of {validation_ms:,.1f} ms"
    rows.append((name, validations * validation_ms))
    rows.append(("total", sum(ms for _, ms in rows)))
    for name, ms in rows:
        machine.say(f"{timedelta(seconds=round(ms / 1000))!s:>8} {name}")
    machine.say(f"peak memory of rank 0, measured: {peak_mib(machine):,.0f} MiB")
    state = trainer.state_dict()
    saved_bytes = sum(t.nbytes for t in [*state["model"].values(), *state["optim"].values()])
    needed = CHECKPOINTS_ON_DISK * saved_bytes
    free = machine.on_main(lambda: shutil.disk_usage(existing(folder)).free)
    machine.say(f"{folder}: {free / GIB:,.1f} GiB free, {needed / GIB:,.1f} needed for checkpoints")
    fits = machine.on_main(lambda: free >= needed)  # other ranks have no state
    machine.say("go" if fits else "no-go: make room, or name another --checkpoint-dir")
    return 0 if fits else 2
