"""What check_env.py and --dry-run print: is this machine fit, and what will a run take?

Importing this needs neither torch nor Python 3.11, so that it can report that either is missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

GIB = 2**30
KNOWN_TORCH = ("2.11.", "2.12.", "2.13.")
REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"
INSTALL = "pip install -r requirements.txt"
CHECKPOINTS_ON_DISK = 3  # two are kept while the next is written


class Finding(NamedTuple):
    level: str  # ok; warn: a run works, with a drawback; stop: it does not
    what: str
    fix: str = ""


def judge(bad: bool, level: str, what: str, fix: str) -> Finding:
    """Return a finding of this level with its fix if `bad`, else an ok."""
    return Finding(level, what, fix) if bad else Finding("ok", what)


def verdict(findings: list[Finding]) -> tuple[str, int]:
    """Return a text with a line for each finding and "go" or "no-go", and the exit code, 0 or 2."""
    lines = []
    for level, what, fix in findings:
        lines.append(f"{level:5} {what}")
        if fix:
            lines.append(f"      fix: {fix}")
    stopped = any(finding.level == "stop" for finding in findings)
    lines.append("no-go" if stopped else "go")
    return "\n".join(lines), 2 if stopped else 0


def environment_findings() -> list[Finding]:
    """Look at Python, packages, disk, devices and compiler."""
    findings = [*_packages(), disk_finding(".", GIB)]
    if "torch" in sys.modules:  # _packages could import it
        findings += _hardware()
    return findings


def _packages() -> Iterator[Finding]:
    """Check Python's version, then import each package of requirements.txt and compare versions."""
    old = sys.version_info < (3, 11)
    yield judge(old, "stop", f"Python {platform.python_version()}", "install 3.11 or newer")
    for name, pin in re.findall(r"^(\w+)==([\w.]+)", REQUIREMENTS.read_text(), re.MULTILINE):
        try:
            importlib.import_module(name)
            version = importlib.metadata.version(name).partition("+")[0]
        except Exception as error:  # whatever a broken package raises
            reason = f"{type(error).__name__}: {error}"[:200]
            yield Finding("stop", f"{name} cannot be imported: {reason}", INSTALL)
            continue
        known = version.startswith(KNOWN_TORCH) if name == "torch" else version == pin
        what = f"{name} {version}" + ("" if known else f", requirements.txt has {pin}")
        yield judge(not known, "warn", what, INSTALL)


def _hardware() -> Iterator[Finding]:
    import torch

    from runtime.compile import why_not_compile
    from runtime.machine import native_bf16

    yield Finding("ok", f"CPU, {torch.get_num_threads()} threads")
    fix = "float32 takes its place, several times slower; capability 8.0 and newer have bf16"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        what = f"cuda:{index} {gpu.name}, {gpu.total_memory / GIB:.0f} GiB"
        yield judge(not native_bf16(torch.device("cuda", index)), "warn", what, fix)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        yield Finding("ok", f"no GPU that torch can use (built for CUDA {torch.version.cuda})")
    obstacle = why_not_compile(device)
    fix = "install it (Debian: g++ and python3-dev); without it runs are slower"
    yield judge(obstacle is not None, "warn", f"compilation: {obstacle or 'possible'}", fix)


def disk_finding(folder: str | Path, needed_bytes: float) -> Finding:
    """Check that so many bytes can be written below a folder, which need not exist yet."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return Finding("stop", f"{folder}: {place} cannot be written to", "name another folder")
    free = shutil.disk_usage(place).free
    what = f"{folder}: {free / GIB:,.1f} GiB free, {needed_bytes / GIB:,.1f} needed"
    return judge(free < needed_bytes, "stop", what, "make room, or name another folder")


def report(
    trainer: Any, clock: Any, stage_ms: Mapping[str, tuple[int, float]], validations: int
) -> int:
    """Print on rank 0 what a run takes and whether the disk has room. Returns 0 or 2.

    `clock` has the phases up to one validation. `stage_ms` has for each stage its number of steps
    and the milliseconds of one.
    """
    from runtime.machine import peak_mib

    machine, config = trainer.machine, trainer.config
    ready_ms = sum(phase.ms for phase in clock.phases if phase.name not in ("train", "validate"))
    validation_ms = clock.phases[-1].ms
    rows = [("set-up, compilation and warm-up", ready_ms)]
    for name, (steps, ms) in stage_ms.items():
        rows.append((f"{name}: {steps:,} steps of {ms:,.1f} ms", steps * ms))
    name = f"{validations:,} validations of {validation_ms:,.1f} ms"
    rows.append((name, validations * validation_ms))
    rows.append(("together", sum(ms for _, ms in rows)))
    for name, ms in rows:
        machine.say(f"{timedelta(seconds=round(ms / 1000))!s:>8} {name}")
    machine.say(f"peak memory of rank 0: {peak_mib(machine):,.0f} MiB")
    state = trainer.state_dict()
    saved_bytes = sum(t.nbytes for t in [*state["model"].values(), *state["optim"].values()])
    logs = disk_finding(config.log_dir, GIB / 16)
    checkpoints = disk_finding(config.checkpoint_dir, CHECKPOINTS_ON_DISK * saved_bytes)
    text, code = verdict([logs, checkpoints])
    machine.say(text)
    return machine.on_main(lambda: code)
