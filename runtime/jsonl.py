"""Lines of JSON in files that are only ever appended to. There is no NaN in JSON: see `plain`."""

import contextlib
import hashlib
import json
import math
import os
from pathlib import PurePath
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """The same value in the types of JSON, floats unrounded; those that are not finite as "nan", "inf" or "-inf"."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    # A tensor is refused on purpose: reading it here would make every log line wait for the device.
    raise TypeError(f"cannot log a {type(value).__name__}: turn it into a number, string, list or dict first")


def json_line(record: dict[str, Any]) -> bytes:
    return json.dumps(plain(record), allow_nan=False).encode() + b"\n"


def json_hash(value: Any) -> str:
    """SHA-256 of a value as JSON with sorted keys and no spaces, so that neither order nor layout counts."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def append(descriptor: int, line: bytes) -> None:
    """Append the whole line to a file opened with O_APPEND, or raise OSError and leave none of it."""
    written = 0
    try:
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except OSError:
        if written:  # a full disk takes what still fits
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR) - written)
        raise
