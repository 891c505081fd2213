"""Shards from raw documents, with a small vocabulary built here."""

import base64
import gzip
import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from data import fineweb
from data.shards import open_shard

MERGES = [b"th", b"he", b" t", b" th", b" the", b"er", b"in", b"ing"]
VOCAB = [bytes([value]) for value in range(256)] + MERGES
EOT = len(VOCAB)
DOCUMENTS = ["the other thing", "naïve 日本語 <|endoftext|> inside", "last\nlines\n" * 9, "in the end"]


@pytest.fixture
def vocabulary(tmp_path):
    path = tmp_path / "small.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(VOCAB)))
    return path


def write_jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    lines = "".join(json.dumps({"id": index, field: text}) + "\n" for index, text in enumerate(documents))
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
        file.write(lines)
    return path


def read_shards(out: Path, name: str = "fineweb") -> list[np.ndarray]:
    """Token vectors in the order written: validation, then training."""
    paths = [out / f"{name}_val_000000.bin", *sorted(out.glob(f"{name}_train_*.bin"))]
    assert sorted(out.iterdir()) == sorted(paths)
    assert [int(path.stem[-6:]) for path in paths] == list(range(len(paths)))
    return [open_shard(path)[:] for path in paths]


def documents_in(tokens: np.ndarray) -> list[str]:
    """Decoded by table look-up, without tiktoken."""
    assert tokens[0] == EOT
    starts = [*np.flatnonzero(tokens == EOT), tokens.size]
    pieces = [tokens[start + 1 : stop] for start, stop in pairwise(starts)]
    return [b"".join(VOCAB[token] for token in piece).decode() for piece in pieces]


def test_documents_come_back_from_shards_of_equal_size_that_they_straddle(tmp_path, vocabulary, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    arguments = [str(source), "--out", str(tmp_path / "out"), "--encoding", str(vocabulary), "--shard-tokens", "20"]
    assert fineweb.main(arguments) == 0
    shards = read_shards(tmp_path / "out")
    assert len(shards) > 3
    assert all(shard.size == 20 for shard in shards[:-1])
    assert 1 <= shards[-1].size <= 20
    assert shards[1][0] != EOT, "a document goes on from the validation shard into the first training shard"
    assert documents_in(np.concatenate(shards)) == DOCUMENTS
    assert f"1 validation shard, {len(shards) - 1} for training" in capsys.readouterr().out


def test_the_merges_of_the_vocabulary_are_used(vocabulary):
    assert fineweb.load_encoding(str(vocabulary)).encode_ordinary("the the") == [
        VOCAB.index(b"th"),
        VOCAB.index(b"e"),
        VOCAB.index(b" the"),
    ]


def test_inputs_of_several_kinds_keep_their_order_and_empty_documents_are_dropped(tmp_path, vocabulary):
    plain = write_jsonl(tmp_path / "a.jsonl", ["one", "", "two"], field="body")
    packed = write_jsonl(tmp_path / "b.jsonl.gz", ["three"], field="body")
    text = tmp_path / "c.txt"
    text.write_text("four\n\nstill four")
    out = ["--out", str(tmp_path / "out"), "--name", "mine", "--shard-tokens", "9"]
    options = ["--field", "body", "--encoding", str(vocabulary)]
    assert fineweb.main([str(text), str(plain), str(packed), *out, *options]) == 0
    tokens = np.concatenate(read_shards(tmp_path / "out", "mine"))
    assert documents_in(tokens) == ["four\n\nstill four", "one", "two", "three"]


def test_parquet_rows_come_back(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    parquet = pytest.importorskip("pyarrow.parquet")
    source = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"text": DOCUMENTS, "id": [1, 2, 3, 4]}), source)
    assert list(fineweb.read_documents(source, "text")) == DOCUMENTS


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(fineweb.InputError, match="pip install pyarrow"):
        list(fineweb.read_documents(tmp_path / "in.parquet", "text"))


