"""The token shard: a 1024-byte header of 256 little-endian int32, then uint16 tokens.

Header words: 0 = magic 20240520, 1 = version 1, 2 = number of tokens, the rest zero. This is the format of the public
pre-tokenized FineWeb shards (llm.c, modded-nanogpt), so files made by others load unchanged.
"""

import glob
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAGIC = 20240520
VERSION = 1
HEADER_WORDS = 256
HEADER_BYTES = 4 * HEADER_WORDS
TOKEN_BYTES = 2
READ_BLOCK = 1 << 24  # tokens held at once where a whole shard is read: 32 MiB
BINARY = getattr(os, "O_BINARY", 0)  # Windows would change the ends of lines
SEEKING = threading.Lock()

FETCH_AGAIN = "delete the file and fetch or build the data again"

Tokens = NDArray[np.uint16]


class ShardError(ValueError):
    """A shard, or a set of shards, that cannot be used: names the file, the value found, the rule and the fix."""


def write_shard(path: str | Path, tokens: ArrayLike) -> None:
    """Write one shard of (n,) integer tokens so that `path` is either absent, its old self, or complete.

    Raises ShardError when tokens are not a non-empty vector of integers in [0, 65535].
    """
    path = Path(path)
    values = _as_uint16(path, np.asarray(tokens))
    header = np.zeros(HEADER_WORDS, dtype="<i4")
    header[:3] = MAGIC, VERSION, values.size
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # the same folder, so that the rename is atomic
    try:
        with open(partial, "wb") as file:
            file.write(header.tobytes())
            file.write(values.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _as_uint16(path: Path, tokens: NDArray) -> NDArray[np.uint16]:
    if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
        raise ShardError(
            f"{path}: got tokens of shape {tokens.shape} and dtype {tokens.dtype}; a shard holds a non-empty vector of "
            f"integers. Pass one flat integer array."
        )
    if tokens.size > np.iinfo(np.int32).max:
        raise ShardError(
            f"{path}: got {tokens.size:,} tokens; the header counts them in an int32. Split them over several shards."
        )
    if tokens.min() < 0 or tokens.max() > np.iinfo(np.uint16).max:
        first = int(((tokens < 0) | (tokens > np.iinfo(np.uint16).max)).argmax())
        raise ShardError(
            f"{path}: token {first:,} is {tokens[first]}; a shard holds uint16, so 0 to 65535. "
            f"Use a vocabulary of at most 65,536 tokens."
        )
    return np.ascontiguousarray(tokens, dtype="<u2")


class Shard:
    """The n tokens of an open file: len, and slices [start:stop], each read from the file as (m,) uint16.

    A slice raises ShardError when the file cannot be read or has changed in size; one that is only deleted still reads.
    (Of a memory map, touching a page that the file has lost or that the disk cannot read kills the process by SIGBUS.)
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        weakref.finalize(self, os.close, descriptor)
        self._count = _read_token_count(path, descriptor)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice) -> Tokens:
        start, stop, _ = where.indices(self._count)
        with _faults_named(self.path, f"tokens {start:,} to {stop:,}"):
            content = _read(self._descriptor, HEADER_BYTES + TOKEN_BYTES * start, HEADER_BYTES + TOKEN_BYTES * stop)
            size, expected = os.fstat(self._descriptor).st_size, HEADER_BYTES + TOKEN_BYTES * self._count
        if size != expected or len(content) != TOKEN_BYTES * max(stop - start, 0):
            raise ShardError(
                f"{self.path}: tokens {start:,} to {stop:,} cannot be read: the file has {size:,} bytes and had "
                f"{expected:,} when it was opened; a shard must not change while it is used. Fix: {FETCH_AGAIN}."
            )
        return np.frombuffer(content, dtype="<u2")

    def blocks(self) -> Iterator[tuple[int, Tokens]]:
        """All tokens in order, READ_BLOCK at a time, each block after the offset of its first token."""
        for start in range(0, len(self), READ_BLOCK):
            yield start, self[start : start + READ_BLOCK]


@contextmanager
def _faults_named(path: Path, what: str) -> Iterator[None]:
    """Turns an OSError into a ShardError."""
    try:
        yield
    except OSError as error:
        raise ShardError(
            f"{path}: {what} cannot be read ({error.strerror}); every shard must stay readable while it is used. Check "
            f"permissions, the disk or network it lies on, and the limit of open files (ulimit -n)."
        ) from error


def open_shard(path: str | Path) -> Shard:
    """Open a shard to read from it; header and file size are checked, tokens are not read.

    Raises ShardError for a file that is missing, empty, cut short, too long, or of another format or version.
    """
    path = Path(path)
    with _faults_named(path, "the header"):
        if not path.is_file():
            raise ShardError(f"{path}: no such file; every shard of a run must exist. Fetch or build the data first.")
        return Shard(path, os.open(path, os.O_RDONLY | BINARY))


def _read(descriptor: int, start: int, end: int) -> bytes:
    """The bytes [start, end), fewer only where the file ends: one call may return less than all."""
    parts = []
    while start < end and (part := _pread(descriptor, end - start, start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _pread(descriptor: int, count: int, offset: int) -> bytes:
    """os.pread; on Windows, which has none, threads take turns at moving and reading."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, offset)
    with SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, count)


