"""The sources of records. `records/sources/<first 12 of the hash>.txt` holds each source once.

    source 706e244f...
    commit b7b682ad...
    file data/__init__.py, 57 bytes
    (the file, byte for byte, and one newline more)

The naming line says how many bytes follow, so a file may hold any bytes, this format included.
"""

import difflib
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from runtime.errors import ClaimError
from runtime.log import source_files

FOLDER = "sources"
MOST_BYTES = 2**24  # sixty times the first sources; keeps a wrong file from filling the memory
COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
HEAD = re.compile(rb"source ([0-9a-f]{64})\n(?:commit ([0-9a-f]{40,64})\n)?")
NAMED = re.compile(rb"file ([A-Za-z0-9_][A-Za-z0-9_./-]{0,200}), ([0-9]{1,9}) bytes\n")


class Source(NamedTuple):
    files: dict[str, bytes]  # by name relative to the repository, sorted
    commit: str | None  # that held these files; the hash does not cover it


def digest(files: dict[str, bytes]) -> str:
    """The SHA-256 of names and contents, equal to `runtime.log.source_hash` of the same files."""
    sha256 = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            sha256.update(f"{len(part)}:".encode())  # no two lists of files give the same bytes
            sha256.update(part)
    return sha256.hexdigest()


def read_files(root: Path) -> dict[str, bytes]:
    """The files under `root` that decide what a run computes, by name."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in source_files(root)}


def pack(source: Source) -> bytes:
    """The source as one text. `unpack` gives it back."""
    parts = [f"source {digest(source.files)}\n".encode()]
    if source.commit:
        parts.append(f"commit {source.commit}\n".encode())
    for name, content in sorted(source.files.items()):
        parts += [f"file {name}, {len(content)} bytes\n".encode(), content, b"\n"]
    return b"".join(parts)


def unpack(text: bytes) -> Source:
    """The source in a text. Raises ClaimError where the text is not what `pack` writes."""
    head = HEAD.match(text)
    at = head.end() if head else 0
    files: dict[str, bytes] = {}
    named = NAMED.match(text, at)
    while named:
        at = named.end() + int(named[2])
        files[named[1].decode()] = text[named.end() : at]
        named = NAMED.match(text, at + 1)  # behind the newline that follows the file
    commit = head[2].decode() if head and head[2] else None
    source = Source(files, commit)
    if pack(source) != text:  # another hash or order, a file twice, bytes between files
        raise ClaimError("the text is not as record.py claim wrote it")
    if any(".." in name.split("/") for name in files):  # someone may write the files to a folder
        raise ClaimError("the name of a file leads out of its folder")
    return source


def source_path(records: Path, sha256: str) -> Path:
    """Where the source with this hash is kept."""
    return records / FOLDER / f"{sha256[:12]}.txt"


def read_source(records: Path, sha256: str) -> Source:
    """The source with this hash. Raises ClaimError where it is missing or not the one."""
    path = source_path(records, sha256)
    try:
        if path.is_symlink() or not path.is_file():
            raise ClaimError("there is no regular file of this name")
        if path.stat().st_size > MOST_BYTES:
            raise ClaimError(f"it has more than {MOST_BYTES:,} bytes")
        source = unpack(path.read_bytes())
    except (ClaimError, OSError) as error:
        raise ClaimError(f"{path} is not the source {sha256:.12}: {error}") from None
    if digest(source.files) != sha256:
        raise ClaimError(f"{path} is not the claimed source: its hash is {digest(source.files)}")
    return source


def write_source(records: Path, source: Source) -> Path:
    """Keep the source, unless it is there already."""
    path = source_path(records, digest(source.files))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pack(source))
    read_source(records, digest(source.files))  # what was there may be damaged
    return path


def difference(before: Source, after: Source) -> list[str]:
    """The lines of a unified diff from one source to another; none where they are equal."""
    lines: list[str] = []
    for name in sorted(before.files.keys() | after.files.keys()):
        old = before.files.get(name, b"").decode(errors="replace").split("\n")
        new = after.files.get(name, b"").decode(errors="replace").split("\n")
        lines += difflib.unified_diff(old, new, name, name, lineterm="")
    return lines
