"""Open the data of a run and check them: all tokens, hashes, documents in both splits."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.loader import Order, Stages, TrainLoader, in_parts, validation_batches
from data.shards import ShardError, Tokens, read_shard

PREFIX = 64  # first tokens of a document that identify it
FIXES = {  # by track; run.sh fetches the same numbers of shards
    "small": "To fetch 37 MB and build the data: python -m data.prose",
    "tiny": "To build the data in seconds: python -m data.corpus",
    "short": "To fetch 2.0 GB: ./run.sh --track short",
    "medium": "To fetch 8.0 GB: ./run.sh --track medium",
    "steps": "To fetch 4.0 GB: ./run.sh --track steps",
}
Settings = Mapping[str, Any]


class Data:
    """The data of one rank. With micro_batch None in `settings`, all its rows are one batch.

    stages: see `Order`; reach: see `in_parts`. ShardError if the shards are missing, damaged or too
    few, ValueError if the world size does not divide the rows.
    """

    def __init__(
        self, settings: Settings, stages: Stages, reach: int, rank: int = 0, world_size: int = 1
    ) -> None:
        bos = settings["bos"] if settings["document_mask"] else None
        order = Order(settings["seq_len"], bos, settings["data_start"], stages)
        files, most = find_shards(settings, "train"), settings["val_batch"]
        self.train = TrainLoader(files, order, settings["steps"], rank, world_size)
        if settings["micro_batch"] is not None:
            self.train.split(settings["micro_batch"])
        rows = validation_batches(find_shards(settings, "val"), settings, most, rank, world_size)
        self.validation = in_parts(rows, most, reach)
        lengths = [int(batch.cu_seqlens.diff().max()) for batch in self.validation]
        self.val_longest = max(lengths, default=0)  # of a document; a rank may have no rows

    def longest(self, step: int) -> int:
        """Return how many tokens a document has at most in a training row of this step."""
        order = self.train.order
        return order.seq_len if order.bos is None else min(order.at(step)[1], order.seq_len)


def find_shards(settings: Settings, split: str) -> list[Path]:
    """Return the shards of a split, "train" or "val". ShardError if there is none."""
    folder, word = Path(settings["data_dir"]), re.compile(rf"(?<![a-z]){split}_")
    files = sorted(path for path in folder.glob("*.bin") if word.search(path.name))
    if not files:
        raise ShardError(f"{folder} has no *{split}_*.bin file (no letter before {split}). "
                         f"{FIXES.get(settings['track'], '')}")  # fmt: skip
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
            f"for {expected}... Make the data again, or set --val-sha256. "
            f"{FIXES.get(settings['track'], '')}"
        )
    return found, begun


def _prefixes(tokens: Tokens, bos: int) -> list[bytes]:
    starts = np.flatnonzero(tokens == bos)
    long_enough = np.diff(starts, append=len(tokens)) >= PREFIX
    return [tokens[start : start + PREFIX].tobytes() for start in starts[long_enough].tolist()]