def _read_token_count(path: Path, descriptor: int) -> int:
    """Token count from the header of a file whose size agrees with it."""
    size, header = os.fstat(descriptor).st_size, _read(descriptor, 0, HEADER_BYTES)
    magic, version, claimed = np.frombuffer(header.ljust(HEADER_BYTES, b"\0"), dtype="<i4", count=3).tolist()
    body = size - HEADER_BYTES
    held, odd = divmod(body, TOKEN_BYTES)
    cause = "The download was probably cut short" if held < claimed else "Something was appended to it"
    problems = (
        (size == 0, f"the file is empty (0 bytes); a shard is a header and tokens. Fix: {FETCH_AGAIN}."),
        (len(header) < HEADER_BYTES, f"the file has {len(header)} bytes; the header alone has {HEADER_BYTES}. "
                                     f"Fix: {FETCH_AGAIN}."),
        (magic != MAGIC, f"the first header word is {magic}; a token shard starts with {MAGIC}. "
                         f"This is another kind of file: point the data setting at token shards, or {FETCH_AGAIN}."),
        (version != VERSION, f"the header says version {version}; only version {VERSION} (uint16 tokens) can be read. "
                             f"Tokenize the data again with a vocabulary of at most 65,536 tokens."),
        (claimed <= 0, f"the header says {claimed:,} tokens; a shard holds at least one. Fix: {FETCH_AGAIN}."),
        (odd, f"{body:,} bytes follow the header; tokens take {TOKEN_BYTES} bytes each, so the number must be even. "
              f"The file was cut or changed: {FETCH_AGAIN}."),
        (held != claimed, f"the header says {claimed:,} tokens but the file holds {held:,}; the two must agree. "
                          f"{cause}: {FETCH_AGAIN}."),
    )  # fmt: skip
    for found, problem in problems:  # the first one tells most
        if found:
            raise ShardError(f"{path}: {problem}")
    return claimed


def verify_shard(path: str | Path, vocab_size: int) -> int:
    """Read the whole shard and return its number of tokens.

    Raises ShardError as `open_shard` does, and for the first token that is not below `vocab_size`.
    """
    shard = open_shard(path)
    for start, block in shard.blocks():
        if block.max() >= vocab_size:
            offset = int((block >= vocab_size).argmax())
            raise ShardError(
                f"{path}: token {start + offset:,} is {block[offset]}; the vocabulary has {vocab_size:,} tokens, so "
                f"0 to {vocab_size - 1:,}. The shard was made with another tokenizer: use the one it was made with, "
                f"or build the data again."
            )
    return len(shard)


def find_shards(where: str | Path, fix: str = "fetch or build the data first") -> list[Path]:
    """Shards named by a folder (all its *.bin), a glob pattern or one file, sorted by path.

    Raises ShardError with `fix`, the command that makes the data, when there are none.
    """
    pattern = os.path.join(glob.escape(str(where)), "*.bin") if os.path.isdir(where) else str(where)
    names = [str(where)] if os.path.isfile(where) else sorted(glob.glob(pattern))
    if not names:
        raise ShardError(f"{pattern}: no file matches; a run needs at least one token shard. Fix: {fix}")
    return [Path(name) for name in names]
