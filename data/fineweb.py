"""Make token shards from raw documents: FineWeb's own parquet files, or any text.

    python -m data.fineweb sample/10BT/*.parquet --out data/fineweb10B
    python -m data.fineweb notes.jsonl.gz book.txt --out data/mine --name mine --shard-tokens 1_000_000

Inputs are .jsonl or .jsonl.gz (one object a line), .txt (a file is a document) and .parquet (needs pyarrow).
<|endoftext|> stands before each document; shard 0 is validation, the others are training, and a document may straddle
two shards, as in the public pre-tokenized sets. Shards are whole or absent; after a fault no shard of the run is left.
Exit codes: 0 done, 1 failed while writing, 2 bad input, 130 interrupted.
"""

import argparse
import base64
import gzip
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tiktoken
from numpy.typing import NDArray
from tiktoken_ext.openai_public import r50k_pat_str

if not __package__:  # run as a file: the package is found from the repository root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.shards import write_shard

BATCH_CHARACTERS = 1 << 22  # tokenized at once, so that memory does not grow with the input
MAX_VOCAB_SIZE = 1 << 16  # shards hold uint16
MAX_SHARD_TOKENS = (1 << 31) - 1  # the header counts them in an int32
MAX_DOCUMENT = 1 << 28  # bytes: a gzip file of a few MB can hold a line that no memory can
SAFE_PYARROW = 15  # up to 14.0.0 a parquet file can name code that is then run: CVE-2023-47248
BYTES = {bytes([value]) for value in range(256)}
REPORT_EVERY_S = 5.0
KINDS = (".jsonl", ".jsonl.gz", ".txt", ".parquet")


class InputError(ValueError):
    """Documents, a vocabulary or a target folder that cannot be used: names the file, the value and the rule."""


def load_encoding(name: str) -> tiktoken.Encoding:
    """The GPT-2 encoding for "gpt2", else one from a file of "base64-token rank" lines, split by GPT-2's pattern.

    Raises InputError when GPT-2's vocabulary is neither cached nor reachable, or the file is not a byte-level one.
    """
    if name != "gpt2":
        return _encoding_from_file(Path(name))
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as error:  # what requests raises is an OSError
        raise InputError(
            "the gpt2 vocabulary is not cached and cannot be downloaded: connect to the network, point "
            "TIKTOKEN_CACHE_DIR at a folder that holds it, or name a vocabulary file with --encoding"
        ) from error


def _encoding_from_file(path: Path) -> tiktoken.Encoding:
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():  # tiktoken's own reader would cache the file under its path
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; --encoding takes gpt2 or a vocabulary file") from error
    except ValueError as error:
        raise InputError(f"{path}: line {len(ranks) + 1} is not a base64 token and its rank") from error
    if len(ranks) >= MAX_VOCAB_SIZE or set(ranks.values()) != set(range(len(ranks))) or BYTES - ranks.keys():
        raise InputError(
            f"{path}: got {len(ranks):,} tokens; a vocabulary has all 256 single bytes, the ranks 0, 1, 2, ... once "
            f"each, and at most {MAX_VOCAB_SIZE - 1:,} tokens"
        )
    special = {"<|endoftext|>": len(ranks)}
    return tiktoken.Encoding(path.stem, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)


def read_documents(path: Path, field: str) -> Iterator[str]:
    """The documents of one file in order; its ending is one of KINDS, `field` names the text in .jsonl and .parquet.

    Raises InputError naming file and line for anything that is not text.
    """
    if path.suffix == ".txt":
        if path.stat().st_size > MAX_DOCUMENT:
            raise InputError(f"{path}: a .txt file is one document, of {MAX_DOCUMENT:,} bytes at most; split the file")
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: byte {error.start:,} is not UTF-8; convert the file first") from error
        return
    for where, row in _read_parquet(path, field) if path.suffix == ".parquet" else _read_jsonl(path):
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise InputError(f"{path}: {where} has no text in field {field!r}; name the right one with --field")
        yield text


def _read_jsonl(path: Path) -> Iterator[tuple[str, object]]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_DOCUMENT), b""), start=1):
                if len(line) == MAX_DOCUMENT:
                    raise ValueError(f"it is longer than {MAX_DOCUMENT:,} bytes")
                if line.strip():
                    yield f"line {number}", json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: line {number} is not JSON in UTF-8: {error}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: not a whole gzip file, broken after line {number}: {error}") from error


