"""Turn raw documents, .jsonl or .parquet files, into token shards of GPT-2's vocabulary.

    python -m data.fineweb sample/10BT/*.parquet --out data/mine

<|endoftext|> precedes each document. The first shard is for validation. A document may straddle
two shards, as in the public sets. Parquet files need pyarrow. Exit codes: 0 done, 2 failed.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from data.corpus import encode
from data.shards import Tokens, write_shard


def read_documents(paths: Iterable[Path], field: str) -> Iterator[str]:
    """Yield the text of every row, but no empty text. ValueError names a row without the field."""
    for path in paths:
        for number, row in enumerate(_rows(path, field), start=1):
            text = row.get(field) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise ValueError(f"{path}: row {number} has no text in {field!r}. Set --field.")
            if text:
                yield text


def _rows(path: Path, field: str) -> Iterator[Any]:
    if path.suffix == ".parquet":
        from pyarrow import parquet  # optional

        for batch in parquet.ParquetFile(path).iter_batches(columns=[field]):
            yield from batch.to_pylist()
        return
    with path.open("rb") as file:
        for line in filter(bytes.strip, file):  # without blank lines
            row = None  # stays so if the line is not JSON in UTF-8
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
            yield row


def tokenize(documents: Iterator[str], encoding: tiktoken.Encoding, size: int) -> Iterator[Tokens]:
    """Yield all tokens in vectors of `size`; the last one may be shorter."""
    waiting = np.empty(0, np.uint16)
    while batch := list(islice(documents, 1_000)):
        waiting = np.concatenate([waiting, encode(batch, encoding)])
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]
    if len(waiting):
        yield waiting


def write_shards(shards: Iterator[Tokens], folder: Path) -> int:
    """Write one validation shard and the training shards. Returns the number of the latter.

    FileExistsError if the folder exists, ValueError if the tokens fill one shard at most.
    """
    folder.mkdir(parents=True)  # an old set must not mix with a new one
    validation, count = next(shards, None), 0
    for count, tokens in enumerate(shards, start=1):
        write_shard(folder / f"train_{count:06d}.bin", tokens)
    if validation is None or count == 0:
        raise ValueError("The documents fill one shard at most. Lower --shard-tokens.")
    # Written last: the trainer refuses an interrupted set, which lacks it.
    write_shard(folder / "val_000000.bin", validation)
    return count


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="taken in this order")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the shards")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens of a shard")
    parser.add_argument("--field", default="text", help="field of a row that has the text")
    given = parser.parse_args(argv)
    try:
        documents = read_documents(given.files, given.field)
        shards = tokenize(documents, tiktoken.get_encoding("gpt2"), max(given.shard_tokens, 1))
        count = write_shards(shards, given.out)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: 1 validation shard, {count} for training")
    return 0


if __name__ == "__main__":
    sys.exit(main())
