"""Is this machine fit to train, and what will a run take? Printed by check_env.py and --dry-run.

Nothing here imports torch or needs Python 3.11 at the top: lacking either is a finding.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
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


def exit_code(findings: Iterable[Finding]) -> int:
    """0 go, 2 no-go."""
    return 2 if any(finding.level == "stop" for finding in findings) else 0


def as_lines(findings: list[Finding]) -> list[str]:
    """A line for each finding, its fix below it, and the verdict."""
    lines = []
    for level, what, fix in findings:
        lines.append(f"{level:5} {what}")
        if fix:
            lines.append(f"      fix: {fix}")
    return [*lines, "no-go" if exit_code(findings) else "go"]


def environment_findings() -> list[Finding]:
    """Look at Python, packages, GPUs, CPU, compiler and disk. Raises nothing."""
    findings = [*_packages(), *disk_findings(".", GIB)]
    if "torch" in sys.modules:  # _packages could import it
        try:
            findings += _hardware()
        except Exception as error:  # an unusual machine must not end in a traceback
            findings.append(Finding("warn", f"hardware: {_short(error)}", "check it by hand"))
    return findings


def _short(error: Exception) -> str:
    words = re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", str(error)).strip()
    return f"{type(error).__name__}: {words[:200]}"


def _packages() -> Iterator[Finding]:
    """Python, then each package that requirements.txt pins: imported, its version compared."""
    old = sys.version_info < (3, 11)
    yield judge(old, "stop", f"Python {platform.python_version()}", "install 3.11 or newer")
    for name, pin in re.findall(r"^(\w+)==([\w.]+)", REQUIREMENTS.read_text(), re.MULTILINE):
        try:
            importlib.import_module(name)
            version = importlib.metadata.version(name).partition("+")[0]
        except Exception as error:  # whatever a broken package raises
            yield Finding("stop", f"{name} cannot be imported: {_short(error)}", INSTALL)
            continue
        known = version.startswith(KNOWN_TORCH) if name == "torch" else version == pin
        what = f"{name} {version}" + ("" if known else f", requirements.txt has {pin}")
        yield judge(not known, "warn", what, INSTALL)


def _hardware() -> Iterator[Finding]:
    import torch

    from runtime.compile import why_not_compile
    from runtime.machine import native_bf16

    usable = torch.cuda.is_available()
    devices = [torch.device("cpu")]
    for index in range(torch.cuda.device_count() if usable else 0):
        devices.append(torch.device("cuda", index))
    for device in devices:
        native, what = native_bf16(device), f"CPU, {torch.get_num_threads()} threads"
        if device.type == "cuda":
            gpu = torch.cuda.get_device_properties(device)
            what = f"{device} {gpu.name}, {gpu.total_memory / GIB:.0f} GiB"
        what += ", bf16 " + ("native" if native else "not native: float32 is used, slower")
        yield Finding("ok" if native or len(devices) > 1 else "warn", what)
    present = _gpus_of_the_driver()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    what = f"GPUs: the driver has {present}, torch is built for CUDA {torch.version.cuda}"
    fix = "torch.cuda.init() says why torch finds none; CUDA_VISIBLE_DEVICES= trains on the CPU"
    level = "stop" if torch.version.cuda else "warn"
    yield judge(present > 0 and not usable and not hidden, level, what, fix)
    obstacle = why_not_compile(devices[-1])
    fix = "install it (Debian: g++ and python3-dev); without it runs are slower"
    yield judge(obstacle is not None, "warn", f"compilation: {obstacle or 'possible'}", fix)


def _gpus_of_the_driver() -> int:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(re.findall(r"^GPU ", done.stdout, re.MULTILINE))


def disk_findings(folder: str | Path, needed_bytes: float) -> list[Finding]:
    """Whether so many bytes can be written below a folder, which need not exist yet."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return [Finding("stop", f"{folder}: {place} cannot be written to", "name another folder")]
    free = shutil.disk_usage(place).free
    what = f"{folder}: {free / GIB:,.1f} GiB free, {needed_bytes / GIB:,.1f} needed"
    return [judge(free < needed_bytes, "stop", what, "make room, or name another folder")]


def report(
    trainer: Any, clock: Any, stage_ms: Mapping[str, tuple[int, float]], validations: int
) -> int:
    """Print on rank 0 what a run takes and what stands in its way. Returns 0 to go, 2 not to.

    `clock` has the phases up to a validation; `stage_ms` has the steps of each stage and the
    milliseconds of one.
    """
    from runtime.machine import peak_mib

    machine, config = trainer.machine, trainer.config
    getting_ready = [each for each in clock.phases if each.name in ("setup", "compile", "warmup")]
    times = {"set-up, compilation and warm-up": sum(phase.ms for phase in getting_ready)}
    for name, (steps, ms) in stage_ms.items():
        times[f"{name}: {steps:,} steps of {ms:,.1f} ms"] = steps * ms
    ms = clock.phases[-1].ms
    times[f"{validations:,} validations of {ms:,.1f} ms"] = validations * ms
    times["together"] = sum(times.values())
    for name, ms in times.items():
        machine.say(f"{timedelta(seconds=round(ms / 1000))!s:>8} {name}")
    machine.say(f"peak memory of rank 0: {peak_mib(machine):,.0f} MiB")
    state = trainer.state_dict()
    saved_bytes = sum(t.nbytes for t in [*state["model"].values(), *state["optim"].values()])

    def look() -> int:
        findings = environment_findings()
        findings += disk_findings(config.log_dir, GIB / 16)
        findings += disk_findings(config.checkpoint_dir, CHECKPOINTS_ON_DISK * saved_bytes)
        machine.say("\n".join(as_lines(findings)))
        return exit_code(findings)

    return machine.on_main(look)