def _read_parquet(path: Path, field: str) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{path}: reading parquet needs pyarrow; run: pip install pyarrow") from error
    if int(pyarrow.__version__.partition(".")[0]) < SAFE_PYARROW:
        raise InputError(f"{path}: pyarrow {pyarrow.__version__} may run code that a parquet file names; "
                         f"run: pip install 'pyarrow>={SAFE_PYARROW}'")
    try:
        rows = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1_000, columns=[field])
        for number, row in enumerate((row for batch in rows for row in batch.to_pylist()), start=1):
            yield f"row {number}", row
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not a readable parquet file: {error}") from error


def batched(documents: Iterable[str]) -> Iterator[list[str]]:
    """Group documents into lists of about BATCH_CHARACTERS; a document without text is dropped."""
    batch: list[str] = []
    characters = 0
    for text in filter(None, documents):
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def tokenize(documents: Iterable[str], encoding: tiktoken.Encoding) -> Iterator[NDArray[np.uint16]]:
    """Each document as <|endoftext|> and its tokens; progress goes to standard error."""
    start = reported = time.monotonic()
    documents_done = tokens_done = 0
    for batch in batched(documents):
        for ids in encoding.encode_ordinary_batch(batch, num_threads=os.cpu_count() or 1):
            yield np.array([encoding.eot_token, *ids], dtype=np.uint16)
            tokens_done += 1 + len(ids)
        documents_done += len(batch)
        if (now := time.monotonic()) - reported >= REPORT_EVERY_S:
            rate = tokens_done / (now - start)
            print(f"{documents_done:,} documents, {tokens_done:,} tokens, {rate:,.0f} tokens/s", file=sys.stderr)
            reported = now


def pack(pieces: Iterable[NDArray[np.uint16]], size: int) -> Iterator[NDArray[np.uint16]]:
    """The same tokens in vectors of `size`, the last one shorter; each is valid until the next is asked for."""
    buffer: NDArray[np.uint16] = np.empty(size, np.uint16)
    held = 0
    for piece in pieces:
        while piece.size:
            part, piece = np.split(piece, [size - held])
            buffer[held : held + part.size] = part
            held += part.size
            if held == size:
                yield buffer
                held = 0
    if held:
        yield buffer[:held]


def write_shards(pieces: Iterable[NDArray[np.uint16]], out: Path, name: str, shard_tokens: int) -> int:
    """Write `name`_val_000000.bin, `name`_train_000001.bin, ... of `shard_tokens` each into `out`; returns how many.

    Raises InputError when `out` has shards of that name already, or when validation leaves nothing to train on.
    """
    out.mkdir(parents=True, exist_ok=True)
    if old := sorted(out.glob(f"{name}_*.bin")):
        raise InputError(f"{old[0]} is there already; delete the old shards, or choose another --out or --name")
    # An interrupted set of shards would look like a whole one: none is moved into its place before the last is written.
    with tempfile.TemporaryDirectory(dir=out, prefix="writing_") as folder:
        for index, shard in enumerate(pack(pieces, shard_tokens)):
            write_shard(Path(folder, f"{name}_{'train' if index else 'val'}_{index:06d}.bin"), shard)
        paths = list(Path(folder).iterdir())
        if len(paths) < 2:
            raise InputError(
                f"the documents fill no more than the validation shard of {shard_tokens:,} tokens, so nothing is left "
                f"to train on; give more documents or a smaller --shard-tokens"
            )
        for path in paths:
            os.replace(path, out / path.name)
    return len(paths)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", metavar="INPUT", type=Path, nargs="+", help="documents, taken in the order given")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="default: 100,000,000")
    parser.add_argument("--name", default="fineweb", help="first part of the file names; default: fineweb")
    parser.add_argument("--field", default="text", help="of .jsonl and .parquet; default: text")
    parser.add_argument("--encoding", default="gpt2", help="gpt2, or a vocabulary file (split by GPT-2's pattern)")
    args = parser.parse_args(argv)
    try:
        for path in args.inputs:
            if not path.is_file() or not path.name.endswith(KINDS):
                raise InputError(f"{path} is not a file whose name ends in {', '.join(KINDS)}")
        if Path(args.name).name != args.name:
            raise InputError(f"--name {args.name} is no part of a file name; the folder is given by --out")
        if not 1 <= args.shard_tokens <= MAX_SHARD_TOKENS:
            rule = f"a shard holds at least one token and at most {MAX_SHARD_TOKENS:,}"
            raise InputError(f"--shard-tokens is {args.shard_tokens}; {rule}")
        documents = (text for path in args.inputs for text in read_documents(path, args.field))
        pieces = tokenize(documents, load_encoding(args.encoding))
        count = write_shards(pieces, args.out, args.name, args.shard_tokens)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print("interrupted; no shards were kept", file=sys.stderr)
        return 130
    print(f"{args.out}: 1 validation shard, {count - 1} for training")
    return 0


if __name__ == "__main__":
    sys.exit(main())
