"""The registry of a log folder: a line for each start, resume and end of a run.

Each line holds the SHA-256 of the line before it, and a log's header that of its own line here.
Removing, adding or editing a line breaks the chain; only the last lines can be lost unseen.
"""

import hashlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from runtime.errors import LogError, cannot_write
from runtime.jsonl import Json, append, json_line, parse, read_regular

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


def read_registry(path: Path) -> list[Json]:
    """The lines in order, each with its own "sha256". LogError for a broken chain."""
    entries: list[Json] = []
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
