"""The run log: what a run was, step by step, as lines of JSON that survive whatever ends it.

    logs/<run_id>.jsonl        one object a line, written as it happens
    logs/sources/<sha256>/     the source files, once per version
    logs/registry.jsonl        a line when a run starts and a line when it ends, for all runs of the folder
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from runtime.jsonl import append, json_hash, json_line
from runtime.registry import REGISTRY, register

SCHEMA = 1  # raised whenever the meaning of an event or a field changes
SOURCE_FILES = ("train_gpt.py", "requirements.txt")
SOURCE_PACKAGES = ("optim", "data", "kernels", "runtime")
SETTINGS_OF_A_RUN = ("seed", "trials", "log_dir", "data_dir", "claim")  # not of the experiment
REGISTERED = ("track", "source_sha256", "config_sha256", "seed", "trial", "claim")
SYNCED_EVENTS = {"header", "val", "end"}  # the lines a claim is made from also survive a power cut


class RunLogError(RuntimeError):
    """The log could not be written. The message names the file, the system's reason, what is intact and the fix."""


# ---------------------------------------------------------------------------------------------------------------------
# What identifies a run


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


# ---------------------------------------------------------------------------------------------------------------------
# Files


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


class RunLog:
    """The log of one run: a new file `<directory>/<run_id>.jsonl`, never an existing one.

    A line is with the operating system when `write` returns, so it survives the death of the process.
    With `enabled=False` (ranks other than the first) nothing is written anywhere.
    Raises RunLogError when a file cannot be written; the log is then closed and ignores further events.
    """

    def __init__(self, directory: str | Path, run_id: str, *, enabled: bool = True):
        self.directory = Path(directory)
        self.run_id = run_id
        self.path = self.directory / f"{run_id}.jsonl"
        self.lines = 0
        self._start_ns = time.monotonic_ns()
        self._descriptor = self._create() if enabled else None

    def _create(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            return os.open(self.path, flags, 0o644)
        except OSError as error:
            fix = "choose a log folder that can be written"
            if os.path.lexists(self.path):
                fix = "a run log is never overwritten, choose another run id"
            raise RunLogError(f"cannot create the run log {self.path}: {error.strerror}; {fix}") from error

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the milliseconds since the log was opened."""
        if self._descriptor is None:
            return
        t_ms = (time.monotonic_ns() - self._start_ns) / 1e6
        line = json_line({"event": event, "t_ms": t_ms, **fields})
        try:
            append(self._descriptor, line)
        except OSError as error:
            self._fail(self.path, error)
        self.lines += 1
        if event in SYNCED_EVENTS:
            self.sync()

    def sync(self) -> None:
        """Force what was written to the disk itself."""
        if self._descriptor is None:
            return
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._fail(self.path, error)

    def close(self) -> None:
        self.sync()
        self._release()

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _fail(self, path: Path, error: OSError) -> NoReturn:
        with contextlib.suppress(OSError):
            self._release()
        raise RunLogError(
            f"cannot write {path}: {error.strerror}; the {self.lines} lines in {self.path} are intact. "
            f"Free some space there, or choose a log folder that can be written, and start the run again"
        ) from error

    def store_sources(self, root: str | Path) -> str:
        """Keep one copy of the source files under `sources/<sha256>/`; returns their SHA-256."""
        sources = _read_sources(root)  # read once, so that the hash names exactly what is stored
        sha256 = _digest(sources)
        folder = self.directory / "sources" / sha256
        if self._descriptor is not None and not folder.exists():
            try:
                _store(sources, folder)
            except OSError as error:
                self._fail(folder, error)
        return sha256

    def begin(self, header: dict[str, Any]) -> None:
        """Enter the run in the registry, before its first step so that none is forgotten, and write its header."""
        line = self._register("start", {name: header.get(name) for name in REGISTERED})
        self.write("header", schema=SCHEMA, run_id=self.run_id, **header, registry_sha256=line)

    def finish(self, end: dict[str, Any]) -> None:
        """Write how the run ended, here and in the registry, and close."""
        self.write("end", **end)
        if self._descriptor is not None:
            sha256 = hashlib.sha256(self.path.read_bytes()).hexdigest()
            self._register("end", {"status": end["status"], "val_loss": end["val_loss"], "log_sha256": sha256})
        self.close()

    def _register(self, event: str, fields: dict[str, Any]) -> str | None:
        if self._descriptor is None:
            return None
        path = self.directory / REGISTRY
        try:
            return register(path, event, run_id=self.run_id, **fields)
        except OSError as error:
            self._fail(path, error)
