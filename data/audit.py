"""Open the data of a run and check them: all tokens, hashes, documents in both splits."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.loader import Batch, Changes, Data, open_data, read_order, validation_batches
from data.shards import Shard, ShardError

PREFIX = 64  # first tokens of a document that identify it
FIXES = {  # by track; run.sh fetches the same numbers of shards
    "small": "To fetch 37 MB and build the data: python -m data.prose",
    "tiny": "To build the data in seconds: python -m data.corpus",
    "short": "To fetch 2.0 GB: ./run.sh --track short",
    "medium": "To fetch 8.0 GB: ./run.sh --track medium",
    "steps": "To fetch 4.0 GB: ./run.sh --track steps",
}


def open_audited(
    settings: Mapping[str, Any], changes: Changes, reach: int, rank: int, world_size: int,
    audited: bool,
) -> tuple[Data, dict[str, Any] | None]:  # fmt: skip
    """Return the data of one rank and, if `audited`, what `audit` returns.

    Raises what open_data and audit raise. A ShardError names the command that makes the data.
    """
    try:
        train_files, val_files = _find(settings, "train"), _find(settings, "val")
        data = open_data(train_files, val_files, settings, changes, reach, rank, world_size)
        if not audited:
            return data, None
        read = train_files[: data.plan.end.shard + 1]
        rules = settings["vocab_size"], settings["bos"], settings["val_sha256"]
        return data, audit(read, val_files, *rules)
    except ShardError as error:
        raise ShardError(f"{error} {FIXES.get(settings['track'], '')}") from error


def missing_data(settings: Mapping[str, Any]) -> str:
    """Return what is missing and the command that makes it; "" if both splits have files."""
    try:
        _find(settings, "train"), _find(settings, "val")
    except ShardError as error:
        return f"{error} {FIXES.get(settings['track'], '')}"
    return ""


def open_validation(settings: Mapping[str, Any], most: int) -> list[Batch]:
    """Return the validation rows of a run, in batches of at most `most` tokens or of one row.

    ShardError if the tokens are missing or not those of the run.
    """
    try:
        files = _find(settings, "val")
        _check_validation(files, settings["vocab_size"], settings["val_sha256"])
        order, tokens, row = read_order(settings), settings["val_tokens"], settings["val_seq_len"]
        return validation_batches(files, order, tokens, row, most, rank=0, world_size=1)
    except ShardError as error:
        raise ShardError(f"{error} {FIXES.get(settings['track'], '')}") from error


def _find(settings: Mapping[str, Any], split: str) -> list[Path]:
    files = sorted(Path(settings["data_dir"]).glob(f"*{split}_*.bin"))
    if not files:
        raise ShardError(f"{settings['data_dir']} has no *{split}_*.bin file; a run needs one.")
    return files


def audit(
    train_files: list[Path], val_files: list[Path], vocab_size: int, bos: int, expected_val: str
) -> dict[str, Any]:
    """Read all shards; return {train_sha256, val_sha256, overlap}.

    overlap: share of validation documents whose first 64 tokens also begin a training document.
    ShardError for a token >= vocab_size, or if val_sha256 does not begin with expected_val.
    """
    train_sha256 = _sha256(train_files, vocab_size)
    val_sha256 = _check_validation(val_files, vocab_size, expected_val)
    wanted = [prefix for file in val_files for prefix in _prefixes(file, bos)]
    unseen = set(wanted)
    for file in train_files:
        unseen.difference_update(_prefixes(file, bos))
    overlap = None
    if wanted:
        overlap = sum(prefix not in unseen for prefix in wanted) / len(wanted)
    return {"train_sha256": train_sha256, "val_sha256": val_sha256, "overlap": overlap}


def _check_validation(files: list[Path], vocab_size: int, expected: str) -> str:
    """Return the SHA-256 of the validation tokens."""
    val_sha256 = _sha256(files, vocab_size)
    if not val_sha256.startswith(expected):
        raise ShardError(
            f"{files[0].parent}: the validation tokens have SHA-256 {val_sha256}; the target "
            f"holds for {expected}... Make the data again, or set --val-sha256."
        )
    return val_sha256


def _sha256(files: list[Path], vocab_size: int) -> str:
    digest = hashlib.sha256()
    for file in files:
        tokens = Shard(file)[:]
        if tokens.max() >= vocab_size:
            place = int((tokens >= vocab_size).argmax())
            raise ShardError(
                f"{file}: token {place:,} is {tokens[place]}; the vocabulary has {vocab_size:,} "
                "tokens. Set the --vocab-size of the tokenizer that made the shard, or make it "
                "again."
            )
        digest.update(tokens.data)
    return digest.hexdigest()


def _prefixes(file: Path, bos: int) -> list[bytes]:
    tokens = Shard(file)[:]
    starts = np.flatnonzero(tokens == bos)
    long_enough = np.diff(np.append(starts, len(tokens))) >= PREFIX
    return [tokens[start : start + PREFIX].tobytes() for start in starts[long_enough].tolist()]
