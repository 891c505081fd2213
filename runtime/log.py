"""The run log: what a run was, step by step, as lines of JSON that survive whatever ends it.

    logs/<run_id>.jsonl        one object a line, written as it happens
    logs/sources/<sha256>/     the source files, once per version
    logs/registry.jsonl        a line when a run starts, is resumed and ends, for all runs of the folder

Nothing is ever taken out of a log. A run that is resumed goes on in the same file: its `resume` event says from which
byte on the lines before it are superseded, as they tell of work that was lost.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from runtime.jsonl import append, json_hash, json_line
from runtime.registry import BINARY, REGISTRY, lock, register
from runtime.settings import SETTINGS_OF_A_RUN

SCHEMA = 1  # raised whenever the meaning of an event or a field changes
SOURCE_FILES = ("train_gpt.py", "requirements.txt")
SOURCE_PACKAGES = ("optim", "data", "kernels", "runtime")
REGISTERED = ("track", "source_sha256", "config_sha256", "seed", "trial", "claim")
SYNCED_EVENTS = {"header", "resume", "val", "end"}  # the lines a claim is made from also survive a power cut
# Links are not followed, nor is a pipe waited for; Windows, which makes neither of them by accident, has no such flags.
NO_TRAPS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class RunLogError(RuntimeError):
    """The log could not be read or written. The message names the file, the system's reason and the fix."""


class NotBegun(RunLogError):
    """There is no log, or not even its first line is whole: the run was killed before its first step."""


class Tail(NamedTuple):
    """How far a log goes, superseded lines included: its times are those that nothing may fall behind again."""

    header: dict[str, Any]
    header_bytes: int  # of the first line
    log_bytes: int
    status: str | None  # of the last end, if no resume follows it
    train_time_ms: float
    t_ms: float


# ---- What identifies a run


def source_files(root: str | Path) -> list[Path]:
    """The files that decide what a run computes, sorted by their name relative to `root`."""
    root = Path(root)
    files = [root / name for name in SOURCE_FILES if (root / name).is_file()]
    for package in SOURCE_PACKAGES:
        files += (path for path in (root / package).rglob("*.py") if path.is_file())
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _read_sources(root: str | Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in source_files(root)}


def _digest(sources: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sources.items():
        for part in (name.encode(), content):
            digest.update(f"{len(part)}:".encode())  # the length keeps neighbours from running into each other
            digest.update(part)
    return digest.hexdigest()


def source_hash(root: str | Path) -> str:
    """SHA-256 over names and contents of `source_files(root)`."""
    return _digest(_read_sources(root))


def config_hash(config: dict[str, Any]) -> str:
    """SHA-256 of the settings that all runs of one experiment share."""
    return json_hash({name: value for name, value in config.items() if name not in SETTINGS_OF_A_RUN})


def new_run_id(track: str, seed: int, trial: int) -> str:
    """A unique name that sorts by start time (UTC), such as 20261121-083105_tiny_s0_t0_1a2b3c."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}_{track}_s{seed}_t{trial}_{secrets.token_hex(3)}"


# ---- Files


def require_writable(directory: str | Path) -> None:
    """Make the folder of the logs; ValueError, before hours are spent, if nothing can be written there."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"log folder {directory} cannot be written: {error.strerror}. Make it writable, or give another --log-dir."
        ) from error


def _store(sources: dict[str, bytes], folder: Path) -> None:
    """Write the files below `folder`, which appears whole or not at all."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        for name, content in sources.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        temporary.rename(folder)
    except OSError:
        if not folder.exists():  # else another run of the same sources was first
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _event(line: bytes) -> dict[str, Any]:
    """The object in a line; empty for one that was torn."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def tail_of(path: str | Path) -> Tail:
    """Read a log with lines torn by a crash anywhere. RunLogError for a file that does not begin with a header."""
    path = Path(path)
    try:
        if path.is_symlink() or not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it is a link or no regular file")
        content = path.read_bytes()
    except FileNotFoundError:
        raise NotBegun(f"cannot read the run log {path}: there is none; give the --log-dir of its run") from None
    except OSError as error:
        raise RunLogError(f"cannot read the run log {path}: {error.strerror}; give the --log-dir of its run") from error
    lines = content.split(b"\n")
    events = list(map(_event, lines))
    if len(lines) == 1:
        raise NotBegun(f"{path} is no run log: its first line is no header, as it was torn; start the run anew")
    if events[0].get("event") != "header":
        raise RunLogError(f"{path} is no run log: its first line is no header; start the run anew")
    last: dict[str, Any] = next((event for event in reversed(events) if event.get("event") in ("end", "resume")), {})
    times = [max(_time(event, name) for event in events) for name in ("train_time_ms", "t_ms")]
    return Tail(events[0], len(lines[0]) + 1, len(content), last.get("status"), *times)


