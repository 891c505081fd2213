"""What befalls a run, and what is left of it: kills, fills, truncates and poisons real runs, and counts.

    python tests/faults.py                    all, with 50 kills of one run of the tiny track (./run.sh data tiny)
    python tests/faults.py --quick          small runs alone, in less than a minute
    python tests/faults.py --only rank      the faults with that in their name

Survived is a fault where log and checkpoints stay readable and the run, resumed, goes on from its newest whole
checkpoint to the losses of one that nothing befell, bit for bit; a process that ends by itself does so in time, without
a traceback, with its documented exit code and a line that names the fault. Exit code: 0 nothing was lost, 1 something
was, 2 bad arguments.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from data.shards import write_shard
from runtime.registry import REGISTRY, read_registry
from scripts.command import set_up_output
from claims.runlog import Resume, Run, read_run

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = multiprocessing.get_context("forkserver")  # a trainer is forked from a process that has it imported
LIMIT = 600.0  # seconds; what takes longer hangs
RANK_TIMEOUT = 4
FIRST, SECOND = 7, 27  # steps before which a run can be held
SAVED = "interrupted after step"
LAST = "step_000006"  # the checkpoint before FIRST
DISK = 16  # MiB of the disks that logs and checkpoints of small runs are on
MEMORY = 150  # MiB that a batch of WIDE exceeds, and a quarter of it does not
VOCABULARY, BOS = 64, 63

Flags = dict[str, Any]
Losses = list[tuple[int, float | None]]  # of all steps, then of all validations
SMALL: Flags = {
    "vocab-size": VOCABULARY, "bos": BOS, "dim": 32, "head-dim": 16, "sequence": 128, "max-document": 64,
    "batch-tokens": 512, "micro-batch": 512, "val-tokens": 1024, "val-sequence": 256, "val-batch": 512, "val-every": 10,
    "steps": 30, "extension": 2, "window-block": 16, "windows": "3,7", "extension-window": 7, "final-window": 7,
    "momentum-warmup": 5, "momentum-cooldown": 3, "compile": "off", "dtype": "float32", "device": "cpu",
    "val-sha256": "", "checkpoint-every": 2, "rank-timeout": RANK_TIMEOUT,
}  # fmt: skip
WIDE = SMALL | {"batch-tokens": 2**14, "micro-batch": "auto", "steps": 3, "val-every": 0, "windows": "7"}
TINY = {"track": "tiny", "data-dir": ROOT / "data/corpus", "steps": 100, "val-tokens": 65_536, "val-every": 0,
        "val-sha256": "", "compile": "off", "device": "cpu", "checkpoint-every": 4}  # fmt: skip


class Broken(Exception):
    """A promise that was not kept."""


class Untried(Exception):
    """This machine cannot have the fault."""


def require(kept: Any, promise: str) -> None:
    if not kept:
        raise Broken(promise)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        require(time.monotonic() < end, f"what is waited for comes within {LIMIT:g} s")
        time.sleep(0.002)


# ---- What befalls a process from within: changes of the imported trainer. `folder` is the process's own.

Patch = Callable[[Any, Path], None]


def wrap(home: Any, name: str, around: Callable[..., Any]) -> None:
    """Have `around` called instead of a function, with the function before its arguments."""
    setattr(home, name, partial(around, getattr(home, name)))


def hold(trainer: Any, folder: Path) -> None:
    """Wait before the steps FIRST and SECOND until it is let go."""

    def wait(forward_backward: Any, session: Any, windows: Any) -> Any:
        if (step := session.steps_done + 1) in (FIRST, SECOND):
            (folder / f"held.{step}").touch()
            until((folder / f"go.{step}").exists)
        return forward_backward(session, windows)

    wrap(trainer, "forward_backward", wait)


def poison(trainer: Any, folder: Path, *, of_loss: bool, last: int = FIRST) -> None:
    """NaN in the loss or in a gradient, from step FIRST on."""

    def poisoned(forward_backward: Any, session: Any, windows: Any) -> Any:
        message = forward_backward(session, windows)
        if FIRST <= session.steps_done + 1 <= last:
            (message[:1] if of_loss else session.model.blocks[1].mlp.up.grad).fill_(float("nan"))
        return message

    wrap(trainer, "forward_backward", poisoned)


def die(trainer: Any, folder: Path, *, name: str, call: int, after: bool) -> None:
    """kill -9 before or after the call of this number of a function in runtime."""
    calls = iter(range(1, call + 1))
    module, _, function = name.rpartition(".")

    def deadly(function: Any, *arguments: Any, **named: Any) -> Any:
        last = next(calls) == call
        result = function(*arguments, **named) if after or not last else None
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    wrap(importlib.import_module(module), function, deadly)


def limit_memory(trainer: Any, folder: Path) -> None:
    """In the warm-up there are MEMORY MiB more than what is in use."""

    def limited(compile_model: Any, session: Any) -> None:
        used = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) * 1024
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY * 2**20, limits[1]))
        compile_model(session)
        resource.setrlimit(resource.RLIMIT_DATA, limits)

    wrap(trainer, "compile_model", limited)


def jump_clock(trainer: Any, folder: Path) -> None:
    """A wall clock that is days off, each time it is looked at anew."""
    jumps = random.Random(0)
    wrap(time, "time", lambda now: now() + jumps.uniform(-1e6, 1e6))


def fill_output(trainer: Any, folder: Path) -> None:
    """The disk of stdout and stderr is full."""
    for stream in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), stream)


# ---- Processes, and what they leave behind


def child(words: list[str], folder: Path, environment: dict[str, str], patches: Sequence[Patch]) -> None:
    """In a new process: the trainer as its command line starts it."""
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(environment)
    tempfile.tempdir = str(folder)
    trainer = importlib.import_module("train_gpt")
    for patch in patches:
        patch(trainer, folder)
    sys.exit(trainer.main(words))


class Process:
    """A trainer with a folder of its own."""

    def __init__(self, words: list[str], folder: Path, environment: dict[str, str], patches: Sequence[Patch]) -> None:
        folder.mkdir()
        self.folder = folder
        self._process = CONTEXT.Process(target=child, args=(words, folder, environment, patches), daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def code(self) -> int | None:
        return self._process.exitcode

    @property
    def said(self) -> str:
        output = self.folder / "output.txt"
        return output.read_text(errors="replace") if output.exists() else ""

    def held(self, step: int) -> None:
        until(lambda: self.code is not None or (self.folder / f"held.{step}").exists())
        require(self.code is None, f"it lives until step {step}: {self.said[-300:]}")

    def go(self, *steps: int) -> None:
        for step in steps:
            (self.folder / f"go.{step}").touch()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def ends(self, code: int, naming: str = "") -> None:
        self._process.join(LIMIT)
        hangs = self.code is None
        self.kill()
        require(not hangs, f"it ends within {LIMIT:g} s; it said {self.said[-300:]!r}")
        require("Traceback" not in self.said, f"no traceback: {self.said[-600:]}")
        require(self.code == code, f"exit code {code}, not {self.code}: {self.said[-300:]!r}")
        require(naming in self.said, f"it names {naming!r}: {self.said[-300:]!r}")


class Case:
    """Folders and runs of one fault; `tried` counts faults, `random` chooses moments."""

    def __init__(self, folder: Path, flags: Flags, ranks: int = 1, kills: int = 0) -> None:
        self.folder, self.ranks, self.kills = folder, ranks, kills
        self.expected: Losses = []
        self.processes: list[Process] = []
        self.data, self.logs, self.checkpoints = (folder / name for name in ("data", "logs", "checkpoints"))
        self.flags, self.tried, self.random = flags, 1, random.Random(folder.name)
        for path in (self.data, self.logs, self.checkpoints):
            path.mkdir(parents=True)
        write_data(self.data)

    def another(self, name: str, copied: bool = True) -> "Case":
        """One with folders of its own; in them is what logs and checkpoints are here now, if that is wanted."""
        case = Case(self.folder / name.replace(" ", "_"), self.flags, self.ranks)
        case.expected, case.processes = self.expected, self.processes
        for path in ("logs", "checkpoints") if copied else ():
            shutil.copytree(self.folder / path, case.folder / path, dirs_exist_ok=True)
        return case

    def start(self, *patches: Patch, **changed: Any) -> list[Process]:
        folders = {"data-dir": self.data, "log-dir": self.logs, "checkpoint-dir": self.checkpoints}
        flags = folders | self.flags | {name.replace("_", "-"): value for name, value in changed.items()}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started = []
        for rank in map(str, range(self.ranks)):
            folder = self.folder / f"process{len(self.processes)}"
            started.append(Process(words, folder, shared | {"RANK": rank, "LOCAL_RANK": rank}, patches))
            self.processes.append(started[-1])
        return started

    @property
    def log(self) -> Path:
        """That of the last run whose first line was written; else a path where nothing is."""
        logs = [path for path in self.logs.glob("*.jsonl") if path.name != REGISTRY and b"\n" in path.read_bytes()]
        return max(logs, default=self.folder / "none")

    @property
    def resumes(self) -> list[Resume]:
        return read_run(str(self.log)).resumes if self.log.exists() else []

    def newest(self) -> str | None:
        """The newest whole checkpoint. Raises ValueError where log or registry cannot be read."""
        if self.log.exists():
            read_run(str(self.log))
            read_registry(self.logs / REGISTRY)
        return max((path.name for path in self.checkpoints.glob("*/step_*") if is_whole(path)), default=None)

    def went_on(self, newest: str | None, resumes: int) -> None:
        """Broken where the run was resumed, since it had so many resumptions, from anything else."""
        for resume in self.resumes[resumes:]:
            require(resume.checkpoint == newest, f"it goes on from {newest}, not {resume.checkpoint}")

    def broken_off(self) -> None:
        """Have a run killed before step FIRST."""
        (process,) = self.start(hold)
        process.held(FIRST)
        until(lambda: self.newest() == LAST)
        process.kill()

    def resume(self, exact: bool = True) -> Run:
        """Go on to the end."""
        before = self.newest(), len(self.resumes)
        for process in self.start(resume="auto"):
            process.ends(0)
        self.went_on(*before)
        return self.finished(exact)

    def finished(self, exact: bool = True) -> Run:
        """The run, if it is done and has the losses of one that nothing befell."""
        run = read_run(str(self.log))
        require(run.complete, f"a complete log, not one with {run.unfinished}")
        require(not exact or losses(run) == self.expected, "the losses of a run that nothing befell, bit for bit")
        return run


def losses(run: Run) -> Losses:
    trained: Losses = [(step.step, step.train_loss) for step in run.steps]
    return trained + [(validation.step, validation.loss) for validation in run.validations]


def is_whole(checkpoint: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        sums = json.loads((checkpoint / "checksums.json").read_bytes())
        found = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in sums}
        return len(sums) == 3 and sums == found
    return False


def write_data(folder: Path) -> None:
    """Documents that count on, each by a stride of its own."""
    for seed, (name, count) in enumerate({"s_train_0": 4000, "s_train_1": 100, "s_val_0": 30}.items()):
        documents = np.random.default_rng(seed).integers([[20], [0], [1]], [[100], [BOS], [4]], (3, count)).T
        parts = [[BOS, *(first + stride * np.arange(length)) % BOS] for length, first, stride in documents]
        write_shard(folder / f"{name}.bin", np.concatenate(parts))


# ---- What befalls from without, between two steps: what it changes is put right at the end

Harm = Callable[[Case, list[Process]], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of its own where this process may mount one; else a mere folder."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "none", str(folder)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)  # -l: also where a process still has it open


@contextlib.contextmanager
def full(folder: Path, process: Process) -> Iterator[None]:
    """No byte more fits on the disk; without one of its own, the process may make no file of 64 KiB."""
    if os.path.ismount(folder):
        with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        yield
        (folder / "filler").unlink()
    elif folder.name == "checkpoints" and hasattr(resource, "prlimit"):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2**16, 2**16))
        yield
    else:
        raise Untried("no disks that can be filled")


@contextlib.contextmanager
def read_only(folder: Path, process: Process | None = None) -> Iterator[None]:
    if not os.path.ismount(folder):
        raise Untried("no disks that can be made read-only")
    for mode in ("ro", "rw"):
        subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)
        if mode == "ro":
            yield


@contextlib.contextmanager
def signalled(case: Case, processes: list[Process], number: int, rank: int = 0, times: int = 1) -> Iterator[None]:
    for again in range(times):
        time.sleep(2.5 * again)  # sooner, it could be the echo of a launcher
        os.kill(processes[rank].pid, number)
    yield


@contextlib.contextmanager
def changed_shard(case: Case, processes: list[Process], change: Callable[[Path], object]) -> Iterator[None]:
    shard = case.data / "s_train_0.bin"
    content = shard.read_bytes()
    change(shard)
    yield
    shard.write_bytes(content)


@contextlib.contextmanager
def full_log(case: Case, processes: list[Process]) -> Iterator[None]:
    with full(case.logs, processes[0]):
        yield
    (rescued,) = processes[0].folder.glob("*.jsonl")  # its name was told
    with open(case.log, "ab") as log:
        log.write(rescued.read_bytes())


@contextlib.contextmanager
def full_log_for_a_while(case: Case, processes: list[Process]) -> Iterator[None]:
    with full(case.logs, processes[0]):
        processes[0].go(FIRST)
        processes[0].held(SECOND)
    yield


@contextlib.contextmanager
def no_checkpoints(case: Case, processes: list[Process], obstacle: Callable[[Path, Process], Any]) -> Iterator[None]:
    until(lambda: case.newest() == LAST)
    with obstacle(case.checkpoints, processes[0]):
        processes[0].go(FIRST)
        processes[0].held(SECOND)
        processes[0].kill()
    require(case.newest() == LAST, "the last checkpoint stays")
    yield


# ---- The faults; each raises Broken for a promise that was not kept


def amid(case: Case, harm: Harm, code: int, naming: str = "", witness: int = 0) -> None:
    """Harm between two steps; one process ends with this code and a line that names it; then on to the end."""
    processes = case.start(hold)
    for process in processes:
        process.held(FIRST)
    with harm(case, processes):
        processes[witness].go(FIRST, SECOND)
        processes[witness].ends(code, naming)
        for process in processes:
            process.kill()
    run = case.resume() if code else case.finished()
    require(naming != SAVED or not run.resumes[0].redone, "no step is done again")


def alone(case: Case, patch: Patch, code: int = 0, naming: str = "", **changed: Any) -> None:
    """Harm from within; the process ends with this code and a line that names it."""
    case.start(patch, **changed)[0].ends(code, naming)


def kills(case: Case) -> None:
    steps, case.tried = max(step for step, _ in case.expected), 0
    for _ in range(case.kills):
        before, size = (case.newest(), len(case.resumes)), case.log.stat().st_size if case.log.exists() else 0
        (process,) = case.start(resume="auto")
        if case.random.random() < 1 / 3:
            time.sleep(case.random.uniform(0, 0.02 * steps))  # less than what a run of so many steps takes
        else:
            left = steps - int((before[0] or "step_0").removeprefix("step_"))
            wait_for_steps(case, process, size, case.random.uniform(0, min(2 * steps / case.kills, left - 5)))
        if process.code is not None:
            break
        process.kill()
        case.tried += 1
        case.went_on(*before)
    case.resume()


def wait_for_steps(case: Case, process: Process, size: int, count: float) -> None:
    """Until there are so many steps in the log behind its first bytes, and a little longer."""
    event = b'"event": "step"'
    until(lambda: process.code is not None
          or (case.log.exists() and case.log.read_bytes()[size:].count(event) >= count))  # fmt: skip
    time.sleep(case.random.uniform(0, 0.05))


MOMENTS: dict[str, tuple[str, int, bool, bool]] = {  # before or after which call of what, and whether of a resumed run
    "before the run is registered": ("runtime.log.register", 1, False, False),
    "before its first line": ("runtime.log.register", 1, True, False),
    "in half a checkpoint": ("runtime.checkpoint.save_file", 4, True, False),
    "before a checkpoint has its name": ("runtime.checkpoint._sync", 10, True, False),
    "before the oldest checkpoint goes": ("runtime.checkpoint._remove", 4, False, False),
    "before the resumption is registered": ("runtime.log.register", 1, False, True),
    "before the line of the resumption": ("runtime.log.register", 1, True, True),
    "before the end is registered": ("runtime.log.register", 2, False, False),
    "after the end is registered": ("runtime.log.register", 2, True, False),
}


def worst_moments(case: Case) -> None:
    case.broken_off()
    case.tried = 0
    for moment, (name, call, after, resumed) in MOMENTS.items():
        try:
            one = case.another(moment, copied=resumed)
            alone(one, partial(die, name=name, call=call, after=after), -signal.SIGKILL, resume="auto")
            one.resume()
        except Broken as broken:
            raise Broken(f"killed {moment}: {broken}") from None
        case.tried += 1


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'{"event": "step", ')


def damaged_checkpoint(case: Case) -> None:
    case.broken_off()
    damages: dict[str, Callable[[Path], None]]
    damages = {"model.safetensors": flip, "optim.safetensors": halve, "state.json": Path.unlink, "checksums.json": flip}
    case.tried = 0
    for name, damage in damages.items():
        one = case.another(name)
        damage(next(one.checkpoints.glob(f"*/{LAST}")) / name)
        require(one.resume().resumes[-1].checkpoint != LAST, "the damaged one is not taken")
        case.tried += 1


def torn_log(case: Case) -> None:
    case.broken_off()
    other = case.another("shorter")
    grow(case.log)
    os.truncate(other.log, other.log.stat().st_size - 10)
    for one in (case, other):
        one.resume()
    case.tried = 2


def read_only_log(case: Case) -> None:
    with read_only(case.logs):
        case.start()[0].ends(2, "cannot be written: Read-only file system")


def one_nan(case: Case, of_loss: bool, named: str) -> None:
    alone(case, partial(poison, of_loss=of_loss), naming=f"step {FIRST} skipped, {named} nan (shard s_train_0.bin, ")
    skipped = [step.step for step in case.finished(exact=False).steps if step.skipped]
    require(skipped == [FIRST], f"step {FIRST} alone is skipped, not {skipped}")


def all_nan(case: Case) -> None:
    alone(case, partial(poison, of_loss=False, last=10**6), 3, "steps were skipped in a row")
    require(not case.resume(exact=False).resumes[-1].redone, "no step is done again")


def less_memory(case: Case) -> None:
    alone(case, limit_memory, naming="out of memory: micro-batch")
    found, wanted = (np.array(each, float) for each in (losses(case.finished(exact=False)), case.expected))
    require(np.allclose(found, wanted, rtol=1e-4), "the losses of a run with memory for its batch")


def jumping_clock(case: Case) -> None:
    alone(case, jump_clock)
    times = [phase.t_ms for phase in case.finished().phases]
    require(times == sorted(times) and 0 < times[-1] < LIMIT * 1000, f"durations are those of the run, not {times}")


class Fault(NamedTuple):
    what: str
    befall: Callable[[Case], None]
    flags: Flags = SMALL
    ranks: int = 1
    long: bool = False  # not for --quick


TERM, INT, KILL, STOP = signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP
FAULTS = {
    "kill": Fault("kill -9 at random moments, a third of them in start-up", kills),
    "kill-tiny": Fault("the same in one run of the tiny track: 100 steps, not compiled, a checkpoint every 4",
                       kills, TINY, long=True),
    "kill-worst-moments": Fault("kill -9 between the two halves of all that takes two", worst_moments),
    "sigterm": Fault("SIGTERM", partial(amid, harm=partial(signalled, number=TERM), code=143, naming=SAVED)),
    "sigint": Fault("SIGINT", partial(amid, harm=partial(signalled, number=INT), code=130, naming=SAVED)),
    "two-signals": Fault("a second SIGTERM, in a step that does not end",
                         partial(amid, harm=partial(signalled, number=TERM, times=2), code=143)),
    "log-disk-full": Fault("no space for the log, to the end: its last lines are in a temporary file",
                           partial(amid, harm=full_log, code=1, naming="lines are in ")),
    "log-disk-full-a-while": Fault("no space for the log for 20 steps", partial(amid, harm=full_log_for_a_while, code=0,
                                   naming="The run goes on and keeps its lines")),
    "log-read-only": Fault("a log folder that cannot be written", read_only_log),
    "log-torn": Fault("a log that ends in the middle of a line", torn_log),
    "output-disk-full": Fault("no space for what it says", partial(alone, patch=fill_output)),
    "checkpoint-disk-full": Fault("no space for checkpoints, then kill -9", partial(
        amid, harm=partial(no_checkpoints, obstacle=full), code=-9, naming="could not be written")),
    "checkpoint-read-only": Fault("no way to write checkpoints, then kill -9", partial(
        amid, harm=partial(no_checkpoints, obstacle=read_only), code=-9, naming="could not be written")),
    "checkpoint-damaged": Fault("one of its four files is damaged or gone", damaged_checkpoint),
    "shard-truncated": Fault("a shard is cut while it is read, and put back",
                             partial(amid, harm=partial(changed_shard, change=halve), code=1, naming="s_train_0.bin")),
    "shard-grown": Fault("a shard grows while it is read, and is put back",
                         partial(amid, harm=partial(changed_shard, change=grow), code=1, naming="s_train_0.bin")),
    "shard-vanished": Fault("a shard is deleted while it is read", partial(
        amid, harm=partial(changed_shard, change=Path.unlink), code=0)),
    "nan-loss": Fault("NaN in the loss of a step", partial(one_nan, of_loss=True, named="spike: loss or norm")),
    "nan-gradient": Fault("NaN in a gradient of a step", partial(
        one_nan, of_loss=False, named="nonfinite: blocks.1.mlp.up")),
    "nan-always": Fault("NaN in all steps, then in none", all_nan),
    "rank-killed": Fault("kill -9 of rank 1 of 2", partial(
        amid, harm=partial(signalled, number=KILL, rank=1), code=1, naming="rank 1 ("), ranks=2),
    "rank-0-killed": Fault("kill -9 of rank 0 of 2", partial(
        amid, harm=partial(signalled, number=KILL), code=1, naming="rank 0 (", witness=1), ranks=2),
    "rank-stopped": Fault("SIGSTOP of rank 1 of 2", partial(
        amid, harm=partial(signalled, number=STOP, rank=1), code=1, naming="rank 1 ("), ranks=2),
    "rank-hangs": Fault("rank 1 of 2 lives and does nothing", partial(
        amid, harm=partial(signalled, number=0), code=1, naming="it hangs"), ranks=2, long=True),
    "memory": Fault("no memory for the batch", partial(
        alone, patch=limit_memory, code=1, naming="--micro-batch auto", micro_batch=WIDE["batch-tokens"]), WIDE),
    "memory-auto": Fault("the same with --micro-batch auto", less_memory, WIDE),
    "clock": Fault("a wall clock that jumps by days, there and back", jumping_clock),
}  # fmt: skip


# ---- The suite


class Outcome(NamedTuple):
    name: str
    tried: int
    lost: int
    seconds: float
    told: str  # what befell, what was lost, or why it was not tried

    def line(self) -> str:
        verdict = "LOST" if self.lost else "survived" if self.tried else "not tried"
        return f"{self.name:22} {self.tried:3} {verdict:>9} {self.seconds:6.1f} s  {self.told}"


def examine(name: str, fault: Fault, case: Case, expected: Callable[[], Losses]) -> Outcome:
    """Have it befall a run whose losses are expected: whatever is raised is a loss, but Untried."""
    begun, lost, told = time.monotonic(), 0, fault.what
    try:
        case.expected = expected()
        with contextlib.ExitStack() as disks:
            for path in (case.logs, case.checkpoints) if fault.flags is SMALL else ():
                disks.enter_context(small_disk(path))
            fault.befall(case)
    except Untried as error:
        case.tried, told = 0, f"{error}: {told}"
    except Exception as error:
        case.tried, lost, told = max(case.tried, 1), 1, f"{told}: {type(error).__name__}: {error}"
    for process in case.processes:
        process.kill()
    return Outcome(name, case.tried, lost, time.monotonic() - begun, told)


def uninterrupted(case: Case) -> Losses:
    for process in case.start():
        process.ends(0)
    return losses(case.finished(exact=False))


def get_ready() -> None:
    """Have processes forked from one that has imported what takes long."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    CONTEXT.set_forkserver_preload(["train_gpt", "torch._inductor"])


