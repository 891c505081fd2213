"""The run log, written so that it survives whatever ends the run, and the registry of its folder.

A line is one event in JSON. A process appends to its own segment alone. The header of a later
segment names the step after which it begins, and the hash of the segment before.
docs/log_format.md has all files, events and fields.
"""

import ast
import contextlib
import errno
import hashlib
import math
import os
import re
import secrets
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock

from runtime.errors import LogError
from runtime.jsonl import append, json_hash, json_line, open_regular, parse, read_regular
from runtime.settings import SETTINGS_OF_A_RUN, RunSettings, flag
from runtime.trainer import Trainer

SCHEMA = 3  # raised when an event or field changes its meaning
SOURCE_FILES = (
    "train_gpt.py", "inference/__init__.py", "inference/model.py", "requirements.txt",
    "data/prose.tiktoken", "data/wheels.txt",
)  # fmt: skip
SOURCE_PACKAGES = ("optim", "data", "kernels", "runtime")
REGISTERED = ("track", "source_sha256", "config_sha256", "seed", "trial", "claim")
SYNCED_EVENTS = {"val", "end", "checkpoint"}  # on these claims and resumes rest


# ---- What identifies a run


def read_sources(root: str | Path) -> dict[str, bytes]:
    """The files that decide what a run computes: contents by name relative to `root`, sorted."""
    root = Path(root)
    files, packages = source_lists(root)
    paths = [root / name for name in files]
    for package in packages:
        paths += (root / package).rglob("*.py")
    names = sorted(path.relative_to(root).as_posix() for path in paths if path.is_file())
    return {name: (root / name).read_bytes() for name in names}


