"""The corpus of the tiny track, or documents of your own, as token shards.

    python -m data.corpus    # writes data/corpus: train_000000.bin, then val_000000.bin
    python -m data.corpus mine.jsonl --vocab-size 2048 --out data/mine

The corpus is the Python source of mpmath, networkx and sympy (BSD licences). The near duplicates
that validation leaves out are listed beside this file: see docs/corpus.md. Nothing depends on file
order, locale, hash seed or Unicode tables. Exit codes: 0 built, 2 not built.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path

import numpy as np

from data.shards import Tokens, write_shard
from data.tokenizers import CODE, TOKENIZERS, encode, read_tokenizer

PACKAGES = ("mpmath", "networkx", "sympy")  # at the versions in requirements.txt
LEFT_OUT = Path(__file__).with_name("left_out.txt")
RESTORE = "To restore the packages: python -m pip install --force-reinstall -r requirements.txt"
MIN_CHARACTERS = 500  # shorter files are empty modules and re-exports
MAX_DIGIT_SHARE = 0.12  # above it a file is a table of numbers, not text
VAL_BELOW = 16  # first byte of a file's SHA-256: one file in 16 is validation
DOCUMENT_CHARACTERS = 1_250  # a whole file has 7,000 tokens, and a row drops the tail
TRAIN, VAL = "train_000000.bin", "val_000000.bin"
PINS = {  # SHA-256 of the tokens
    TRAIN: "77e6e4d2acaa19c335e3d1748fa9e8cdeb7bb2f2000e212b7042c60380a15fbf",
    VAL: "61a7bae6fab302b9368d92228dd5e750f71281b9068a73babfb4a7310d4209cc",
}
# Where a document may end, best last: after a line, before an indented or a top-level block.
BOUNDARIES = [re.compile(kind) for kind in (r"\n", r"\n\n(?=    [^ \t\n])", r"\n\n(?=[^ \t\n])")]


def read_sources(packages: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each source file of these packages, without their tests.

    ImportError if one is not installed. None is imported.
    """
    for package in packages:
        try:
            folder = Path(str(metadata.distribution(package).locate_file(package)))
        except ImportError:
            raise ImportError(f"{package} is not installed. {RESTORE}") from None
        for path in folder.rglob("*.py"):
            name = path.relative_to(folder.parent).as_posix()
            if "/tests/" not in name:
                yield name, path.read_bytes()


def split_documents(text: str, limit: int, boundaries: Sequence[re.Pattern]) -> list[str]:
    """Cut a text into documents of at most `limit` characters; joined, they are the text.

    A document ends at the last boundary of the best kind in the second half of the limit.
    """
    documents, start = [], 0
    while len(text) - start > limit:
        cut = end = start + limit
        for boundary in boundaries:
            for match in boundary.finditer(text, start + limit // 2, end):
                cut = match.end()
        documents.append(text[start:cut])
        start = cut
    return [*documents, text[start:]]


def read_files() -> list[tuple[bytes, str, list[str]]]:
    """Return (SHA-256, name, documents) for each file of the corpus, sorted by SHA-256."""
    files = []
    for name, content in read_sources(PACKAGES):
        text = content.decode("utf-8", errors="replace")  # the pins refuse what is not UTF-8
        is_table = len(re.findall(r"[0-9]", text)) > MAX_DIGIT_SHARE * len(text)
        if len(text) >= MIN_CHARACTERS and not is_table:
            documents = split_documents(text, DOCUMENT_CHARACTERS, BOUNDARIES)
            files.append((hashlib.sha256(content).digest(), name, documents))
    return sorted(files)


def build(folder: Path) -> None:
    """Write both shards into `folder`. ValueError, ImportError or OSError if it cannot."""
    tokenizer, left_out = read_tokenizer(CODE), LEFT_OUT.read_text().split()
    shards: dict[str, list[Tokens]] = {TRAIN: [], VAL: []}
    for digest, name, documents in read_files():
        if name not in left_out:
            shard = shards[VAL if digest[0] < VAL_BELOW else TRAIN]
            shard += [encode(document, tokenizer) for document in documents]
    write_shards(folder, shards, PINS)


def read_own(path: Path) -> Iterator[str]:
    """Yield the "text" of each row, a JSON object. ValueError names a row without."""
    with path.open("rb") as file:
        for number, line in enumerate(filter(bytes.strip, file), start=1):  # without blank lines
            text = None  # stays so if the line is no JSON object in UTF-8 with text
            with suppress(ValueError, RecursionError, TypeError, KeyError):
                text = json.loads(line)["text"]
            if not isinstance(text, str):
                raise ValueError(f'{path}: row {number} is no JSON with a string in "text".')
            yield text


def build_own(paths: Iterable[Path], vocab_size: int, folder: Path) -> None:
    """Write both shards of the documents, cut, each part once, by hash. ValueError, OSError."""
    if folder.exists():  # sets must not mix
        raise ValueError(f"{folder} exists: give another --out, or delete it.")
    tokenizer = read_tokenizer(TOKENIZERS[vocab_size])
    limit = 8_000 if vocab_size == 50257 else DOCUMENT_CHARACTERS  # about a max_document
    by_hash: dict[bytes, tuple[bool, Tokens]] = {}
    for text in chain.from_iterable(map(read_own, paths)):
        held = hashlib.sha256(text.encode(errors="replace")).digest()[0] < VAL_BELOW  # all parts
        for part in filter(None, split_documents(text, limit, BOUNDARIES)):
            tokens = encode(part, tokenizer)
            key = hashlib.sha256(tokens.data).digest()
            by_hash[key] = (held and by_hash.get(key, (True,))[0], tokens)  # in both: to train on
    parts = [by_hash[key] for key in sorted(by_hash)]
    train, val = ([part for held, part in parts if held is wanted] for wanted in (False, True))
    if not (train and val):
        raise ValueError("a shard would be empty: one document in 16 is for validation. Give more.")
    write_shards(folder, {TRAIN: train, VAL: val})


def write_shards(
    folder: Path, shards: Mapping[str, list[Tokens]], pins: Mapping[str, str] | None = None
) -> None:
    """Write the documents of each shard. ValueError if their tokens do not have the pinned hash.

    Validation must come last, so that a folder that has it has both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in shards.items():
        tokens = np.concatenate(documents)
        found = hashlib.sha256(tokens.data).hexdigest()
        if pins is not None and found != pins[name]:
            raise ValueError(f"the tokens of {name} have SHA-256 {found}, not {pins[name]}: data/ "
                             f"has changed, or a package is not the pinned release. {RESTORE}")
        write_shard(folder / name, tokens)
        print(f"{len(tokens):,} tokens in {folder / name}", flush=True)


def main(
    argv: list[str] | None = None, name: str = "corpus", build: Callable[[Path], None] = build
) -> int:
    """Build the corpus in --out or data/`name`. A failure is one sentence and exit code 2."""
    parser = argparse.ArgumentParser(prog=f"python -m data.{name}", description="Build the data.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="documents of your own")
    parser.add_argument("--vocab-size", type=int, choices=TOKENIZERS, help="of FILE (50257)")
    parser.add_argument("--out", type=Path, help="target folder")
    given = parser.parse_args(argv)
    if given.files:
        name, build = "own", partial(build_own, given.files, given.vocab_size or 50257)
    elif given.vocab_size:
        parser.error("--vocab-size is that of FILE: name one, or leave it out")
    try:
        build(given.out or Path("data", name))
    except (ValueError, ImportError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
