"""The registry of a log folder: a line for each start, resume and end of a run.

Each line holds the SHA-256 of the line before it. A segment's header holds that of its own line
here. Removing, adding or editing a line breaks the chain; only the last lines can go unseen.
"""

import hashlib
import io
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from runtime.errors import LogError
from runtime.jsonl import append, json_line, parse, read_regular

REGISTRY = "registry.jsonl"
FIELDS = ("event", "time", "run_id", "previous")  # in every line, all text
TAIL_BYTES = 2**16  # no line is longer
MOST_BYTES = 2**26  # about 150,000 lines
MOST_TORN = 1000  # lines; only a crash in mid-write leaves one
BINARY = getattr(os, "O_BINARY", 0)  # without it Windows changes the line ends


def register(path: Path, event: str, **fields: Any) -> str:
    """Append a line and return its SHA-256. A lock lets runs share a folder. OSError."""
    with FileLock(f"{path}.lock"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o644)
        try:
            last = _last_line(descriptor)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            line = json_line({"event": event, "time": now, **fields, "previous": _sha256(last)})
            # A crash may have torn the last line. It stays in the chain, with a line end.
            torn = b"\n" if last and not last.endswith(b"\n") else b""
            append(descriptor, torn + line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return _sha256(line)


def read_registry(path: Path) -> list[dict[str, Any]]:
    """The lines in order, each with its own "sha256". LogError for a broken chain."""
    entries: list[dict[str, Any]] = []
    before = b""
    try:
        content = read_regular(path, MOST_BYTES)
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror}. Make it readable.") from None
    torn = 0
    for number, line in enumerate(io.BytesIO(content), 1):
        try:
            entry = parse(line)
        except ValueError:
            before = line  # torn by a crash; the next line holds the hash of what is left
            torn += 1
            if torn > MOST_TORN:
                raise LogError(f"{path}: over {MOST_TORN} lines are torn. Restore it.") from None
            continue
        _check(entry, before, f"{path}, line {number}")
        entries.append(entry | {"sha256": _sha256(line)})
        before = line
    return entries


def _check(entry: Any, before: bytes, where: str) -> None:
    mend = "restore the file as the runs wrote it"
    for name in FIELDS:
        value = entry.get(name) if isinstance(entry, dict) else None
        if not isinstance(value, str) or not value.isprintable():
            raise LogError(f"{where}: not a line of a registry, {name} must be text; {mend}")
    if not re.fullmatch(r"\w[\w.-]*", entry["run_id"]):  # it becomes part of paths
        raise LogError(f"{where}: run id {entry['run_id']!r} is no file name; {mend}")
    if entry["previous"] != _sha256(before):
        raise LogError(
            f"{where}: it names {entry['previous']:.12} as the hash of the line before it, which "
            f"is {_sha256(before):.12}. A line was removed, added or edited; {mend}"
        )


def _sha256(line: bytes) -> str:
    # Without the line end, which a torn line gets only when the next line is written.
    return hashlib.sha256(line.removesuffix(b"\n")).hexdigest()


def _last_line(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    os.lseek(descriptor, max(size - TAIL_BYTES, 0), os.SEEK_SET)
    tail = os.read(descriptor, TAIL_BYTES)
    return tail[tail.rfind(b"\n", 0, -1) + 1 :]
