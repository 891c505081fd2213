"""Before a run: is the environment fit, do memory and disk suffice, and what will it take in time and money?

torch is imported by functions alone, since a torch that is missing or broken is a finding, as is an old Python.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

GIB, MIB = 2**30, 2**20
KNOWN_TORCH = ("2.11", "2.12", "2.13")
KNOWN_BAD = [("2.10", "A100|A800", "compiled training has given NaN", "install torch 2.13, or use --compile off")]
LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}  # major of CUDA to that of the driver: NVIDIA's table for Linux
PACKAGES = ("torch", "numpy", "scipy", "safetensors", "tiktoken", "huggingface_hub")
SAFE_SHARE = 0.9  # of the memory; what a plan does not count must fit too
REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"
INSTALL = "pip install -r requirements.txt"
CONTAINER, SHARED_MEMORY = Path("/sys/fs/cgroup"), Path("/dev/shm")
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")


class Finding(NamedTuple):
    level: str  # ok; warn: it can go on; stop: it cannot
    what: str
    fix: str = ""


def judge(bad: bool, level: str, what: str, fix: str) -> Finding:
    """A finding of this level and with its fix if it is bad, else an ok."""
    return Finding(level, what, fix) if bad else Finding("ok", what)


def verdict(findings: Iterable[Finding]) -> int:
    """Exit code: 0 go, 2 no-go."""
    return 2 if any(finding.level == "stop" for finding in findings) else 0


def report(findings: Sequence[Finding]) -> list[str]:
    """Lines of a table, each finding with its fix, and the verdict."""
    lines = [f"{level:5} {what}" + (f"\n      fix: {fix}" if fix else "") for level, what, fix in findings]
    levels = [finding.level for finding in findings]
    go = f"no-go: {levels.count('stop')} to mend" if verdict(findings) else "go"
    return [*lines, f"{go}, {levels.count('warn')} to keep in mind"]


# ---- The environment

def environment_findings() -> list[Finding]:
    """What this machine and its packages are fit for; raises nothing."""
    found = _run(_packages, _system)
    torch_is_here = sys.modules.get("torch") is not None  # _packages has imported it
    return found + (_run(_torch, _gpus, _computing) if torch_is_here else [])


def _run(*checks: Callable[[], Iterable[Finding]]) -> list[Finding]:
    found: list[Finding] = []
    for check in checks:
        try:
            found.extend(check())
        except Exception as error:  # a machine that is unlike others must not end in a traceback
            name = check.__name__.replace("_", " ").strip()
            found.append(Finding("warn", f"{name} could not be checked: {_in_short(error)}", "check it by hand"))
    return found


def _in_short(error: Exception) -> str:
    words = re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", str(error)).strip()
    return f"{type(error).__name__}: {words[:200]}"


def _version(package: str) -> str:
    return importlib.metadata.version(package).partition("+")[0]


def _packages() -> Iterator[Finding]:
    """Python, and each package imported by its own name and compared with requirements.txt, if that is there."""
    old = sys.version_info < (3, 11)
    yield judge(old, "stop", f"Python {platform.python_version()}", "install 3.11 or newer")
    pins = (re.match(r"(\w+)==([\w.]+)", line) for line in _text(REQUIREMENTS).splitlines())
    for name, pin in (dict.fromkeys(PACKAGES) | {pin[1]: pin[2] for pin in pins if pin}).items():
        try:
            importlib.import_module(name)
            found = _version(name)
        except Exception as error:  # whatever a broken package raises
            yield Finding("stop", f"{name} cannot be imported: {_in_short(error)}", INSTALL)
            continue
        other = pin not in (None, found) and name != "torch"  # which has a rule of its own
        yield judge(other, "warn", f"{name} {found}" + (f", requirements.txt has {pin}" if other else ""), INSTALL)


def _torch() -> Iterator[Finding]:
    """Whether torch is known to work, and has the versions of other packages that it asks for by ==."""
    found = _version("torch")
    if ".".join(found.split(".")[:2]) not in KNOWN_TORCH:
        yield Finding("warn", f"torch {found} is untried; known to work: {', '.join(KNOWN_TORCH)}", INSTALL)
    asked = (re.match(r"([\w.-]+)[^;]*?==([\w.]+)", line) for line in importlib.metadata.requires("torch") or [])
    for name, pin in (match.groups() for match in asked if match):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of another system, or an extra
            if _version(name) != pin:
                what = f"{name} {_version(name)}, but torch {found} is made for {pin}"
                yield Finding("warn", what, f"pip install {name}=={pin}")


def _gpus() -> Iterator[Finding]:
    import torch

    usable, cuda, known = torch.cuda.is_available(), torch.version.cuda, _nvidia_smi()
    for index in range(torch.cuda.device_count() if usable else 0):
        yield from _gpu(index)
    if not known:
        yield Finding("ok", "GPUs by nvidia-smi: none")
        return
    name, driver = known[0]
    least = LEAST_DRIVER.get((cuda or "").split(".")[0], 0)
    fix = "torch cannot start CUDA: see what torch.cuda.init() says"
    if cuda is None:
        fix = "the CPU would train; install a torch that is built for CUDA"
    elif int(driver.split(".")[0]) < least:
        fix = f"update the driver to {least} or newer, or take a torch for an older CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    what = f"{name} x {len(known)}, driver {driver}, torch built for CUDA {cuda}" + ", GPUs hidden" * hidden
    fix += "; CUDA_VISIBLE_DEVICES= trains on the CPU"
    yield judge(not (usable or hidden), "stop" if cuda else "warn", what, fix)


def _nvidia_smi() -> list[list[str]]:
    """[name, driver version] of each GPU that the driver knows."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.rsplit(", ", 1) for line in said.splitlines() if ", " in line]