def study(faults: dict[str, Fault], kills: int, say: Callable[[str], None]) -> list[Outcome]:
    """Have all befall, two at a time, after the runs that they are compared with."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder, kinds = Path(name), {(id(fault.flags), fault.ranks): fault for fault in faults.values()}
        expected = {
            kind: pool.submit(uninterrupted, Case(folder / f"kind{number}", fault.flags, fault.ranks))
            for number, (kind, fault) in enumerate(kinds.items())
        }
        outcomes = [
            pool.submit(
                examine, name, fault,
                Case(folder / name, fault.flags, fault.ranks, kills=kills if fault.flags is TINY else 4),
                expected[id(fault.flags), fault.ranks].result,
            )
            for name, fault in faults.items()
        ]  # fmt: skip
        for future in as_completed(outcomes):
            say(future.result().line())
    return [future.result() for future in outcomes]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small runs alone")
    parser.add_argument("--only", default="", metavar="NAME", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--kills", type=int, default=50, help="of one run of the tiny track (50)")
    parser.add_argument("--json", action="store_true", help="print one JSON list; progress goes to stderr")
    given = parser.parse_args(argv)
    chosen = {name: fault for name, fault in FAULTS.items() if given.only in name and not (given.quick and fault.long)}
    if not chosen:
        parser.error(f"--only {given.only}: no such fault{' in --quick' * given.quick}; there are {', '.join(FAULTS)}")
    if given.kills < 1:
        parser.error(f"--kills {given.kills}: must be 1 or more")
    set_up_output()
    get_ready()
    stream = sys.stderr if given.json else sys.stdout
    outcomes = study(chosen, given.kills, partial(print, file=stream, flush=True))
    tried, lost = (sum(getattr(outcome, count) for outcome in outcomes) for count in ("tried", "lost"))
    table = "\n".join(["", *(outcome.line() for outcome in outcomes)])
    print(json.dumps([outcome._asdict() for outcome in outcomes], indent=2) if given.json else table)
    print(f"{tried} faults tried, {tried - lost} survived, {lost} lost", file=stream)
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
