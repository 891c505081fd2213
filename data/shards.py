"""Token shards: their format, how a run finds them, and the audit of what they hold.

A shard is a 1024-byte header of 256 little-endian int32, then tokens as little-endian uint16.
Header word 0 is the magic number 20240520, word 1 the version 1, word 2 the number of tokens; the
rest is zero. The public pre-tokenized FineWeb shards (llm.c, modded-nanogpt) have this format.
"""

import hashlib
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAGIC, VERSION = 20240520, 1
HEADER_BYTES, TOKEN_BYTES = 1024, 2
AGAIN = "Delete the file and fetch or build it again."
PREFIX = 64  # first tokens of a document that identify it
BUILD = ("tiny and small read data/prose, which python -m data.prose builds; short and steps read "
         "data/fineweb10B, which ./run.sh --track TRACK fetches; python -m data.own makes shards "
         "of your own documents.")  # fmt: skip
TRAIN, VAL = "train_000000.bin", "val_000000.bin"  # the shards that a builder writes

Tokens = NDArray[np.uint16]
Settings = Mapping[str, Any]


class ShardError(ValueError):
    """A shard or set of shards cannot be used. The message names file, value, rule and fix."""


def write_shard(path: str | Path, tokens: ArrayLike) -> None:
    """Write a vector (n,) of integers from 0 to 65535 as one shard; ShardError for anything else.

    The write is atomic: a reader of `path` sees no file, the old shard or the new one.
    """
    path, values = Path(path), np.asarray(tokens)
    fits = values.ndim == 1 and values.dtype.kind in "iu" and 0 < values.size < 2**31
    if not fits or values.min() < 0 or values.max() > 65535:
        raise ShardError(f"{path}: a shard holds 1 to 2**31 - 1 integers from 0 to 65535, not "
                         f"{values!r}. Use a vocabulary of at most 65,536 tokens.")  # fmt: skip
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = MAGIC, VERSION, values.size
    # In the same folder: a rename is atomic only within a file system.
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(header.tobytes())
            file.write(np.ascontiguousarray(values, dtype="<u2").data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_shards(folder: Path, train: Sequence[Tokens], val: Sequence[Tokens]) -> None:
    """Write the documents of both splits, (n,) each, as TRAIN and VAL; make the folder. OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in ((TRAIN, train), (VAL, val)):  # VAL last: a folder that has it has both
        tokens = np.concatenate(documents)
        write_shard(folder / name, tokens)
        print(f"{len(tokens):,} tokens in {folder / name}", flush=True)


class Shard:
    """An open shard: `len(shard)` is its number of tokens, `shard[start:stop]` reads (m,) uint16.

    A deleted file can still be read; a slice beyond the end of a cut one raises ShardError. The
    file is not mapped into memory, since a mapped page that the disk has lost kills the process by
    SIGBUS. Only one thread at a time may read. held_out: how many of its last tokens it hides.
    """

    def __init__(self, path: str | Path, held_out: int = 0) -> None:
        self.path = Path(path)
        if not (self.path.is_file() and os.access(self.path, os.R_OK)):
            raise ShardError(f"{path}: no file that can be read. Fetch or build it.")
        self._starts: list[int] = []
        self._file = self.path.open("rb")
        weakref.finalize(self, self._file.close)
        header = self._file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0")
        magic, version, self._count = np.frombuffer(header, dtype="<i4", count=3).tolist()
        if (magic, version) != (MAGIC, VERSION):
            ours = magic in (MAGIC, 0)  # 0: empty, or its blocks were lost
            raise ShardError(f"{path}: it starts with {magic}, {version}; a token shard starts "
                             f"with {MAGIC}, {VERSION}. "
                             f"{AGAIN if ours else converted(self.path, header)}")  # fmt: skip
        size, expected = self.path.stat().st_size, HEADER_BYTES + TOKEN_BYTES * self._count
        if self._count <= 0 or size != expected:
            raise ShardError(f"{path}: {self._count:,} tokens take {expected:,} bytes; the file "
                             f"has {size:,}. {AGAIN}")  # fmt: skip
        self._count = max(self._count - held_out, 0)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice) -> Tokens:
        start, stop, _ = where.indices(self._count)
        self._file.seek(HEADER_BYTES + TOKEN_BYTES * start)
        wanted = TOKEN_BYTES * max(stop - start, 0)
        content = self._file.read(wanted)
        if len(content) != wanted:
            raise ShardError(f"{self.path}: tokens {start:,} to {stop:,} are gone, as the file was "
                             f"cut while it was read. {AGAIN}")  # fmt: skip
        return np.frombuffer(content, dtype="<u2")

    def starts(self, bos: int | None) -> list[int]:
        """Return where documents begin, and the end. The first call reads the whole shard."""
        if not self._starts:
            self._starts = [*np.flatnonzero(self[:] == bos).tolist(), len(self)]
        return self._starts


def converted(path: Path, header: bytes) -> str:
    """What another kind of token file seems to be, and the command that makes a shard of it."""
    kind, read = "Raw tokens of two bytes, as nanoGPT writes them?", "memmap({!r}, 'u2')"
    if header.startswith(b"\x93NUMPY"):
        kind, read = "It is an array of NumPy.", "load({!r})"
    elif header.startswith((20240801).to_bytes(4, "little")):
        kind, read = "It holds tokens of four bytes by llm.c.", "memmap({!r}, 'u4', offset=1024)"
    shard = VAL if "val" in path.name else TRAIN
    code = f"write_shard('{shard}', numpy.{read.format(str(path))})"
    return (f"{kind} To write its tokens as a shard, if they fit, start in this repository: "
            f'python -c "import numpy; from data.shards import write_shard; {code}"')  # fmt: skip


def read_shard(path: Path, vocab_size: int) -> Tokens:
    """Return all tokens of a shard. ShardError if one is no token of the vocabulary."""
    tokens = Shard(path)[:]
    if tokens.max() >= vocab_size:
        place = int((tokens >= vocab_size).argmax())
        raise ShardError(
            f"{path}: token {place:,} is {tokens[place]}; the vocabulary has {vocab_size:,} tokens."
            " Use the vocabulary of the tokenizer that made the shard, or make it again."
        )
    return tokens


# ---- The shards of a run


def find_shards(settings: Settings, split: str) -> list[Path]:
    """Return the shards of a split, "train" or "val". ShardError if there is none."""
    folder, word = Path(settings["data_dir"]), re.compile(rf"(?<![a-z]){split}_")
    files = sorted(path for path in folder.glob("*.bin") if word.search(path.name))
    if not files:
        raise ShardError(f"{folder} has no *{split}_*.bin file (no letter before {split}). {BUILD}")
    return files


def audit(settings: Settings, shards: int) -> dict[str, Any]:
    """Read validation and the first `shards`; return {train_sha256, val_sha256, overlap}.

    overlap: share of validation documents whose first 64 tokens also begin a training document.
    ShardError for a token >= vocab_size, or if val_sha256 does not begin with that of the settings.
    """
    val_sha256, wanted = audit_validation(settings)
    unseen, train = set(wanted), hashlib.sha256()
    for file in find_shards(settings, "train")[:shards]:
        tokens = read_shard(file, settings["vocab_size"])
        train.update(tokens.data)
        unseen.difference_update(_prefixes(tokens, settings["bos"]))
    overlap = sum(prefix not in unseen for prefix in wanted) / len(wanted) if wanted else None
    return {"train_sha256": train.hexdigest(), "val_sha256": val_sha256, "overlap": overlap}


def audit_validation(settings: Settings) -> tuple[str, list[bytes]]:
    """Return the SHA-256 of the validation tokens, and how each long enough document begins."""
    val, begun = hashlib.sha256(), []
    for file in find_shards(settings, "val"):
        tokens = read_shard(file, settings["vocab_size"])
        val.update(tokens.data)
        begun += _prefixes(tokens, settings["bos"])
    found, expected = val.hexdigest(), settings["val_sha256"]
    if not found.startswith(expected):
        raise ShardError(
            f"{settings['data_dir']}: the validation tokens have SHA-256 {found}; the target holds "
            f"for {expected}... Delete the shards and build or fetch them again, or train with "
            f'--val-sha256 "". {BUILD}'
        )
    return found, begun


def _prefixes(tokens: Tokens, bos: int) -> list[bytes]:
    starts = np.flatnonzero(tokens == bos)
    long_enough = np.diff(starts, append=len(tokens)) >= PREFIX
    return [tokens[start : start + PREFIX].tobytes() for start in starts[long_enough].tolist()]
