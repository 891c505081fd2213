"""Training runs side by side: how many at once, with how many threads, and their processes.

Threads of a run wait for each other at every operation; runs never do. So on two cores two runs
with a thread each finish sooner than one after the other with two threads (records/benchmarks).
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

from claims.questions import child_process

RUN_BYTES = 7 * 2**29  # 3.5 GiB; `small` takes 3.2 at its peak
SMALL_ENOUGH = ("tiny", "small")  # tracks of which several runs share a machine
POLL_S = 0.05


class Job(NamedTuple):
    """A process that trains a run."""

    words: list[str]
    console: Path  # what it prints is appended here
    about: Any = None  # for the caller


class Sharing(NamedTuple):
    """How runs share the machine. threads: of each run; None: as many as torch takes by itself."""

    at_once: int
    threads: int | None


ONE_BY_ONE = Sharing(1, None)
COMPARED = 8  # runs before the first interim analysis of an A/B test: two arms, four seeds


def share(configs: Iterable[dict[str, Any]], runs: int = COMPARED) -> Sharing:
    """How to train so many runs of these settings: all at once, if cores and memory allow.

    Threads change the order of sums, so all runs of a comparison have as many. They depend on the
    cores alone: a comparison that resumes beside other programs has them again.
    """
    configs = list(configs)
    if not all(map(shares_machine, configs)):
        return ONE_BY_ONE
    own = os.environ.get("OMP_NUM_THREADS", "")  # the user's choice stays
    threads = int(own) if own.isdecimal() and int(own) else max(1, cores() // runs)
    memory = gpu_memory() if any(map(on_gpu, configs)) else free_memory()
    return Sharing(max(1, min(runs, cores() // threads, memory // RUN_BYTES)), threads)


def shares_machine(config: dict[str, Any]) -> bool:
    """Whether several runs of these settings were measured to pay at once.

    On a GPU, runs of `small` without compilation: an H200 trained fourteen, and its cores were
    full. Each process would compile for minutes what a run needs for seconds.
    """
    eager = config.get("compile") == "off" or not on_gpu(config)
    return config.get("track") in SMALL_ENOUGH and eager and config.get("device") != "mps"


def cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def on_gpu(config: dict[str, Any]) -> bool:
    """Whether runs use an NVIDIA GPU. Asking torch would take seconds."""
    return config.get("device", "auto") in ("auto", "cuda") and which("nvidia-smi") is not None


def free_memory() -> int:
    """Bytes that programs can still take; all of the memory where the system does not say."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvail")))
    with contextlib.suppress(AttributeError, ValueError, OSError):  # macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2 * RUN_BYTES


def gpu_memory() -> int:
    """Free bytes of the first GPU, which runs use."""
    words = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True)
    first = done.stdout.split()[:1]
    return 2**20 * int(first[0]) if first and first[0].isdecimal() else RUN_BYTES


def run_side_by_side(
    jobs: Sequence[Job], sharing: Sharing, ended: Callable[[Job, int], None]
) -> None:
    """Run all jobs, so many at once. `ended` gets each with its exit code when it ends.

    An exception, Ctrl-C too, ends all processes; runs that they finished stay.
    """
    environment = dict(os.environ)
    if sharing.threads:
        environment["OMP_NUM_THREADS"] = str(sharing.threads)
    waiting, running = list(jobs), dict[subprocess.Popen, Job]()
    with contextlib.ExitStack() as children:
        try:
            while waiting or running:
                while waiting and len(running) < sharing.at_once:
                    job = waiting.pop(0)
                    with job.console.open("a") as out:
                        begun = child_process(job.words, stdout=out, stderr=out, env=environment)
                        running[children.enter_context(begun)] = job
                time.sleep(POLL_S)
                for child in [child for child in running if child.poll() is not None]:
                    ended(running.pop(child), child.returncode)
        except BaseException:
            for child in running:  # all at once: leaving the stack waits for one after the other
                child.terminate()
            raise
