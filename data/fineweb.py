"""Turn documents into token shards: text of your own, or FineWeb in another vocabulary.

    python -m data.fineweb mine.jsonl --out data/mine
    python -m data.fineweb data/fineweb10B/*.bin --vocab-size 2048 --out data/web

A row of a .jsonl file is an object with the document in "text"; a .bin file is a shard of GPT-2's
vocabulary. <|endoftext|> precedes each document. The first shard is for validation. A document may
straddle two shards, as in the public sets. Exit codes: 0 done, 2 failed.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import tiktoken

from data.corpus import encode
from data.shards import Shard, Tokens, write_shard
from data.tokenizers import TOKENIZERS, read_tokenizer


def read_documents(paths: Iterable[Path]) -> Iterator[str]:
    """Yield all documents but empty ones. ValueError names a row without text."""
    for path in paths:
        yield from filter(None, decode(path) if path.suffix == ".bin" else read_rows(path))


def decode(path: Path) -> Iterator[str]:
    """Yield the documents of a shard of GPT-2's vocabulary."""
    tokenizer, tokens = read_tokenizer("gpt2"), Shard(path)[:]
    ends = np.flatnonzero(tokens == tokenizer.eot_token)
    for document in np.split(tokens, ends):
        yield tokenizer.decode(document[document != tokenizer.eot_token].tolist())


def read_rows(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(filter(bytes.strip, file), start=1):  # without blank lines
            text = None  # stays so if the line is no JSON object in UTF-8 with text
            with suppress(ValueError, RecursionError, TypeError, KeyError):
                text = json.loads(line)["text"]
            if not isinstance(text, str):
                raise ValueError(f'{path}: row {number} has no text in "text".')
            yield text


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
    parser.add_argument("--vocab-size", type=int, default=50257, choices=TOKENIZERS)
    given = parser.parse_args(argv)
    try:
        tokenizer = read_tokenizer(TOKENIZERS[given.vocab_size])
        shards = tokenize(read_documents(given.files), tokenizer, max(given.shard_tokens, 1))
        count = write_shards(shards, given.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: 1 validation shard, {count} for training")
    return 0


if __name__ == "__main__":
    sys.exit(main())
