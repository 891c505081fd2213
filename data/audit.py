"""What the data of a run are: hashes, a check of every token, and what training and validation have in common."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.shards import open_shard, verify_shard

PREFIX = 64  # tokens from its start by which a document is recognized


def audit(train_files: Sequence[Path], val_files: Sequence[Path], vocab_size: int, bos: int) -> dict[str, object]:
    """Read all shards once: {train_sha256, val_sha256, overlap}; ShardError when one cannot be trained on.

    overlap is the share of validation documents whose first 64 tokens also begin a training document.
    """
    for file in (*train_files, *val_files):
        verify_shard(file, vocab_size)
    train, val = _prefixes(train_files, bos), _prefixes(val_files, bos)
    return {
        "train_sha256": _sha256(train_files),
        "val_sha256": _sha256(val_files),
        "overlap": float(np.isin(val, train).mean()) if len(val) else None,
    }


def _sha256(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(open_shard(file).data)
    return digest.hexdigest()


def _prefixes(files: Sequence[Path], bos: int) -> NDArray[np.void]:
    """The first PREFIX tokens of every document that has so many, each as one opaque value."""
    found = []
    for file in files:
        tokens = open_shard(file)
        starts = np.flatnonzero(tokens == bos)
        long_enough = np.diff(np.append(starts, len(tokens))) >= PREFIX
        prefixes = tokens[starts[long_enough, None] + np.arange(PREFIX)]
        found.append(np.ascontiguousarray(prefixes).view(np.dtype((np.void, 2 * PREFIX))).ravel())
    return np.concatenate(found)
