"""What the data of a run are: hashes, a check of every token, and what training and validation have in common."""

import glob
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.loader import DATA_SETTINGS, Data, open_data
from data.shards import ShardError, find_shards, open_shard, verify_shard

PREFIX = 64  # tokens from its start by which a document is recognized


def open_audited(
    settings: Mapping[str, Any], rank: int, world_size: int, audited: bool
) -> tuple[Data, dict[str, object] | None]:
    """One rank's data of a run and, if `audited`, what `audit` finds; the settings are named as their parameters.

    Raises what `open_data` and `audit` raise.
    """
    pattern, fix = glob.escape(settings["data_dir"]), "./run.sh builds or fetches it"
    train_files, val_files = (find_shards(f"{pattern}/*{kind}_*.bin", fix=fix) for kind in ("train", "val"))
    sizes: dict[str, Any] = {name: settings[name] for name in DATA_SETTINGS}
    data = open_data(train_files, val_files, rank=rank, world_size=world_size, **sizes)
    read = train_files[: data.plan.end.shard + 1]
    rules = (settings[name] for name in ("vocab_size", "bos", "val_sha256"))
    return data, audit(read, val_files, *rules) if audited else None


def audit(
    train_files: Sequence[Path], val_files: Sequence[Path], vocab_size: int, bos: int, expected_val: str = ""
) -> dict[str, object]:
    """Read the shards of a run: {train_sha256, val_sha256, overlap}; ShardError when one cannot be trained on.

    expected_val is how the SHA-256 of the validation tokens must begin. overlap is the share of validation documents
    whose first 64 tokens also begin a training document.
    """
    for file in (*train_files, *val_files):
        verify_shard(file, vocab_size)
    val_sha256 = _sha256(val_files)
    if not val_sha256.startswith(expected_val):
        raise ShardError(
            f"{val_files[0].parent}: the validation tokens have SHA-256 {val_sha256}, but the target holds for "
            f"{expected_val}... alone. Delete the folder and build or fetch the data again, or set --val-sha256."
        )
    wanted = [prefix for file in val_files for prefix in _prefixes(file, bos)]
    shared = set(wanted)
    found = set().union(*(shared.intersection(_prefixes(file, bos)) for file in train_files))
    return {
        "train_sha256": _sha256(train_files),
        "val_sha256": val_sha256,
        "overlap": sum(prefix in found for prefix in wanted) / len(wanted) if wanted else None,
    }


def _sha256(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        for _, block in open_shard(file).blocks():
            digest.update(block.data)
    return digest.hexdigest()


def _prefixes(file: Path, bos: int) -> list[bytes]:
    """The first PREFIX tokens of every document of a shard that has so many."""
    tokens = open_shard(file)[:]
    starts = np.flatnonzero(tokens == bos)
    long_enough = np.diff(np.append(starts, len(tokens))) >= PREFIX
    return [tokens[start : start + PREFIX].tobytes() for start in starts[long_enough].tolist()]
