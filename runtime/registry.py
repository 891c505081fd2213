"""The registry of a log folder: which runs were started, resumed and ended, in an order that cannot be changed.

Each line holds the SHA-256 of the line before it, and the header of a run that of its own start line. A line that was
taken out, put in or edited later breaks this chain; only the last lines can go unseen.
"""

import errno
import hashlib
import json
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runtime.jsonl import append, json_line

REGISTRY = "registry.jsonl"
FIELDS = ("event", "time", "run_id", "previous")  # of every line, all text
TAIL_BYTES = 2**16  # more than a line holds
MOST_BYTES = 2**28  # half a million lines; keeps a wrong file from filling the memory
BINARY = getattr(os, "O_BINARY", 0)  # Windows would change the ends of lines


class RegistryError(ValueError):
    """The lines of a registry are not those that were written. The message names file, line and rule."""


def register(path: Path, event: str, **fields: Any) -> str:
    """Append a line; returns its SHA-256. Runs that share a folder wait for each other. May raise OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o644)
    try:
        lock(descriptor)
        last = _last_line(descriptor)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = json_line({"event": event, "time": now, **fields, "previous": _sha256(last)})
        torn = b"\n" if last and not last.endswith(b"\n") else b""  # by a crash: that line stays as it is
        append(descriptor, torn + line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return _sha256(line)


def read_registry(path: Path) -> list[dict[str, Any]]:
    """The lines in order, each with its own "sha256". Raises RegistryError for a broken chain or what is no file."""
    entries: list[dict[str, Any]] = []
    before = b""
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise OSError(errno.EINVAL, "it is no regular file")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise RegistryError(f"{path} has {size:,} bytes, more than {MOST_BYTES:,}, so it is no registry")
        content = path.read_bytes()
    except OSError as error:
        raise RegistryError(f"cannot read the registry {path}: {error.strerror}. Make it readable.") from None
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            before = line  # torn by a crash; the next line names it as it stands
            continue
        if not isinstance(entry, dict) or not all(_is_text(entry.get(name)) for name in FIELDS):
            raise RegistryError(f"{path}, line {number}: no line of a registry; restore the file as the runs wrote it")
        if not re.fullmatch(r"\w[\w.-]*", entry["run_id"]):  # it becomes part of paths
            raise RegistryError(f"{path}, line {number}: run id {entry['run_id']!r} is no file name; restore the file "
                                f"as the runs wrote it")
        if entry["previous"] != _sha256(before):
            raise RegistryError(
                f"{path}, line {number}: it names {entry['previous']!s:.12} as the line before it, which is "
                f"{_sha256(before)[:12]}: a line was removed, added or edited. Restore the file as the runs wrote it."
            )
        entries.append(entry | {"sha256": _sha256(line)})
        before = line
    return entries


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _sha256(line: bytes) -> str:
    return hashlib.sha256(line.removesuffix(b"\n")).hexdigest()  # a torn line has no end until the next one is written


def lock(descriptor: int, wait: bool = True) -> bool:
    """Keep other processes out until the file is closed; False if one is in there and `wait` is off.

    Without locks (some network disks) lines stay whole, but two at once break the chain.
    """
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except ImportError:
        return _lock_on_windows(descriptor, wait)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _lock_on_windows(descriptor: int, wait: bool) -> bool:
    """The same there, where nobody can read what is locked, so that it is a byte behind the end; waits ten seconds."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, MOST_BYTES, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
    return True


def _last_line(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    os.lseek(descriptor, max(size - TAIL_BYTES, 0), os.SEEK_SET)
    tail = os.read(descriptor, TAIL_BYTES)
    return b"".join(tail.splitlines(keepends=True)[-1:])