@given(st.lists(st.lists(st.integers(0, 65535), max_size=30), max_size=10), st.integers(1, 12))
def test_packing_keeps_all_tokens_in_order_and_fills_all_but_the_last_shard(pieces, size):
    vectors = [np.array(piece, dtype=np.uint16) for piece in pieces]
    packed = [shard.copy() for shard in fineweb.pack(vectors, size)]
    flat = [token for piece in pieces for token in piece]
    assert [token for shard in packed for token in shard.tolist()] == flat
    assert [shard.size for shard in packed[:-1]] == [size] * (len(packed) - 1)
    assert len(packed) == -(-len(flat) // size)


@given(st.lists(st.text(max_size=40), max_size=20))
def test_batches_are_bounded_and_lose_no_text(documents):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fineweb, "BATCH_CHARACTERS", 50)
        batches = list(fineweb.batched(documents))
    assert [text for batch in batches for text in batch] == [text for text in documents if text]
    assert all(sum(map(len, batch)) < 50 + 40 for batch in batches)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "line 3 is not JSON"),
        (b'{"text": "\xff"}', "line 3 is not JSON in UTF-8"),
        (b'{"txt": "x"}', "line 3 has no text in field 'text'"),
        (b'{"text": 5}', "line 3 has no text in field 'text'"),
        (b'"text"', "line 3 has no text in field 'text'"),
    ],
)
def test_a_bad_line_is_named_and_no_shard_is_left(tmp_path, vocabulary, capsys, monkeypatch, line, message):
    monkeypatch.setattr(fineweb, "BATCH_CHARACTERS", 1)  # so that shards are written before the bad line is read
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "' + b"a" * 99 + b'"}\n\n' + line + b"\n")
    arguments = [str(source), "--out", str(tmp_path / "out"), "--encoding", str(vocabulary), "--shard-tokens", "10"]
    assert fineweb.main(arguments) == 2
    error = capsys.readouterr().err
    assert f"{source}: {message}" in error
    assert list((tmp_path / "out").iterdir()) == []


def test_a_cut_gzip_file_is_an_error(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl.gz", DOCUMENTS * 50)
    source.write_bytes(source.read_bytes()[:-20])
    with pytest.raises(fineweb.InputError, match="not a whole gzip file"):
        list(fineweb.read_documents(source, "text"))


def test_text_that_is_not_utf8_is_an_error(tmp_path):
    source = tmp_path / "in.txt"
    source.write_bytes(b"abc\xff")
    with pytest.raises(fineweb.InputError, match="byte 3 is not UTF-8"):
        list(fineweb.read_documents(source, "text"))


@pytest.mark.parametrize("documents", [[], ["", ""], ["short"]])
def test_documents_that_leave_nothing_to_train_on_are_an_error(tmp_path, vocabulary, capsys, documents):
    source = write_jsonl(tmp_path / "in.jsonl", documents)
    assert fineweb.main([str(source), "--out", str(tmp_path / "out"), "--encoding", str(vocabulary)]) == 2
    assert "nothing is left to train on" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_shards_of_an_earlier_run_are_not_mixed_with_new_ones(tmp_path, vocabulary, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    arguments = [str(source), "--out", str(tmp_path / "out"), "--encoding", str(vocabulary), "--shard-tokens", "30"]
    assert fineweb.main(arguments) == 0
    before = [shard.tolist() for shard in read_shards(tmp_path / "out")]
    assert fineweb.main(arguments) == 2
    assert "is there already" in capsys.readouterr().err
    assert [shard.tolist() for shard in read_shards(tmp_path / "out")] == before


@pytest.mark.parametrize("count", [0, 2**31])
def test_shards_that_no_header_could_count_are_refused_before_any_work(tmp_path, capsys, count):
    source = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    assert fineweb.main([str(source), "--out", str(tmp_path / "out"), "--shard-tokens", str(count)]) == 2
    assert f"--shard-tokens is {count}; a shard holds at least one token and at most 2,147,483,647" in (
        capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["absent.jsonl", "notes.pdf"])
def test_an_input_that_cannot_be_read_is_refused_before_any_work(tmp_path, capsys, name):
    (tmp_path / "notes.pdf").write_text("x")
    assert fineweb.main([str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
    assert name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_gpt2_without_a_network_names_both_ways_out(monkeypatch):
    def no_network(name: str) -> tiktoken.Encoding:
        raise requests.exceptions.ConnectionError("name resolution failed")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(fineweb.InputError, match=r"TIKTOKEN_CACHE_DIR.*--encoding"):
        fineweb.load_encoding("gpt2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"!!!! 0\n", "line 1 is not a base64 token"),
        (b"YQ== 0\nYg==\n", "line 2 is not a base64 token"),
        (b"YQ== 0\n", "all 256 single bytes"),
        (b"", "all 256 single bytes"),
    ],
)
def test_a_broken_vocabulary_is_an_error(tmp_path, content, message):
    path = tmp_path / "broken.tiktoken"
    path.write_bytes(content)
    with pytest.raises(fineweb.InputError, match=message):
        fineweb.load_encoding(str(path))


def test_an_absent_vocabulary_is_an_error(tmp_path):
    with pytest.raises(fineweb.InputError, match="--encoding takes gpt2 or a vocabulary file"):
        fineweb.load_encoding(str(tmp_path / "absent.tiktoken"))
