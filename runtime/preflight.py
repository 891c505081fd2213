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
KNOWN_TORCH = ("2.11", "2.12", "2.13")
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
    lines.append("no-go" if exit_code(findings) else "go")
    return lines


def environment_findings() -> list[Finding]:
    """Look at Python, packages, GPUs, cores, compiler, process groups and disk. Raises nothing."""
    findings = list(_packages())
    checks = [_gpus, _computing] if "torch" in sys.modules else []  # _packages has imported it
    for check in checks:
        try:
            findings += check()
        except Exception as error:  # an unusual machine must not end in a traceback
            name = check.__name__.strip("_")
            findings.append(Finding("warn", f"{name}: {_short(error)}", "check by hand"))
    return findings + disk_findings(".", GIB)


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
        other = version != pin
        if name == "torch":  # several versions are known to work
            other = version.rpartition(".")[0] not in KNOWN_TORCH
        what = f"{name} {version}, requirements.txt has {pin}" if other else f"{name} {version}"
        yield judge(other, "warn", what, INSTALL)


def _gpus() -> Iterator[Finding]:
    import torch

    from runtime.machine import native_bf16

    usable = torch.cuda.is_available()
    for index in range(torch.cuda.device_count() if usable else 0):
        gpu, native = torch.cuda.get_device_properties(index), native_bf16(torch.device("cuda", index))
        what = f"GPU {index}: {gpu.name}, {gpu.total_memory / GIB:.0f} GiB, bf16 "
        fix = "float32 takes its place, several times slower; capability 8.0 and newer have it"
        yield judge(not native, "warn", what + ("native" if native else "not native"), fix)
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
        present = done.stdout.count("GPU ")
    except (OSError, subprocess.SubprocessError):
        present = 0
    unused = present > 0 and not usable and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    fix = "torch.cuda.init() says why; CUDA_VISIBLE_DEVICES= trains on the CPU"
    what = f"GPUs: nvidia-smi lists {present}, torch is built for CUDA {torch.version.cuda}"
    yield judge(unused, "stop" if torch.version.cuda else "warn", what, fix)


def _computing() -> Iterator[Finding]:
    """Cores, compiler and process groups."""
    import torch
    import torch.distributed as dist

    from runtime.compile import why_not_compile
    from runtime.machine import native_bf16

    cores, threads = usable_cores(), torch.get_num_threads()
    bf16 = "native" if native_bf16(torch.device("cpu")) else "not native: float32 is used"
    what = f"CPU: cores {cores:g}, threads {threads}, bf16 {bf16}"
    yield judge(threads > max(cores, 1), "warn", what, f"set OMP_NUM_THREADS={max(int(cores), 1)}")

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    obstacle = why_not_compile(torch.device("cuda" if gpus else "cpu"))
    fix = "install it (Debian: g++ and python3-dev); without it runs are slower"
    yield judge(obstacle is not None, "warn", f"compilation: {obstacle or 'works'}", fix)

    needed = "nccl" if gpus > 1 else "gloo"
    there = dist.is_available() and getattr(dist, f"is_{needed}_available")()
    what = f"process groups: {needed} is {'here' if there else 'missing'}"
    yield judge(not there, "warn", what, f"several processes need a torch that has {needed}")


def usable_cores() -> float:
    """Cores that this process may use; a container's share may be a fraction."""
    try:
        cores = len(os.sched_getaffinity(0))
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (AttributeError, OSError, ValueError):  # macOS and Windows; no container
        return os.cpu_count() or 1
    return min(cores, int(quota) / int(period)) if quota.isdigit() else cores


def disk_findings(folder: str | Path, needed_bytes: float) -> list[Finding]:
    """Whether so many bytes can be written below a folder, which need not exist yet."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return [Finding("stop", f"{folder}: {place} cannot be written to", "name another folder")]
    free = shutil.disk_usage(place).free
    what = f"{folder}: {free / GIB:,.1f} GiB free, {needed_bytes / GIB:,.1f} needed"
    fix = "make room, or name a folder on another disk"
    return [judge(free < needed_bytes, "stop", what, fix)]


def report(
    trainer: Any, clock: Any, stage_ms: Mapping[str, tuple[int, float]], validations: int
) -> int:
    """Print on rank 0 what a run takes and what stands in its way. Returns 0 to go, 2 not to.

    `clock` has the phases up to a validation; `stage_ms` has the steps of each stage and the
    milliseconds of one.
    """
    from runtime.machine import peak_mib

    machine, config = trainer.machine, trainer.config
    before = [phase.ms for phase in clock.phases if phase.name in ("setup", "compile", "warmup")]
    validation_ms = clock.phases[-1].ms
    times = [("set-up, compilation and warm-up", sum(before))]
    for name, (steps, ms) in stage_ms.items():
        times.append((f"{name}: {steps:,} steps of {ms:,.1f} ms", steps * ms))
    what = f"{validations:,} validations of {validation_ms:,.1f} ms"
    times.append((what, validations * validation_ms))
    times.append(("together", sum(ms for _, ms in times)))
    for what, ms in times:
        machine.say(f"{timedelta(seconds=round(ms / 1000))!s:>8} {what}")
    machine.say(f"peak memory of rank 0: {peak_mib(machine):,.0f} MiB")
    state = trainer.state_dict()
    tensors = [*state["model"].values(), *state["optim"].values()]
    saved_bytes = sum(tensor.nbytes for tensor in tensors)

    def look() -> int:
        findings = environment_findings()
        findings += disk_findings(config.log_dir, GIB / 16)
        findings += disk_findings(config.checkpoint_dir, CHECKPOINTS_ON_DISK * saved_bytes)
        machine.say("\n".join(as_lines(findings)))
        return exit_code(findings)

    return machine.on_main(look)
