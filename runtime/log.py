"""The log of a run, written so that it survives whatever ends the run.

A line is one event in JSON. Each process of a run appends to a segment of its own. The
header of a later segment has the step after which it begins, and the hash of the segment before.
docs/log_schema.json has all files, events and fields.
"""

import contextlib
import errno
import hashlib
import math
import secrets
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock

from runtime.errors import LogError, cannot_write
from runtime.jsonl import Json, append, json_hash, json_line, open_regular, parse
from runtime.registry import REGISTRY, register
from runtime.settings import SETTINGS_OF_A_RUN, RunSettings, flag

SCHEMA = 3  # raised when an event or field changes its meaning
REGISTERED = ("track", "source_sha256", "config_sha256", "seed", "trial", "claim")
SYNCED_EVENTS = {"val", "end", "checkpoint"}  # on these claims and resumes rest


def config_hash(config: Json) -> str:
    """SHA-256 of the settings that all runs of one experiment share."""
    return json_hash({name: config[name] for name in config if name not in SETTINGS_OF_A_RUN})


def new_run_id(track: str, seed: int, trial: int) -> str:
    """A unique name that sorts by start time (UTC), e.g. 20261121-083105_tiny_s0_t0_1a2b3c."""
    now = datetime.now(UTC)
    return f"{now:%Y%m%d-%H%M%S}_{track}_s{seed}_t{trial}_{secrets.token_hex(3)}"


# ---- Reading what a run has logged


class History(NamedTuple):
    """What a process that resumes a run needs to know of its segments."""

    header: Json  # of the newest segment
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
        with open_regular(path) as file:
            content = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LogError(f"cannot read run log {path}: {error.strerror}. Make it readable.") from None
    return content if b"\n" in content else None


def _read_events(path: Path, content: bytes) -> list[Json]:
    """The events of a segment, but for a torn last line. LogError if another is not an event."""
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

    def begin(self, header: Json, resumed: Json | None = None) -> None:
        """Create the segment, register a start or a resume, and write the first lines. LogError.

        `resumed` is the resume event: from_step, checkpoint and its checkpoint_sha256 (or None),
        differences.
        """
        self._start_ns = time.monotonic_ns()
        if self.history:
            self._start_ns -= math.ceil(1e6 * self.history.t_ms)  # t_ms never falls within a run
        self._create()
        # The registry's line comes first, so that no run is forgotten; the header has its hash.
        registry = self.directory / REGISTRY
        if self.history and resumed:
            before = self.history.sha256
            place = {"segment": self.segment, "after_step": resumed["from_step"]}
            line = register(registry, "resume", run_id=self.run_id, **place, log_sha256=before)
            header = header | place | {"previous_sha256": before}
        else:
            facts = {name: header.get(name) for name in REGISTERED}
            line = register(registry, "start", run_id=self.run_id, **facts)
        first = {"schema": SCHEMA, "run_id": self.run_id}
        self._add("header", first | header | {"registry_sha256": line})
        if resumed:
            self._add("resume", resumed | {"registry_sha256": line})
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

    def _add(self, event: str, fields: Json) -> None:
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

    def finish(self, end: Json) -> None:
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
