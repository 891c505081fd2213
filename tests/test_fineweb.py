"""Shards from raw documents, with the vocabulary of the corpus in place of GPT-2's."""

import json

import numpy as np
import pytest
import tiktoken

from data import corpus, fineweb, prose
from data.shards import Shard, write_shard

DOCUMENTS = ["the other thing", "naïve 日本語 <|endoftext|> inside", "last\nlines\n" * 9, "the end"]


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """Runs the command on the files with shards of 20 tokens; returns its exit code."""
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: corpus.read_vocabulary())

    def convert(*files, size=20):
        words = [*map(str, files), "--out", str(tmp_path / "out"), "--shard-tokens", str(size)]
        return fineweb.main(words)

    return convert


def read_documents(stream, vocabulary):
    tokenizer = corpus.read_vocabulary(vocabulary)
    parts = np.split(stream, np.flatnonzero(stream == tokenizer.eot_token))[1:]
    return [tokenizer.decode(part[1:].tolist()) for part in parts]


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in documents))
    return path


def test_documents_come_back_from_shards_of_equal_size_that_they_straddle(
    tmp_path, convert, capsys
):
    first = write_jsonl(tmp_path / "b.jsonl", [*DOCUMENTS[:1], "", *DOCUMENTS[1:2]])
    first.write_text("\n" + first.read_text() + "\n \n")  # blank lines
    second = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[2:])
    assert convert(first, second) == 0
    training = sorted((tmp_path / "out").glob("train_*.bin"))
    shards = [Shard(path)[:] for path in (tmp_path / "out" / "val_000000.bin", *training)]
    assert len(list((tmp_path / "out").iterdir())) == len(shards) > 3
    assert all(shard.size == 20 for shard in shards[:-1])
    assert 1 <= shards[-1].size <= 20
    assert read_documents(np.concatenate(shards), corpus.VOCABULARY) == DOCUMENTS
    assert f"1 validation shard, {len(training)} for training" in capsys.readouterr().out
    assert convert(first) == 2
    assert "File exists" in capsys.readouterr().err


def test_a_shard_of_another_vocabulary_becomes_one_of_the_small_vocabulary(tmp_path, convert):
    write_shard(tmp_path / "in.bin", corpus.encode(DOCUMENTS, corpus.read_vocabulary()))
    assert convert(tmp_path / "in.bin", "--vocab-size", 2048) == 0
    shards = [tmp_path / "out" / "val_000000.bin", *sorted((tmp_path / "out").glob("train_*"))]
    stream = np.concatenate([Shard(path)[:] for path in shards])
    assert read_documents(stream, prose.VOCABULARY) == DOCUMENTS


@pytest.mark.parametrize(
    "line", [b'{"text": "cut', b'{"text": "\xff"}', b'{"txt": "x"}', b'{"text": 5}', b"[" * 90_000]
)
def test_a_bad_line_is_named_and_leaves_no_validation_shard(tmp_path, convert, capsys, line):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "' + b"a" * 99 + b'"}\n' + line + b"\n")
    assert convert(source) == 2
    assert f'{source}: row 2 has no text in "text"' in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("val*"))


def test_documents_that_fill_no_training_shard_are_refused(tmp_path, convert, capsys):
    assert convert(write_jsonl(tmp_path / "in.jsonl", ["short"])) == 2
    assert "Lower --shard-tokens" in capsys.readouterr().err
