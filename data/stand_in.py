"""Random tokens in place of missing shards: a dry run measures time and memory without data."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from data.shards import TRAIN, VAL, write_shard

LONGEST = 600  # tokens of a document, at most; of FineWeb's most have some hundreds


@contextlib.contextmanager
def data_or_stand_in(config: Any, say: Callable[[str], None]) -> Iterator[Any]:
    """Yield the settings; for a dry run without shards, those of a folder that stands in for them.

    The folder goes at the end: what has been opened can still be read. OSError.
    """
    if not config.dry_run or any(Path(config.data_dir).glob("*.bin")):
        yield config
        return
    say(f"{config.data_dir} has no shards, so random tokens stand in for them")
    with TemporaryDirectory() as folder:
        write_stand_in(Path(folder), config)
        yield dataclasses.replace(config, data_dir=folder, val_sha256="")


def write_stand_in(folder: Path, config: Any) -> None:
    """Write a shard of random documents, and as many links to it as the run reads."""
    longest = max(min(LONGEST, config.max_document, config.seq_len) - 1, 1)
    generator = np.random.default_rng(0)
    size = 2 * max(8 * config.batch_tokens, config.val_tokens)
    tokens = generator.integers(config.vocab_size, size=size, dtype=np.uint16)
    tokens[tokens == config.bos] = (config.bos + 1) % config.vocab_size
    starts = generator.integers(1, longest, size=4 * size // longest, endpoint=True).cumsum()
    tokens[[0, *starts[starts < size]]] = config.bos
    write_shard(folder / TRAIN, tokens)
    (folder / VAL).symlink_to(TRAIN)
    # A quarter more than the run trains on: rows drop the tails of documents.
    shards = 1 + 5 * config.steps * config.batch_tokens // (4 * size)
    for shard in range(1, 1 + shards):
        (folder / f"train_{shard:06d}.bin").symlink_to(TRAIN)
