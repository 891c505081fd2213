"""The token shard: a 1024-byte header of 256 little-endian int32, then uint16 tokens.

Header words: 0 = magic 20240520, 1 = version 1, 2 = number of tokens, the rest zero. This is the format of the public
pre-tokenized FineWeb shards (llm.c, modded-nanogpt), so files made by others load unchanged.
"""

import glob
import os
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAGIC = 20240520
VERSION = 1
HEADER_WORDS = 256
HEADER_BYTES = 4 * HEADER_WORDS
TOKEN_BYTES = 2
VERIFY_BLOCK = 1 << 24  # tokens read at once: 32 MiB

FETCH_AGAIN = "delete the file and fetch or build the data again"


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


def open_shard(path: str | Path) -> np.memmap:
    """Map the tokens of a shard read-only, as (n,) uint16; header and file size are checked, tokens are not read.

    Raises ShardError for a file that is missing, empty, cut short, too long, or of another format or version.
    """
    path = Path(path)
    if not path.is_file():
        raise ShardError(f"{path}: no such file; every shard of a run must exist. Fetch or build the data first.")
    count = _read_token_count(path)
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


def _read_token_count(path: Path) -> int:
    """Token count from the header of a file whose size agrees with it."""
    size = path.stat().st_size
    if size == 0:
        raise ShardError(f"{path}: the file is empty (0 bytes); a shard is a header and tokens. Fix: {FETCH_AGAIN}.")
    if size < HEADER_BYTES:
        raise ShardError(f"{path}: the file has {size} bytes; the header alone has {HEADER_BYTES}. Fix: {FETCH_AGAIN}.")
    magic, version, claimed = (int(word) for word in np.fromfile(path, dtype="<i4", count=3))
    if magic != MAGIC:
        raise ShardError(
            f"{path}: the first header word is {magic}; a token shard starts with {MAGIC}. "
            f"This is another kind of file: point the data setting at token shards, or {FETCH_AGAIN}."
        )
    if version != VERSION:
        raise ShardError(
            f"{path}: the header says version {version}; only version {VERSION} (uint16 tokens) can be read. "
            f"Tokenize the data again with a vocabulary of at most 65,536 tokens."
        )
    if claimed <= 0:
        raise ShardError(f"{path}: the header says {claimed:,} tokens; a shard holds at least one. Fix: {FETCH_AGAIN}.")
    body = size - HEADER_BYTES
    if body % TOKEN_BYTES:
        raise ShardError(
            f"{path}: {body:,} bytes follow the header; tokens take {TOKEN_BYTES} bytes each, so the number must be "
            f"even. The file was cut or changed: {FETCH_AGAIN}."
        )
    held = body // TOKEN_BYTES
    if held != claimed:
        cause = "The download was probably cut short" if held < claimed else "Something was appended to it"
        raise ShardError(
            f"{path}: the header says {claimed:,} tokens but the file holds {held:,}; the two must agree. "
            f"{cause}: {FETCH_AGAIN}."
        )
    return claimed


def verify_shard(path: str | Path, vocab_size: int) -> int:
    """Read the whole shard and return its number of tokens.

    Raises ShardError as `open_shard` does, and for the first token that is not below `vocab_size`.
    """
    tokens = open_shard(path)
    for start in range(0, tokens.size, VERIFY_BLOCK):
        block = tokens[start : start + VERIFY_BLOCK]
        if block.max() >= vocab_size:
            offset = int((block >= vocab_size).argmax())
            raise ShardError(
                f"{path}: token {start + offset:,} is {block[offset]}; the vocabulary has {vocab_size:,} tokens, so "
                f"0 to {vocab_size - 1:,}. The shard was made with another tokenizer: use the one it was made with, "
                f"or build the data again."
            )
    return int(tokens.size)


def find_shards(where: str | Path, fix: str = "fetch or build the data first") -> list[Path]:
    """Shards named by a folder (all its *.bin), a glob pattern or one file, sorted by path.

    Raises ShardError with `fix`, the command that makes the data, when there are none.
    """
    pattern = os.path.join(glob.escape(str(where)), "*.bin") if os.path.isdir(where) else str(where)
    names = [str(where)] if os.path.isfile(where) else sorted(glob.glob(pattern))
    if not names:
        raise ShardError(f"{pattern}: no file matches; a run needs at least one token shard. Fix: {fix}")
    return [Path(name) for name in names]
