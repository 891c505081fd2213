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


def parse(text: bytes) -> Any:
    """JSON data. ValueError for all else, and for nesting too deep to read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it. OSError for a link, which may lead anywhere, and for a pipe."""
    if not S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is a link or no regular file", str(path))
    return open(path, "rb")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a file: see `open_regular`. OSError if larger: it must not fill memory."""
    with open_regular(path) as file:
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
