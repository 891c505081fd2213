"""Documents of your own as token shards: text files, folders of them, JSONL.

    python -m data.own notes.txt essays/ rows.jsonl --out data/mine
    python train_gpt.py --track small --data-dir data/mine --val-sha256 ""

A row of JSONL is {"text": "..."}. Any other file is one text in UTF-8. A folder stands for all
files in it, at any depth; there, hidden files and those that are not text in UTF-8 are left out.
A sixteenth of the documents is for validation. Exit codes: 0 built, 2 not built.
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    from runtime.packages import find_packages

    sys.excepthook = find_packages  # a shell without .venv has no numpy

from data.shards import Tokens, write_shards
from data.tokenizers import TOKENIZERS, encode, read_tokenizer, split_documents

LONGEST = 20_000  # characters of a document; one long text then has some to validate on
# Characters of a part, by vocabulary: in English about what a track reads of a document.
PART = {2048: 1_250, 50257: 8_000}


def read_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file, or of all files in a folder but hidden ones. ValueError."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a text file, a folder or a .jsonl file.")
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    left_out = 0
    for file in filter(Path.is_file, files):
        if any(part.startswith(".") for part in file.relative_to(path).parts):
            continue
        if file.suffix == ".jsonl":
            yield from read_rows(file)
            continue
        try:
            yield file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            if file == path:
                raise ValueError(f"{path} is not text in UTF-8: convert or omit it.") from None
            left_out += 1
    if left_out:
        print(f"{path}: files left out because they are not text in UTF-8: {left_out}", flush=True)


def read_rows(path: Path) -> Iterator[str]:
    """Yield the "text" of each row, a JSON object. ValueError names a row without."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            text = None  # stays so if the line is no JSON object in UTF-8 with text
            with suppress(ValueError, RecursionError, TypeError, KeyError):
                text = json.loads(line)["text"]
            if not isinstance(text, str):
                raise ValueError(f'{path}: line {number} is not a JSON object with a string in '
                                 f'"text": correct it, or leave it out.')  # fmt: skip
            yield text


def build(paths: Iterable[Path], vocab_size: int, folder: Path) -> None:
    """Write both shards of the documents into a new `folder`. ValueError, OSError.

    Documents are cut into parts; equal parts count once. The hash of its text decides whether all
    parts of a document are for validation, the hash of its tokens where a part is in the shard: the
    order of files and rows changes nothing.
    """
    if folder.exists():  # sets must not mix
        raise ValueError(f"{folder} exists: give another --out, or delete it.")
    tokenizer = read_tokenizer(TOKENIZERS[vocab_size])
    documents: dict[bytes, list[Tokens]] = {}  # the parts of each, by the hash of its text
    texts = 0
    for text in (text for path in paths for text in read_texts(path)):
        texts += 1
        for document in filter(str.strip, split_documents(text, LONGEST)):
            key = hashlib.sha256(document.encode(errors="replace")).digest()
            parts = split_documents(document, PART[vocab_size])
            documents[key] = [encode(part, tokenizer) for part in parts]
    rule = f"longer ones than {LONGEST:,} characters are cut after a paragraph, line or sentence"
    print(f"documents found: {len(documents):,}. A file is one, and so is a row of .jsonl; {rule}.")
    if texts == 1:
        print("hint: all of it is one text. If it holds several documents, make each a row of a")
        print(".jsonl file: inside a file nothing separates them, not even <|endoftext|>.")
    if len(documents) < 2:
        raise ValueError(f"documents found: {len(documents)}. At least 2 are needed, one of them "
                         f"for validation: give more text.")  # fmt: skip
    held_out = sorted(documents)[: math.ceil(len(documents) / 16)]
    val = by_hash(part for key in held_out for part in documents.pop(key))
    train = by_hash(part for parts in documents.values() for part in parts)
    val = {key: part for key, part in val.items() if key not in train}  # in both: to train on
    if not val:
        raise ValueError("all text for validation is in the training text too: give more text.")
    write_shards(folder, [*train.values()], [*val.values()])


def by_hash(parts: Iterable[Tokens]) -> dict[bytes, Tokens]:
    """Return the parts by the SHA-256 of their tokens, in its order."""
    hashes = {hashlib.sha256(part.data).digest(): part for part in parts}
    return dict(sorted(hashes.items()))


def main(argv: list[str] | None = None) -> int:
    """Build shards of the given files and folders. A failure is one sentence and exit code 2."""
    layout = argparse.RawDescriptionHelpFormatter  # keeps line breaks
    parser = argparse.ArgumentParser("python -m data.own", description=__doc__,
                                     formatter_class=layout)  # fmt: skip
    kinds = 'text file, folder of text, or .jsonl with a "text" in each row'
    sizes = "2048: the vocabulary of tiny and small; 50257: GPT-2's, of short and steps"
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=kinds)
    parser.add_argument("--vocab-size", type=int, choices=TOKENIZERS, default=2048, help=sizes)
    parser.add_argument("--out", type=Path, default=Path("data", "own"), help="new folder")
    given = parser.parse_args(argv)
    try:
        build(given.paths, given.vocab_size, given.out)
    except (ValueError, OSError) as error:
        print(f"own: {error}", file=sys.stderr)
        return 2
    track = "small" if given.vocab_size == 2048 else "short"
    print(f'to train on it: ./run.sh --track {track} --data-dir {given.out} --val-sha256 ""')
    print("a text below 4 million tokens needs fewer: add --steps 10 --val-tokens 8192, then more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
