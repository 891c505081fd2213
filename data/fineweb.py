"""Turn raw documents, .jsonl or .parquet files, into token shards of GPT-2's vocabulary.

    python -m data.fineweb sample/10BT/*.parquet --out data/mine

<|endoftext|> stands before each document. The first tokens are validation, the rest training; a
document may straddle two shards, as in the public sets. Parquet files need pyarrow.
Exit codes: 0 done, 1 a read or write failed, 2 bad input.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from data.shards import Tokens, write_shard


def read_documents(paths: Iterable[Path], field: str) -> Iterator[str]:
    """Yield the text of every row that has any; ValueError names a file and a row without text."""
    for path in paths:
        done = 0
        try:
            for row in _rows(path, field):
                if not isinstance(row[field], str):
                    raise TypeError(f"it is {row[field]!r:.40}")
                if row[field]:
                    yield row[field]
                done += 1
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: after {done} rows one has no text in {field!r} ({error!r}). "
                             f"Set --field, or repair the file.") from error  # fmt: skip


def _rows(path: Path, field: str) -> Iterator[Any]:
    if path.suffix == ".parquet":
        from pyarrow import parquet  # optional

        for batch in parquet.ParquetFile(path).iter_batches(columns=[field]):
            yield from batch.to_pylist()
    else:
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)


def tokenize(documents: Iterator[str], encoding: tiktoken.Encoding) -> Iterator[Tokens]:
    """Yield the tokens of 1,000 documents at a time, <|endoftext|> before each document."""
    while batch := list(islice(documents, 1_000)):
        pieces = []
        for ids in encoding.encode_ordinary_batch(batch):
            pieces.append(np.array([encoding.eot_token, *ids], dtype=np.uint16))
        yield np.concatenate(pieces)


def pack(parts: Iterable[Tokens], size: int) -> Iterator[Tokens]:
    """Yield the same tokens in vectors of `size`, the last one maybe shorter."""
    if size < 1:
        raise ValueError(f"--shard-tokens is {size}; the least is 1.")
    waiting: list[Tokens] = []
    held = 0
    for part in parts:
        waiting.append(part)
        held += len(part)
        while held >= size:
            stream = np.concatenate(waiting)
            yield stream[:size]
            waiting, held = [stream[size:]], held - size
    if held:
        yield np.concatenate(waiting)


def write_shards(parts: Iterable[Tokens], folder: Path, size: int) -> int:
    """Write shards of `size` tokens and return how many are for training.

    Raises ValueError when `folder` has shards already, or when nothing is left to train on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.bin")):
        raise ValueError(f"{folder} has shards already. Delete them, or set another --out.")
    shards = pack(parts, size)
    validation, count = next(shards, None), 0
    for count, tokens in enumerate(shards, start=1):
        write_shard(folder / f"train_{count:06d}.bin", tokens)
    if validation is None or count == 0:
        raise ValueError(f"the documents fill at most the validation shard of {size:,} tokens. "
                         f"Lower --shard-tokens.")  # fmt: skip
    # Last, so that an interrupted set lacks it and is refused.
    write_shard(folder / "val_000000.bin", validation)
    return count


def main(argv: list[str] | None = None) -> int:
    """Convert from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="taken in this order")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens of a shard")
    parser.add_argument("--field", default="text", help="field of a row that has the text")
    arguments = parser.parse_args(argv)
    try:
        documents = read_documents(arguments.files, arguments.field)
        parts = tokenize(documents, tiktoken.get_encoding("gpt2"))
        count = write_shards(parts, arguments.out, arguments.shard_tokens)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: 1 validation shard, {count} for training")
    return 0


if __name__ == "__main__":
    sys.exit(main())