def source_lists(root: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the source under `root` counts as its own, files and packages; ours if it has no list.

    Another edition has other files. So that its hash is that of its own logs, its list counts.
    """
    found = {"SOURCE_FILES": SOURCE_FILES, "SOURCE_PACKAGES": SOURCE_PACKAGES}
    path = root / "runtime" / "log.py"
    for node in ast.parse(path.read_bytes()).body if path.is_file() else ():
        name = getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) else ""
        if isinstance(node, ast.Assign) and name in found:
            found[name] = ast.literal_eval(node.value)
    return found["SOURCE_FILES"], found["SOURCE_PACKAGES"]


def digest(sources: dict[str, bytes]) -> str:
    """SHA-256 of names and contents, in the order of the names."""
    sha256 = hashlib.sha256()
    for name in sorted(sources):
        for part in (name.encode(), sources[name]):
            sha256.update(f"{len(part)}:".encode())  # else "ab" + "c" would equal "a" + "bc"
            sha256.update(part)
    return sha256.hexdigest()


def write_files(files: dict[str, bytes], folder: Path) -> None:
    """Write the files under a folder, as they stood in their repository."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def source_hash(root: str | Path) -> str:
    return digest(read_sources(root))


def config_hash(config: dict[str, Any]) -> str:
    """SHA-256 of the settings that all runs of one experiment share."""
    return json_hash({name: config[name] for name in config if name not in SETTINGS_OF_A_RUN})


def header(trainer: Trainer, seed: int, trial: int) -> dict[str, Any]:
    """The fields of the log's header for one run."""
    config, train = trainer.config, trainer.data.train
    settings = dict(vars(config))
    micro_steps, micro_rows = train.shares(config.steps)
    return {
        "track": config.track, "target": config.target, "seed": seed, "trial": trial,
        "claim": trainer.claim, "source_sha256": trainer.source_sha256,
        "config_sha256": config_hash(settings),
        "config": settings, "train_tokens": trainer.train_tokens,
        "data": trainer.hashes | {"val_tokens": config.val_tokens},
        "env": trainer.env, "checks": trainer.checks, "world_size": trainer.machine.world_size,
        "micro_batch": micro_rows * config.seq_len, "grad_accum": micro_steps,
    }  # fmt: skip


def new_run_id(track: str, seed: int, trial: int) -> str:
    """A unique name that sorts by start time (UTC), e.g. 20261121-083105_tiny_s0_t0_1a2b3c."""
    now = datetime.now(UTC)
    return f"{now:%Y%m%d-%H%M%S}_{track}_s{seed}_t{trial}_{secrets.token_hex(3)}"


# ---- Reading what a run has logged


class History(NamedTuple):
    """What a process that resumes a run needs to know of its segments."""

    header: dict[str, Any]  # of the newest segment
    segments: int
    sha256: str  # of the newest segment, a torn last line included
    status: str | None  # from the end line; None if the process was killed
    train_time_ms: float  # the largest in any segment
    t_ms: float  # the largest, too
    saved: tuple[str | None, ...]  # SHA-256 of each checkpoint's checksums


def segment_path(directory: str | Path, run_id: str, number: int) -> Path:
    """The log file of a run's first, second, ... process."""
    return Path(directory, f"{run_id}.jsonl" if number == 1 else f"{run_id}.{number}.jsonl")


def read_history(directory: str | Path, run_id: str) -> History | None:
    """The history of a run, or None if it has no header yet. LogError if a file is not its log."""
    history: History | None = None
    train_time_ms = t_ms = 0.0
    saved: tuple[str | None, ...] = ()
    path = segment_path(directory, run_id, 1)
    while content := _read_segment(path):
        events = _read_events(path, content)
        header, last = events[0], events[-1]
        if header["event"] != "header" or header.get("run_id") != run_id:
            raise LogError(f"{path}: line 1 must be the header of run {run_id}. Restore the file.")
        if history and header.get("previous_sha256") != history.sha256:
            raise LogError(f"{segment_path(directory, run_id, history.segments)} was changed after "
                           f"{path} was begun. Restore the file.")  # fmt: skip
        for event in events:
            train_time_ms = max(train_time_ms, event.get("train_time_ms", 0.0))
            t_ms = max(t_ms, event.get("t_ms", 0.0))
            if event["event"] == "checkpoint":
                saved += (event.get("sha256"),)
        status = last.get("status") if last["event"] == "end" else None
        segments = history.segments + 1 if history else 1
        sha256 = hashlib.sha256(content).hexdigest()
        history = History(header, segments, sha256, status, train_time_ms, t_ms, saved)
        path = segment_path(directory, run_id, segments + 1)
    return history


def _read_segment(path: Path) -> bytes | None:
    """Bytes of a segment; None if there is none, or its process died before the first line."""
    try:
        with open_regular(path, links=False) as file:
            content = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LogError(f"cannot read run log {path}: {error.strerror}. Make it readable.") from None
    return content if b"\n" in content else None


def _read_events(path: Path, content: bytes) -> list[dict[str, Any]]:
    """The events of a segment, without a torn last line. LogError names a line that is none."""
    events = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            event = parse(line)
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ValueError("no event of a run log")
            times = [event.get(name, 0) for name in ("t_ms", "train_time_ms")]
            if not all(type(ms) in (int, float) and 0 <= ms < 2**53 for ms in times):
                raise ValueError("t_ms and train_time_ms are numbers")
        except ValueError as error:
            raise LogError(f"{path}, line {number} is not as the run wrote it: {error}. Restore "
                           f"the file, or start a new run without --resume.") from None
        events.append(event)
    return events


# ---- The registry: a line for each start, resume and end of a run
# Each line holds the SHA-256 of the line before it; a segment's header holds that of its own line
# here. Removing, adding or editing a line breaks the chain; only the last lines can go unseen.

REGISTRY = "registry.jsonl"
REGISTRY_FIELDS = ("event", "time", "run_id", "previous")  # in every line, all text
TAIL_BYTES = 2**16  # no line of the registry is longer
MOST_REGISTRY_BYTES, MOST_LINES = 2**26, 200_000  # read in a few seconds


def register(path: Path, event: str, **fields: Any) -> str:
    """Append a line and return its SHA-256. A lock lets runs share a folder. LogError."""
    try:
        with FileLock(f"{path}.lock"), open(path, "a+b", buffering=0) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
            tail = file.read()
            last = tail[tail.rfind(b"\n", 0, -1) + 1 :]
            now = datetime.now(UTC).isoformat(timespec="seconds")
            line = json_line({"event": event, "time": now, **fields, "previous": _sha256(last)})
            # A crash may have torn the last line. It stays in the chain, with a line end.
            torn = b"\n" if last and not last.endswith(b"\n") else b""
            append(file.fileno(), torn + line, sync=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    return _sha256(line)


def cannot_write(path: Path, error: OSError) -> LogError:
    return LogError(f"cannot write {path}: {error.strerror}. Free some space or give another "
                    f"folder, and start again or resume.")  # fmt: skip


def read_registry(path: Path) -> list[dict[str, Any]]:
    """The lines in order, each with its own "sha256". LogError for a broken chain."""
    entries: list[dict[str, Any]] = []
    before = b""
    try:
        content = read_regular(path, MOST_REGISTRY_BYTES)
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror}. Make it readable.") from None
    if content.count(b"\n") > MOST_LINES:
        raise LogError(f"{path} has over {MOST_LINES:,} lines. Give another --log-dir.")
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            entry = parse(line)
        except ValueError:
            before = line  # torn by a crash; the next line holds the hash of what is left
            continue
        _check(entry, before, f"{path}, line {number}")
        entries.append(entry | {"sha256": _sha256(line)})
        before = line
    return entries


def _check(entry: Any, before: bytes, where: str) -> None:
    fix = "restore the file as the runs wrote it"
    for name in REGISTRY_FIELDS:
        value = entry.get(name) if isinstance(entry, dict) else None
        if not isinstance(value, str) or not value.isprintable():
            raise LogError(f"{where}: not a line of a registry, {name} must be text; {fix}")
    if not re.fullmatch(r"\w[\w.-]*", entry["run_id"]):  # it becomes part of paths
        raise LogError(f"{where}: run id {entry['run_id']!r} is no file name; {fix}")
    if entry["previous"] != _sha256(before):
        raise LogError(
            f"{where}: it names {entry['previous']:.12} as the hash of the line before it, which "
            f"is {_sha256(before):.12}. A line was removed, added or edited; {fix}"
        )


def _sha256(line: bytes) -> str:
    # Without the line end, which a torn line gets only when the next line is written.
    return hashlib.sha256(line.removesuffix(b"\n")).hexdigest()


# ---- Writing


def require_folders(config: RunSettings) -> None:
    """LogError at once, not after hours, for a folder that cannot be written. Creates nothing."""
    for name in ("log_dir", "checkpoint_dir"):
        directory = getattr(config, name)
        folder = Path(directory).absolute()
        try:
            nearest = next(path for path in (folder, *folder.parents) if path.exists())
            tempfile.TemporaryFile(dir=nearest).close()
        except OSError as error:
            raise LogError(f"{flag(name)} {directory} cannot be written: {error.strerror}. Make it "
                           f"writable, or give another folder.") from None  # fmt: skip


def store_sources(directory: str | Path, root: str | Path) -> str:
    """Copy the sources to `sources/<sha256>/`, once. Returns the hash. LogError if it cannot."""
    sources = read_sources(root)  # once, so that the hash names exactly what is stored
    sha256 = digest(sources)
    folder = Path(directory, "sources", sha256)
    try:
        if source_hash(folder) != sha256:
            write_files(sources, folder)
    except OSError as error:  # the next run writes the rest
        raise cannot_write(folder, error) from error
    return sha256


class RunLog:
    """One segment of a run's log: the first, or with `history` the one after it.

    `begin` creates it; before that nothing is written. When `write` returns, the operating system
    has the line, so it survives the death of the process. A full disk does not end the run: lines
    wait in memory, and each later write tries them again. Two threads may write.
    """

    def __init__(self, directory: str | Path, run_id: str, history: History | None = None) -> None:
        self.directory, self.run_id, self.history = Path(directory), run_id, history
        self.segment = history.segments + 1 if history else 1
        self.path = segment_path(directory, run_id, self.segment)
        self._waiting = b""
        self._sha256 = hashlib.sha256()  # of all lines, waiting ones included
        self._warned = False
        self._lock = FileLock(self.directory / f".{run_id}.lock")
        self._one_writer = threading.Lock()
        self._file: BinaryIO | None = None

    def begin(self, header: dict[str, Any], resumed: dict[str, Any] | None = None) -> None:
        """Create the segment, register a start or a resume, and write the first lines. LogError.

        `resumed` is the resume event: from_step, checkpoint and its checkpoint_sha256 (or None),
        differences.
        """
        self._start_ns = time.monotonic_ns()
        if self.history:
            self._start_ns -= math.ceil(1e6 * self.history.t_ms)  # t_ms never falls within a run
        self._create()
        entry, registered = "start", {name: header.get(name) for name in REGISTERED}
        if self.history and resumed:
            before = self.history.sha256
            after = {"segment": self.segment, "after_step": resumed["from_step"]}
            header = header | after | {"previous_sha256": before}
            entry, registered = "resume", after | {"log_sha256": before}
        # First the registry, so that no run is forgotten: the header holds its line's hash.
        path = self.directory / REGISTRY
        sha256 = {"registry_sha256": register(path, entry, run_id=self.run_id, **registered)}
        self._add("header", {"schema": SCHEMA, "run_id": self.run_id, **header, **sha256})
        if resumed:
            self._add("resume", resumed | sha256)
        try:
            self._flush(sync=True)  # both lines or none
        except OSError as error:
            self._waiting = b""
            raise cannot_write(self.path, error) from error

    def _create(self) -> None:
        try:
            self._lock.acquire(blocking=False)
            if read_history(self.directory, self.run_id) != self.history:
                raise OSError(errno.EEXIST, "another process has resumed the run")
            self._file = self.path.open("wb", buffering=0)  # maybe over the half of a first line
        except OSError as error:
            self._lock.release()
            reason = error.strerror or "another process is writing it"  # a Timeout of the lock
            raise LogError(f"cannot open run log {self.path}: {reason}. Wait for the other "
                           f"process, or give a --log-dir that can be written.") from error

    def write(self, event: str, **fields: Any) -> bool:
        """Append one event. Return whether the file has it, and of SYNCED_EVENTS the disk.

        Lines that the file lacks wait in memory. Only the first OSError prints a warning.
        """
        if self._file is None:
            return False
        with self._one_writer:
            self._add(event, fields)
            try:
                self._flush(sync=event in SYNCED_EVENTS)
            except OSError as error:
                warning = f"warning: cannot write {self.path}: {error.strerror}. The run continues."
                with contextlib.suppress(OSError):  # stderr may be on the same disk
                    if not self._warned:
                        print(warning, "Free some space before it ends.", file=sys.stderr)
                self._warned = True
                return False
            return True

    def _add(self, event: str, fields: dict[str, Any]) -> None:
        """Let a line wait. Its t_ms leaves out the pauses between segments."""
        t_ms = (time.monotonic_ns() - self._start_ns) / 1e6
        line = json_line({"event": event, "t_ms": t_ms, **fields})
        self._waiting += line
        self._sha256.update(line)

    def _flush(self, sync: bool) -> None:
        """Write the waiting lines, all or none."""
        assert self._file is not None
        append(self._file.fileno(), self._waiting, sync)
        self._waiting = b""

    def finish(self, end: dict[str, Any]) -> None:
        """Log and register how the run ended, and close. LogError if the disk refuses."""
        with contextlib.closing(self):
            if self.write("end", **end):  # else the run is unfinished, and can be resumed
                registered = {"status": end["status"], "val_loss": end["val_loss"]}
                registered["log_sha256"] = self._sha256.hexdigest()
                register(self.directory / REGISTRY, "end", run_id=self.run_id, **registered)

    def close(self) -> None:
        """Close the log. LogError if lines still wait: they are lost."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # a network disk may refuse lines once more
            self._file.close()
        self._file = None
        self._lock.release()
        if self._waiting:
            raise LogError(f"cannot write {self.path}: its last lines are lost. Free some space "
                           f"and resume the run.")  # fmt: skip