def _gpu(index: int) -> Iterator[Finding]:
    import torch

    from runtime.environment import native_bf16

    gpu, native = torch.cuda.get_device_properties(index), native_bf16(torch.device("cuda", index))
    what = f"GPU {index}: {gpu.name}, {gpu.total_memory / GIB:.0f} GiB, capability {gpu.major}.{gpu.minor}, bf16 "
    fix = "float32 takes its place, several times slower; capability 8.0 and newer have it"
    yield judge(not native, "warn", what + ("native" if native else "not native"), fix)
    built = re.findall(r"sm_(\d+)\d", " ".join(torch.cuda.get_arch_list()))  # majors
    if built and str(gpu.major) not in built:
        yield Finding("stop", f"GPU {index}: this torch has no code for it", "install a torch that is built for it")
    for version, pattern, fault, fix in KNOWN_BAD:
        if _version("torch").startswith(f"{version}.") and re.search(pattern, gpu.name):
            yield Finding("stop", f"GPU {index}, {gpu.name}, with torch {version}: {fault}", fix)


def _computing() -> Iterator[Finding]:
    """CPU, compiler (which Triton needs too, for its launchers) and process groups."""
    import torch
    import torch.distributed as dist

    from runtime.environment import native_bf16, why_not_compile

    cores, threads = usable_cores(), torch.get_num_threads()
    bf16 = "bf16 native" if native_bf16(torch.device("cpu")) else "bf16 not native, float32 in its place"
    fix = f"set OMP_NUM_THREADS={max(int(cores), 1)}"
    yield judge(threads > max(cores, 1), "warn", f"CPU: cores {cores:g}, threads {threads}, {bf16}", fix)

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kinds = ["cpu", "cuda"] if gpus else ["cpu"]
    obstacle = "; ".join(filter(None, map(why_not_compile, map(torch.device, kinds))))
    fix = "install it, on Debian g++ and python3-dev; without it runs are slower"
    yield judge(bool(obstacle), "warn", f"compilation: {obstacle or 'what it needs is here'}", fix)

    there = [name for name in ("gloo", "nccl") if dist.is_available() and getattr(dist, f"is_{name}_available")()]
    fix = "several processes need gloo: install a torch that has it"
    if gpus and "gloo" in there:
        fix = "gloo takes the part of nccl between GPUs, slower; a torch for Linux has nccl"
    version = torch.cuda.nccl.version() if "nccl" in there else ()
    what = f"process groups: {', '.join(there) or 'none'} {'.'.join(map(str, version))}".rstrip()
    needed = "nccl" if gpus else "gloo"
    yield judge(needed not in there, "stop" if gpus > 1 and not there else "warn", what, fix)


def usable_cores() -> float:
    """Cores that this process may use; a container's share may be a fraction."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text(CONTAINER / "cpu.max").partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdigit() else cores


def _text(path: Path) -> str:
    """What a file says, nothing where there is none."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _system() -> Iterator[Finding]:
    """Disks, shared memory (NCCL's, within a machine), open files (shards, sockets, a compiler's workers), clock."""
    for folder in {os.stat(folder).st_dev: folder for folder in (tempfile.gettempdir(), ".")}.values():
        yield from disk_findings(folder, GIB)  # logs, sources, compiled graphs
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        fix = "several GPUs may need more: docker run --ipc=host, or --shm-size=2g"
        yield judge(free < GIB, "warn", f"{SHARED_MEMORY}: {free / MIB:,.0f} MiB free", fix)
    with contextlib.suppress(ImportError):  # Windows, which has no such limit
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        yield judge(0 <= limit < 1024, "warn", f"open files: at most {limit:,}", "ulimit -n 4096")
    ns = min(timeit.repeat(time.perf_counter_ns, number=1000, repeat=5)) * 1e6
    fix = "short steps will be timed badly: boot with a clock source in hardware, such as tsc"
    yield judge(ns > 1000, "warn", f"clock {_text(CLOCK_SOURCE) or 'of the system'}: {ns:,.0f} ns a reading", fix)


