"""The embedded corpus of the tiny track: the source of three installed packages as token shards.

    python -m data.corpus    # writes data/corpus: train_000000.bin, then val_000000.bin

The text is the Python source of mpmath, networkx and sympy (BSD licences). The vocabulary and the
near duplicates that validation leaves out are listed beside this file: see docs/corpus.md. Nothing
depends on file order, locale, hash seed or Unicode tables. Exit codes: 0 built, 2 not built.
"""

import argparse
import base64
import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
import tiktoken

from data.shards import Tokens, write_shard

PACKAGES = ("mpmath", "networkx", "sympy")  # at the versions in requirements.txt
VOCABULARY = Path(__file__).with_name("vocabulary.tiktoken")
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
# Runs of letters, of digits and of other characters, each with one leading space, and white space.
# The classes are ASCII alone, so that no version of the Unicode tables can move a boundary.
PATTERN = r" ?[A-Za-z]+| ?[0-9]+| ?[^A-Za-z0-9 \t\r\n]+|[ \t\r\n]+(?![^ \t\r\n])|[ \t\r\n]+"
# Where a document may end, best last: after a line, before an indented or a top-level block.
BOUNDARIES = [re.compile(kind) for kind in (r"\n", r"\n\n(?=    [^ \t\n])", r"\n\n(?=[^ \t\n])")]


def package_folder(package: str) -> Path:
    """Return where a package is installed, without importing it. ImportError if it is not."""
    try:
        return Path(str(metadata.distribution(package).locate_file(package)))
    except ImportError:
        raise ImportError(f"{package} is not installed. {RESTORE}") from None


def read_sources() -> list[tuple[bytes, str, str]]:
    """Return (SHA-256 of its bytes, name, text) for each file of the corpus, sorted by hash.

    ImportError if a package is not installed. No package is imported.
    """
    files = []
    for package in PACKAGES:
        folder = package_folder(package)
        for path in folder.rglob("*.py"):
            name = path.relative_to(folder.parent).as_posix()
            content = path.read_bytes()
            text = content.decode("utf-8", errors="replace")  # the pins refuse what is not UTF-8
            is_table = len(re.findall(r"[0-9]", text)) > MAX_DIGIT_SHARE * len(text)
            if len(text) >= MIN_CHARACTERS and not is_table and "/tests/" not in name:
                files.append((hashlib.sha256(content).digest(), name, text))
    return sorted(files)


def split_documents(
    text: str, limit: int = DOCUMENT_CHARACTERS, boundaries: Sequence[re.Pattern] = BOUNDARIES
) -> list[str]:
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


def read_vocabulary(path: Path = VOCABULARY) -> tiktoken.Encoding:
    """Return the tokenizer of a vocabulary. <|endoftext|> has the id after the last one there."""
    ranks = {}  # tiktoken's own reader would keep a copy of the file in a cache
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    last = {"<|endoftext|>": len(ranks)}
    return tiktoken.Encoding("corpus", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=last)


def encode(documents: list[str], tokenizer: tiktoken.Encoding) -> Tokens:
    """Return the tokens (n,) of all documents, <|endoftext|> before each."""
    pieces = [np.empty(0, np.uint16)]
    for ids in tokenizer.encode_ordinary_batch(documents):
        pieces.append(np.array([tokenizer.eot_token, *ids], dtype=np.uint16))
    return np.concatenate(pieces)


def write_pinned(
    folder: Path, shards: Mapping[str, Tokens], pins: Mapping[str, str], packages: Sequence[str]
) -> None:
    """Write the shards in order. ValueError at one whose tokens do not have the pinned hash.

    Validation must come last, so that a folder that has it has both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, tokens in shards.items():
        found = hashlib.sha256(tokens.data).hexdigest()
        if found != pins[name]:
            versions = [f"{name} {metadata.distribution(name).version}" for name in packages]
            raise ValueError(
                f"the tokens of {name} have SHA-256 {found}, not {pins[name]}: data/ has changed "
                f"or a package is not the pinned release ({', '.join(versions)} are installed). "
                f"{RESTORE}"
            )
        write_shard(folder / name, tokens)
        print(f"{len(tokens):,} tokens in {folder / name}", flush=True)


def build(folder: Path) -> None:
    """Write both shards into `folder`. ValueError if a hash is wrong; ImportError, OSError."""
    tokenizer = read_vocabulary()
    left_out = LEFT_OUT.read_text().split()
    train, val = [], []
    for digest, name, text in read_sources():
        if digest[0] >= VAL_BELOW:
            train += split_documents(text)
        elif name not in left_out:
            val += split_documents(text)
    shards = {TRAIN: encode(train, tokenizer), VAL: encode(val, tokenizer)}
    write_pinned(folder, shards, PINS, PACKAGES)


def main(
    argv: list[str] | None = None, name: str = "corpus", build: Callable[[Path], None] = build
) -> int:
    """Build the corpus in data/`name` or --out. A failure is one sentence and exit code 2."""
    parser = argparse.ArgumentParser(prog=f"python -m data.{name}", description="Build the data.")
    parser.add_argument("--out", type=Path, default=Path("data", name), help="target folder")
    try:
        build(parser.parse_args(argv).out)
    except (ValueError, ImportError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
