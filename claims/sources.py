"""The sources of records. `records/sources/<first 12 of the hash>.txt` holds each source once.

    source 706e244f...
    commit b7b682ad...
    file data/__init__.py, 57 bytes
    (the file, byte for byte, and one more newline)

A reader takes as many bytes as the line before them says, so a file may hold any bytes.
"""

import difflib
import re
from pathlib import Path
from typing import NamedTuple

from runtime.errors import ClaimError
from runtime.jsonl import check_regular, read_regular
from runtime.log import digest

MOST_BYTES = 2**24  # sixty times the first sources; keeps a wrong file from filling the memory
HEAD = re.compile(rb"source [0-9a-f]{64}\n(?:commit ([0-9a-f]{40,64})\n)?")
# No part of a name begins with a dot: someone may write the files to a folder.
NAMED = re.compile(rb"file ((?:\w[\w.-]{0,80}/){0,9}\w[\w.-]{0,80}), ([0-9]{1,9}) bytes\n")


class Source(NamedTuple):
    files: dict[str, bytes]  # by name relative to the repository
    commit: str | None  # the commit that held these files; not part of the hash


def pack(source: Source) -> bytes:
    """The source as one text, which `unpack` reads."""
    parts = [f"source {digest(source.files)}\n".encode()]
    if source.commit:
        parts.append(f"commit {source.commit}\n".encode())
    for name, content in sorted(source.files.items()):
        parts += [f"file {name}, {len(content)} bytes\n".encode(), content, b"\n"]
    return b"".join(parts)


def unpack(text: bytes) -> Source:
    """The source in a text. ClaimError for a text that `pack` does not write."""
    head = HEAD.match(text)
    commit = head[1].decode() if head and head[1] else None
    files: dict[str, bytes] = {}
    named = NAMED.match(text, head.end() if head else 0)
    while named:
        end = named.end() + int(named[2])
        files[named[1].decode()] = text[named.end() : end]
        named = NAMED.match(text, end + 1)  # after the newline behind the file
    source = Source(files, commit)
    if pack(source) != text:  # another hash or order, a file twice, bytes between files
        raise ClaimError("the stored source is not as record.py claim wrote it")
    return source


def source_path(records: Path, sha256: str) -> Path:
    """Where the source with this hash is kept."""
    return records / "sources" / f"{sha256[:12]}.txt"


def read_source(records: Path, sha256: str) -> Source:
    """The source with this hash. ClaimError where the file is missing, damaged or another."""
    path = source_path(records, sha256)
    try:
        check_regular(path)  # no link: it could lead out of the store
        source = unpack(read_regular(path, MOST_BYTES))
    except OSError as error:
        raise ClaimError(f"cannot read the source {path}: {error.strerror}") from None
    if digest(source.files) != sha256:
        raise ClaimError(f"{path} is not the source {sha256} but {digest(source.files)}")
    return source


def write_source(records: Path, source: Source) -> Path:
    """Store the source, unless it is there already."""
    path = source_path(records, digest(source.files))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pack(source))
    read_source(records, digest(source.files))  # a file that was there may be damaged
    return path


def write_files(source: Source, folder: Path) -> None:
    """Write the files under a folder, as they stood in their repository."""
    for name, content in source.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def difference(before: Source, after: Source) -> list[str]:
    """The lines of a unified diff from one source to another; none where they are equal."""
    lines: list[str] = []
    for name in sorted(before.files.keys() | after.files.keys()):
        old = before.files.get(name, b"").decode(errors="replace").split("\n")
        new = after.files.get(name, b"").decode(errors="replace").split("\n")
        lines += difflib.unified_diff(old, new, name, name, lineterm="")
    return lines
