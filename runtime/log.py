"""The run log: one JSON line an event, written so that it survives whatever ends the run.

    logs/<run_id>.jsonl        one event a line, written as it happens
    logs/<run_id>.2.jsonl      the second segment: a process that resumes the run writes its own
    logs/sources/<sha256>/     the source files, once per version
    logs/registry.jsonl        a line for each start, resume and end of a run

A process only appends, and only to its own segment. The header of a later segment names the step
after which it begins, and the hash of the segment before. What earlier segments say of later steps
no longer counts.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from runtime.errors import LogError
from runtime.jsonl import append, check_regular, json_hash, json_line
from runtime.registry import BINARY, REGISTRY, register
from runtime.settings import SETTINGS_OF_A_RUN

SCHEMA = 2  # goes up when an event or field changes its meaning
SOURCE_FILES = (
    "train_gpt.py", "requirements.txt", "data/vocabulary.tiktoken", "data/left_out.txt",
)  # fmt: skip
SOURCE_PACKAGES = ("optim", "data", "kernels", "runtime")
REGISTERED = ("track", "source_sha256", "config_sha256", "seed", "trial", "claim")
SYNCED_EVENTS = {"val", "end"}  # claims rest on these, so they must survive a power cut


# ---- What identifies a run


def source_files(root: str | Path) -> list[Path]:
    """The files that decide what a run computes, sorted by name relative to `root`."""
    root = Path(root)
    files = [root / name for name in SOURCE_FILES if (root / name).is_file()]
    for package in SOURCE_PACKAGES:
        files += [path for path in (root / package).rglob("*.py") if path.is_file()]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_sources(root: str | Path) -> dict[str, bytes]:
    """The contents of `source_files(root)` by their name relative to `root`."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in source_files(root)}


def digest(sources: dict[str, bytes]) -> str:
    """SHA-256 of names and contents, in the order of the names."""
    sha256 = hashlib.sha256()
    for name in sorted(sources):
        for part in (name.encode(), sources[name]):
            sha256.update(f"{len(part)}:".encode())  # else "ab" + "c" would equal "a" + "bc"
            sha256.update(part)
    return sha256.hexdigest()


def source_hash(root: str | Path) -> str:
    """SHA-256 of the names and contents of `source_files(root)`."""
    return digest(read_sources(root))


def config_hash(config: dict[str, Any]) -> str:
    """SHA-256 of the settings that all runs of one experiment share."""
    shared = {name: value for name, value in config.items() if name not in SETTINGS_OF_A_RUN}
    return json_hash(shared)


def new_run_id(track: str, seed: int, trial: int) -> str:
    """A unique name that sorts by start time (UTC), e.g. 20261121-083105_tiny_s0_t0_1a2b3c."""
    now = datetime.now(UTC)
    return f"{now:%Y%m%d-%H%M%S}_{track}_s{seed}_t{trial}_{secrets.token_hex(3)}"


# ---- Reading what a run has logged


class History(NamedTuple):
    """What a process that resumes a run needs to know of its segments."""

    header: dict[str, Any]  # of the newest segment
    sizes: tuple[int, ...]  # bytes of each segment
    sha256: str  # of the newest segment, a torn last line included
    status: str | None  # from the end line; None if the process was killed
    train_time_ms: float  # the largest in any segment
    t_ms: float  # likewise


def segment_path(directory: str | Path, run_id: str, number: int) -> Path:
    """The log file of a run's first, second, ... process."""
    return Path(directory, f"{run_id}.jsonl" if number == 1 else f"{run_id}.{number}.jsonl")


def read_history(directory: str | Path, run_id: str) -> History | None:
    """The history of a run, or None if it has no header yet. LogError if a file is not its log."""
    history = None
    train_time_ms = t_ms = 0.0
    sizes: tuple[int, ...] = ()
    path = segment_path(directory, run_id, 1)
    while content := _read_segment(path):
        events = [_event(line) for line in content.splitlines()]
        if events[0].get("event") != "header" or events[0].get("run_id") != run_id:
            raise LogError(f"{path}: line 1 must be the header of run {run_id}. Restore the file.")
        status = None
        for event in events:
            train_time_ms = max(train_time_ms, _milliseconds(event, "train_time_ms"))
            t_ms = max(t_ms, _milliseconds(event, "t_ms"))
            if event.get("event") in ("end", "resume"):  # schema 1 resumed within one file
                status = event.get("status")
        sizes += (len(content),)
        sha256 = hashlib.sha256(content).hexdigest()
        history = History(events[0], sizes, sha256, status, train_time_ms, t_ms)
        path = segment_path(directory, run_id, len(sizes) + 1)
    return history


def _read_segment(path: Path) -> bytes | None:
    """Bytes of a segment; None if there is none, or its process died before the first line."""
    try:
        check_regular(path)
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LogError(f"cannot read run log {path}: {error.strerror}. Make it readable.") from None
    return content if b"\n" in content else None


def _event(line: bytes) -> dict[str, Any]:
    """The event in a line; {} if the line is torn."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _milliseconds(event: dict[str, Any], name: str) -> float:
    value = event.get(name)
    return value if isinstance(value, float) and math.isfinite(value) else 0.0


# ---- Writing


def require_writable(directory: str | Path, flag: str = "--log-dir") -> None:
    """Create the folder. LogError at once, not after hours, if no file can be written there."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise LogError(f"{flag} {directory} cannot be written: {error.strerror}. Make it writable, "
                       f"or give another folder.") from None  # fmt: skip