def disk_findings(folder: str | Path, needed_bytes: float) -> list[Finding]:
    """Whether so many bytes can be written to a folder, which need not exist yet."""
    path = Path(folder).absolute()
    place = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return [Finding("stop", f"{folder}: {place} is no folder that can be written to", "name another folder")]
    free = shutil.disk_usage(place).free
    what = f"{folder}: {free / GIB:,.1f} GiB free on disk, {needed_bytes / GIB:,.1f} needed"
    return [judge(free < needed_bytes, "stop", what, "make room, or name a folder on another disk")]


# ---- One run: memory, time and money

def available_memory(device: torch.device) -> float:
    """Bytes that are free or held by this process, of a CPU's this rank's share; infinite if the system is silent."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if not hasattr(os, "sysconf"):  # Windows
        return math.inf
    page, system = os.sysconf("SC_PAGE_SIZE"), _text(Path("/proc/meminfo"))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not system:  # macOS
        return page * os.sysconf("SC_PHYS_PAGES") / ranks
    free = 1024 * int(system.partition("MemAvailable:")[2].split()[0])
    resident, files = map(int, _text(Path("/proc/self/statm")).split()[1:3])
    most, limit = free + page * (resident - files), _text(CONTAINER / "memory.max")
    return (min(most, int(limit)) if limit.isdigit() else most) / ranks


def memory_plan(parts: Mapping[str, float], available: float) -> list[str]:
    """Lines of a table: what takes memory and what there is, all in bytes."""
    rows = {**parts, "total": sum(parts.values()), "available": available}
    return [f"{name:{max(map(len, rows))}} {amount / MIB:12,.1f} MiB" for name, amount in rows.items()]


def memory_finding(
    parts: Mapping[str, float], available: float, ways: Iterable[tuple[str, Mapping[str, float]]]
) -> Finding:
    """Whether parts of so many bytes fit, SAFE_SHARE of the memory at most; if not, the fix is the first way that does.

    `ways`, gone through only as far as needed: flags that choose another plan, and its parts; the best first.
    """
    total, most = sum(parts.values()), SAFE_SHARE * available
    what = f"memory: {total / MIB:,.0f} MiB planned, {available / MIB:,.0f} available"
    if total <= most:
        return Finding("ok", what)
    tried = [(total, "as asked for")]
    for flags, plan in ways:
        tried.append((sum(plan.values()), flags))
        if tried[-1][0] <= most:
            break
    needed, flags = min(tried)
    fix = f"{flags}: {needed / MIB:,.0f} MiB"
    if needed > most:
        fix = f"a smaller track: the least that this one takes is {needed / MIB:,.0f} MiB, {flags}"
    return Finding("stop" if total > available else "warn", what, fix)


def estimate(
    stages: Mapping[str, tuple[int, float]], validation_ms: float, validations: int, ready_ms: float, gpus: int,
    price: float,
) -> list[str]:  # fmt: skip
    """Times (h:mm:ss) of a run; with GPUs their hours, and the cost at dollars an hour.

    `stages` has the number of steps and the milliseconds of one; ready_ms passes before the first.
    """
    times = {f"{name}: {steps:,} steps of {ms:,.1f} ms": steps * ms for name, (steps, ms) in stages.items()}
    training = sum(times.values())
    times |= {"on the clock, in all": training, "getting ready": ready_ms}
    times[f"validation: {validations:,} of {validation_ms:,.1f} ms"] = validations * validation_ms
    times["together"] = training + ready_ms + validations * validation_ms
    hours = gpus * times["together"] / 3.6e6
    cost = f", {hours * price:,.2f} dollars at {price:g} an hour" if price else ""
    lines = [f"{timedelta(seconds=round(ms / 1000))!s:>8} {what}" for what, ms in times.items()]
    return lines + [f"{hours:8,.2f} GPU-hours on {gpus}{cost}"] * (gpus > 0)


def timed_plan(phases: Mapping[str, bool]) -> list[str]:
    """Which phases are on the clock, from their names and whether they are."""
    on, off = ([name for name, timed in phases.items() if timed is side] for side in (True, False))
    return [f"on the clock: {', '.join(on) or 'nothing'}", f"off the clock: {', '.join(off) or 'nothing'}"]
