"""JSON lines, in files that only grow."""

import contextlib
import errno
import hashlib
import json
import math
import os
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG
from typing import Any

Json = dict[str, Any]  # an object of JSON data

MOST_BRACKETS = 200  # in a JSON text; a header has about 20. Code that walks it may recurse


def parse(text: bytes) -> Any:
    """JSON data. ValueError for all else: a byte-order mark, a repeated key, too many brackets."""
    if text.count(b"[") + text.count(b"{") > MOST_BRACKETS:
        raise ValueError(f"it has more than {MOST_BRACKETS} brackets")
    return json.loads(text.decode(), object_pairs_hook=without_repeats)


def without_repeats(pairs: list[tuple[str, Any]]) -> Json:
    fields = dict(pairs)
    if len(fields) < len(pairs):  # a reader may see one value, a program the other
        raise ValueError("a key occurs twice in one object")
    return fields


def plain(value: Any) -> Any:
    """The value as JSON data. Floats keep every digit; NaN and infinities become text.

    TypeError for anything else, also for tensors: reading one would make every log line wait for
    the device.
    """
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # JSON has no NaN
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise TypeError(f"cannot log a {type(value).__name__}: make it a number, text, list or dict")


def json_line(record: Json) -> bytes:
    """One log line, as bytes with its line end."""
    return json.dumps(plain(record), allow_nan=False).encode() + b"\n"


def json_hash(value: Any) -> str:
    """SHA-256 of the value as JSON, whatever the order of its keys."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def check_regular(path: Path) -> None:
    """OSError for a link or anything but a file: reading a pipe would wait for ever."""
    if not S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is a link or no regular file", str(path))


def open_regular(path: Path, links: bool = True) -> BufferedReader:
    """Open a file to read it. OSError for anything else, without `links` also for a link."""
    if not links:
        check_regular(path)
    # A link that replaces the file after the check is not followed; a pipe is not waited for.
    flags = getattr(os, "O_NONBLOCK", 0) | (0 if links else getattr(os, "O_NOFOLLOW", 0))
    file = open(path, "rb", opener=lambda name, usual: os.open(name, usual | flags))  # noqa: SIM115
    if not S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read_regular(path: Path, most_bytes: int, links: bool = True) -> bytes:
    """The content of a file: see `open_regular`. OSError if larger: it must not fill memory."""
    with open_regular(path, links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            rule = f"{path.name} has {size:,} bytes, and at most {most_bytes:,} are allowed"
            raise OSError(errno.EFBIG, rule, str(path))
        return file.read(size)


def append(descriptor: int, line: bytes, sync: bool = False) -> None:
    """Append the whole line, with `sync` also on the disk, or leave none of it. OSError."""
    written = 0
    try:
        while written < len(line):
            written += os.write(descriptor, line[written:])
        if sync:  # where a full disk or quota may show first, as on a network disk
            os.fsync(descriptor)
    except OSError:
        if written:  # a full disk takes what still fits
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, os.lseek(descriptor, -written, os.SEEK_CUR))
        raise