def store_sources(directory: str | Path, root: str | Path) -> None:
    """Copy the sources to `sources/<sha256>/`, all or none. LogError if the disk refuses."""
    sources = read_sources(root)  # once, so that the hash names exactly what is stored
    folder = Path(directory, "sources", digest(sources))
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    if folder.exists():
        return
    try:
        for name, content in sources.items():
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        partial.rename(folder)
    except OSError as error:
        if not folder.exists():  # else another run with the same sources was first
            raise LogError(f"cannot write {folder}: {error.strerror}. Free some space.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class RunLog:
    """One segment of a run's log: the first, or with `history` the one after it.

    When `write` returns, the operating system has the line, so it survives the death of the
    process. A full disk does not end the run: lines wait in memory, and each later write tries
    them again. With `enabled=False` nothing is written.
    """

    def __init__(
        self, directory: str | Path, run_id: str, history: History | None = None,
        enabled: bool = True,
    ) -> None:  # fmt: skip
        self.directory, self.run_id, self.history = Path(directory), run_id, history
        self.segment = len(history.sizes) + 1 if history else 1
        self.path = segment_path(directory, run_id, self.segment)
        self.size = 0  # bytes, waiting lines included
        self._sha256 = hashlib.sha256()  # of the same bytes
        self._waiting: list[bytes] = []
        self._refusal: OSError | None = None  # the first
        self._start_ns = time.monotonic_ns()
        if history:
            self._start_ns -= math.ceil(1e6 * history.t_ms)  # t_ms never falls within a run
        self._descriptor: int | None = None
        if enabled:
            self._open()

    def _open(self) -> None:
        self._lock = FileLock(self.directory / f".{self.run_id}.lock")
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND | BINARY
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
            if self.history:
                if read_history(self.directory, self.run_id) != self.history:
                    raise OSError(errno.EEXIST, "another process has gone on with the run")
                self.path.unlink(missing_ok=True)  # of a process that died before its first line
            self._descriptor = os.open(self.path, flags, 0o644)
        except OSError as error:
            self._lock.release()
            reason = error.strerror
            if isinstance(error, Timeout):
                reason = "another process is writing it"
            raise LogError(f"cannot open run log {self.path}: {reason}. Wait for the other "
                           f"process, or give a --log-dir that can be written.") from error

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Its t_ms leaves out the pauses between segments."""
        if self._descriptor is None:
            return
        self._append(self._line(event, fields), sync=event in SYNCED_EVENTS)

    def _line(self, event: str, fields: dict[str, Any]) -> bytes:
        t_ms = (time.monotonic_ns() - self._start_ns) / 1e6
        return json_line({"event": event, "t_ms": t_ms, **fields})

    def _append(self, lines: bytes, sync: bool) -> None:
        """Write what waits and these. The first OSError prints a warning; later ones are silent."""
        assert self._descriptor is not None
        self._waiting.append(lines)
        self.size += len(lines)
        self._sha256.update(lines)
        try:
            while self._waiting:
                append(self._descriptor, self._waiting[0])
                del self._waiting[0]
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            if self._refusal is None:
                self._refusal = error
                with contextlib.suppress(OSError):  # stderr may be on the same disk
                    print(f"warning: cannot write {self.path}: {error.strerror}. The run goes on; "
                          f"free some space before it ends.", file=sys.stderr, flush=True)

    def begin(self, header: dict[str, Any], resumed: dict[str, Any] | None = None) -> None:
        """Register a start or a resume, and write the first lines. LogError if the disk refuses.

        `resumed` is the resume event: from_step, checkpoint (its name or None), differences.
        """
        entry, registered = "start", {name: header.get(name) for name in REGISTERED}
        if self.history and resumed:
            before = self.history.sha256
            after = {"segment": self.segment, "after_step": resumed["from_step"]}
            header = header | after | {"previous_sha256": before}
            entry, registered = "resume", after | {"log_sha256": before}
        # The registry comes first, so that no run is forgotten. The header holds its line's hash.
        sha256 = {"registry_sha256": self._register(entry, registered)}
        lines = self._line("header", {"schema": SCHEMA, "run_id": self.run_id, **header, **sha256})
        if resumed:
            lines += self._line("resume", resumed | sha256)
        self._append(lines, sync=True)  # both or none
        if self._refusal is not None:
            raise self._error(self.path, self._refusal)

    def finish(self, end: dict[str, Any]) -> None:
        """Log and register how the run ended, and close. LogError if the disk refuses."""
        if self._descriptor is None:
            return
        self.write("end", **end)
        registered = {"status": end["status"], "val_loss": end["val_loss"]}
        try:
            if not self._waiting:  # else the run counts as broken off, and can be resumed
                self._register("end", registered | {"log_sha256": self._sha256.hexdigest()})
        finally:
            self.close()

    def _register(self, entry: str, fields: dict[str, Any]) -> str:
        path = self.directory / REGISTRY
        try:
            return register(path, entry, run_id=self.run_id, **fields)
        except OSError as error:
            raise self._error(path, error) from error

    def _error(self, path: Path, error: OSError) -> LogError:
        return LogError(f"cannot write {path}: {error.strerror}; {self.path} is intact. Free some "
                        f"space or give another --log-dir, and start again.")  # fmt: skip

    def close(self) -> None:
        """Close the log. LogError if lines still wait: they are lost."""
        if self._descriptor is None:
            return
        empty = os.fstat(self._descriptor).st_size == 0
        os.close(self._descriptor)
        self._descriptor = None
        if empty:  # the run never began; readers would refuse an empty log
            self.path.unlink(missing_ok=True)
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)
        if self._waiting:
            raise LogError(f"cannot write {self.path}: its last {len(self._waiting)} lines are "
                           f"lost. Free some space and resume the run.")  # fmt: skip