def _time(event: dict[str, Any], name: str) -> float:
    value = event.get(name)
    return value if isinstance(value, float) and math.isfinite(value) else 0.0


def register_end(path: Path) -> None:
    """Register how the run of a log ended, as it could not itself. May raise OSError."""
    content = path.read_bytes()
    end = _event(content.splitlines()[-1])
    outcome = {"status": end.get("status"), "val_loss": end.get("val_loss")}
    sha256 = hashlib.sha256(content).hexdigest()
    register(path.with_name(REGISTRY), "end", run_id=path.stem, **outcome, log_sha256=sha256)


class RunLog:
    """The log of one run: a new file `<directory>/<run_id>.jsonl`, an existing one only by `reopen`.

    A line is with the operating system when `write` returns, so it survives the death of the process. What the system
    refuses does not end the run: stderr is told once, lines wait in memory and are tried again, in order, before each
    later one. With `enabled=False` (ranks other than the first) nothing is written anywhere.
    """

    def __init__(self, directory: str | Path, run_id: str, *, enabled: bool = True):
        self.directory = Path(directory)
        self.run_id = run_id
        self.path = self.directory / f"{run_id}.jsonl"
        self.offset = 0  # bytes in the file, with those that wait
        self._sha256 = hashlib.sha256()  # of the same
        self.found = b""  # what the file held when it was reopened
        self._refusal: OSError | None = None  # the first
        self._waiting: deque[bytes] = deque()
        self._start_ns = time.monotonic_ns()
        self._descriptor = self._open(os.O_CREAT | os.O_EXCL) if enabled else None

    @classmethod
    def reopen(cls, directory: str | Path, run_id: str, *, enabled: bool = True) -> "RunLog":
        """Go on with an existing log: after its last line, which may be torn, and after its last `t_ms`.

        Raises RunLogError for one that is missing, a link, of another run or being written by another process.
        """
        log = cls(directory, run_id, enabled=False)
        if enabled:
            log._descriptor = log._open(0)
            try:
                log._continue()
            except RunLogError:
                log.close()
                raise
        return log

    def _open(self, flags: int) -> int:
        flags |= os.O_RDWR | os.O_APPEND | BINARY | NO_TRAPS
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, flags, 0o644)
            if lock(descriptor, wait=False):
                return descriptor
            os.close(descriptor)
            raise OSError(errno.EBUSY, "another process is writing it")
        except OSError as error:
            fix = "choose a log folder that can be written"
            if flags & os.O_EXCL and os.path.lexists(self.path):
                fix = "a run log is never overwritten, choose another run id"
            raise RunLogError(f"cannot open the run log {self.path}: {error.strerror}; {fix}") from error

    def _continue(self) -> None:
        tail = tail_of(self.path)
        if tail.header.get("run_id") != self.run_id:
            raise RunLogError(f"{self.path} is the log of run {tail.header.get('run_id')!r}; give back its own name")
        self._start_ns -= math.ceil(tail.t_ms * 1e6)
        self.found = self.path.read_bytes()
        self.offset = len(self.found)
        self._sha256.update(self.found)
        if not self.found.endswith(b"\n"):
            self._append(b"\n")

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the milliseconds since the log was created, the time between resumptions left out."""
        if self._descriptor is None:
            return
        t_ms = (time.monotonic_ns() - self._start_ns) / 1e6
        self._append(json_line({"event": event, "t_ms": t_ms, **fields}))
        if event in SYNCED_EVENTS:
            self.sync()

    def _append(self, line: bytes) -> None:
        self._waiting.append(line)
        self.offset += len(line)
        self._sha256.update(line)
        self._try(self._flush)

    def _flush(self, descriptor: int) -> None:
        while self._waiting:
            append(descriptor, self._waiting[0])
            self._waiting.popleft()

    def _try(self, action: Callable[[int], object]) -> None:
        """Do it to the file, if it is open; a refusal is told once."""
        try:
            if self._descriptor is not None:
                action(self._descriptor)
        except OSError as error:
            if self._refusal is None:
                self._refusal = error
                with contextlib.suppress(OSError):  # what is told may go to the same disk
                    print(f"warning: cannot write {self.path}: {error.strerror}. The run goes on and keeps its lines; "
                          f"make the file writable again before it ends", file=sys.stderr, flush=True)  # fmt: skip

    def sync(self) -> None:
        """Force what was written to the disk itself."""
        self._try(os.fsync)

    def close(self) -> None:
        """Raises RunLogError if lines still wait; it names the file elsewhere in which they are kept."""
        self._try(self._flush)
        self.sync()
        self._try(os.close)
        self._descriptor = None
        lines, self._waiting = self._waiting, deque()
        if lines and self._refusal:
            raise RunLogError(f"cannot write {self.path}: {self._refusal.strerror}; its last {len(lines)} lines "
                              f"{self._rescue(lines)}")  # fmt: skip

    def _rescue(self, lines: Iterable[bytes]) -> str:
        """Write them to a temporary file; returns what became of them."""
        try:
            descriptor, name = tempfile.mkstemp(prefix=f"{self.run_id}_", suffix=".jsonl")
            with open(descriptor, "wb") as file:
                file.writelines(lines)
        except OSError as error:
            return f"are lost, as there is no temporary file for them either: {error.strerror}"
        return f"are in {name}: free some space and append them to the log"

    def store_sources(self, root: str | Path) -> str:
        """Keep one copy of the source files under `sources/<sha256>/`; returns their SHA-256. Raises RunLogError."""
        sources = _read_sources(root)  # read once, so that the hash names exactly what is stored
        sha256 = _digest(sources)
        folder = self.directory / "sources" / sha256
        if self._descriptor is not None and not folder.exists():
            try:
                _store(sources, folder)
            except OSError as error:
                raise self._refused(folder, error) from error
        return sha256

    def begin(self, header: dict[str, Any]) -> None:
        """Enter the run in the registry, before its first step so that none is forgotten, and write its header."""
        registered = {name: header.get(name) for name in REGISTERED}
        self._enter("start", registered, "header", schema=SCHEMA, run_id=self.run_id, **header)

    @property
    def waiting(self) -> str:
        """The lines that the file does not have yet."""
        return b"".join(self._waiting).decode()

    def restore(self, log_offset: int, waiting: str) -> None:
        """Append, of lines that waited at this offset when their process died, what the reopened file lacks."""
        short = log_offset - len(self.found)
        if 0 < short <= len(waiting.encode()) and self.found.endswith(b"\n"):
            self._append(waiting.encode()[-short:])
            self.found += waiting.encode()[-short:]

    def resume(self, *, from_step: int, checkpoint: str | None, differences: list[str], log_offset: int) -> None:
        """Enter in the registry what the log was, and write that its lines from byte `log_offset` on are superseded.

        `checkpoint` is a folder's name, None for the start of the run.
        """
        registered = {"from_step": from_step, "log_bytes": self.offset, "log_sha256": self._sha256.hexdigest()}
        self._enter(
            "resume", registered, "resume", from_step=from_step, checkpoint=checkpoint, differences=differences,
            log_offset=self.found.rfind(b"\n", 0, log_offset) + 1,  # of lines that were never written nothing stands
            time=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip

    def finish(self, end: dict[str, Any]) -> None:
        """Write how the run ended, here and in the registry, and close. RunLogError if either was refused."""
        self.write("end", **end)
        registered = {"status": end["status"], "val_loss": end["val_loss"], "log_sha256": self._sha256.hexdigest()}
        try:
            self._register("end", registered)
        finally:
            self.close()

    def _enter(self, entry: str, registered: dict[str, Any], event: str, **fields: Any) -> None:
        """A line in the registry and an event that vouches for it. RunLogError if refused, as nothing is lost yet."""
        self.write(event, **fields, registry_sha256=self._register(entry, registered))
        if self._refusal is not None:
            raise self._refused(self.path, self._refusal)

    def _register(self, entry: str, fields: dict[str, Any]) -> str | None:
        if self._descriptor is None:
            return None
        path = self.directory / REGISTRY
        try:
            return register(path, entry, run_id=self.run_id, **fields)
        except OSError as error:
            raise self._refused(path, error) from error

    def _refused(self, path: Path, error: OSError) -> RunLogError:
        return RunLogError(
            f"cannot write {path}: {error.strerror}; the lines in {self.path} are intact. "
            f"Free some space there, or choose a log folder that can be written, and start the run again"
        )
