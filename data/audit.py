"""Open the data of a run and check them: every token, their hashes, and what the splits share."""

import glob
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.loader import Data, open_data
from data.shards import Shard, ShardError, verify_shard

PREFIX = 64  # first tokens of a document that identify it
SHARDS = {"short": 9, "medium": 36, "steps": 18}  # of FineWeb, as run.sh fetches them
SHARD_GB = 0.2


def open_audited(
    settings: Mapping[str, Any], rank: int, world_size: int, audited: bool
) -> tuple[Data, dict[str, Any] | None]:
    """Return the data of one rank and, if `audited`, what `audit` finds; `settings` are the run's.

    Raises ShardError, which names the command that makes the data, when shards are missing, too
    few or bad; ValueError for a world size that does not divide the rows.
    """
    folder = settings["data_dir"]
    try:
        train_files, val_files = _find(folder, "train"), _find(folder, "val")
        data = open_data(train_files, val_files, settings, rank, world_size)
        if not audited:
            return data, None
        read = train_files[: data.plan.end.shard + 1]
        rules = settings["vocab_size"], settings["bos"], settings["val_sha256"]
        return data, audit(read, val_files, *rules)
    except ShardError as error:
        raise ShardError(f"{error} {_command_for(settings['track'], folder)}") from error


def _find(folder: str, split: str) -> list[Path]:
    names = sorted(glob.glob(f"{glob.escape(folder)}/*{split}_*.bin"))
    if not names:
        raise ShardError(f"{folder}: no *{split}_*.bin file; a run needs one or more.")
    return [Path(name) for name in names]


def _command_for(track: str, folder: str) -> str:
    """Say which command makes the shards of a track, and how much it downloads."""
    if track not in SHARDS:
        return f"To build the data of tiny in seconds: python -m data.corpus --out {folder}"
    size = (SHARDS[track] + 1) * SHARD_GB  # one shard is for validation
    return (
        f"To fetch the data ({size:.1f} GB): ./run.sh --track {track}, or "
        f"python -m data.cached_fineweb {SHARDS[track]} --out {folder}"
    )


def audit(
    train_files: list[Path], val_files: list[Path], vocab_size: int, bos: int, expected_val: str
) -> dict[str, Any]:
    """Read all shards; return {train_sha256, val_sha256, overlap}.

    `expected_val` is how the SHA-256 of the validation tokens must begin. overlap is the share of
    validation documents whose first 64 tokens also begin a training document; None if no document
    is that long. Raises ShardError for a token outside the vocabulary or other validation tokens.
    """
    for file in (*train_files, *val_files):
        verify_shard(file, vocab_size)
    val_sha256 = _sha256(val_files)
    if not val_sha256.startswith(expected_val):
        raise ShardError(
            f"{val_files[0].parent}: the validation tokens have SHA-256 {val_sha256}; the target "
            f"holds only for {expected_val}... Delete the folder and make the data again, or set "
            f"--val-sha256."
        )
    wanted = [prefix for file in val_files for prefix in _prefixes(file, bos)]
    unseen = set(wanted)
    for file in train_files:
        unseen.difference_update(_prefixes(file, bos))
    overlap = None
    if wanted:
        overlap = sum(prefix not in unseen for prefix in wanted) / len(wanted)
    return {"train_sha256": _sha256(train_files), "val_sha256": val_sha256, "overlap": overlap}


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        for _, block in Shard(file).blocks():
            digest.update(block.data)
    return digest.hexdigest()


def _prefixes(file: Path, bos: int) -> list[bytes]:
    """Return the first PREFIX tokens of every document of a shard that has so many."""
    tokens = Shard(file)[:]
    starts = np.flatnonzero(tokens == bos)
    long_enough = np.diff(np.append(starts, len(tokens))) >= PREFIX
    return [tokens[start : start + PREFIX].tobytes() for start in starts[long_enough].tolist()]
