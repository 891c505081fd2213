"""Documents of one's own: files, folders and rows become shards, each document in one of them."""

import json
import math
from hashlib import sha256
from itertools import chain

import numpy as np
import pytest
import tiktoken

from data import own
from data.shards import TRAIN, VAL, Shard
from data.tokenizers import PROSE, encode, read_tokenizer

DOCUMENTS = ["the other thing", "naïve 日本語 <|endoftext|> inside", "last\nlines\n" * 9, "the end"]
DOCUMENTS += [f"document {number} of many" for number in range(30)]


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """Runs the command on files of one's own; returns its exit code."""
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: read_tokenizer(PROSE))
    return lambda *words: own.main([*map(str, words), "--out", str(tmp_path / "out")])


@pytest.fixture
def parts(tmp_path):
    """Reads the shards that the command wrote; returns the texts of the parts in each."""

    def read():
        tokenizer, found = read_tokenizer(PROSE), []
        for name in (TRAIN, VAL):
            stream = Shard(tmp_path / "out" / name)[:]
            pieces = np.split(stream, np.flatnonzero(stream == tokenizer.eot_token))[1:]
            found.append([tokenizer.decode(piece[1:].tolist()) for piece in pieces])
        return found

    return read


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n \n" for text in documents))
    return path


@pytest.mark.parametrize("size", [2048, 50257])
def test_own_documents_come_back_each_in_one_shard(tmp_path, convert, parts, size, capsys):
    first = write_jsonl(tmp_path / "b.jsonl", [*DOCUMENTS[:1], "", *DOCUMENTS[1:9]])
    second = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[9:])
    assert convert(first, second, "--vocab-size", size) == 0
    said = capsys.readouterr().out
    assert ("documents found: 34." in said, "hint:" in said) == (True, False)
    train, val = parts()
    tokenizer = read_tokenizer(PROSE)
    order = {text: sha256(encode(text, tokenizer).data).hexdigest() for text in DOCUMENTS}
    by_text = sorted(DOCUMENTS, key=lambda text: sha256(text.encode()).hexdigest())
    count = math.ceil(len(DOCUMENTS) / 16)
    assert val == sorted(by_text[:count], key=order.__getitem__), "a sixteenth, by hash"
    assert train == sorted(by_text[count:], key=order.__getitem__)
    assert convert(first) == 2
    assert "out exists: give another" in capsys.readouterr().err


def test_a_folder_gives_all_its_text_and_counts_what_is_none(tmp_path, convert, parts, capsys):
    folder = tmp_path / "mine"
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "a.txt").write_bytes("\ufeffwith a mark\r\nand lines of Windows".encode())
    (folder / "deep" / "b.py").write_text("def f(x):\n    return x\n")
    (folder / "deep" / "deeper" / "no suffix").write_text("a text too")
    (folder / ".git" / "config").write_text("hidden")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    write_jsonl(folder / "rows.jsonl", ["one row", "another row"])
    (tmp_path / "single.md").write_text("a file of its own")
    assert convert(folder, tmp_path / "single.md") == 0
    assert sorted(chain(*parts())) == [
        "a file of its own", "a text too", "another row", "def f(x):\n    return x\n", "one row",
        "with a mark\nand lines of Windows",
    ]  # fmt: skip
    said = f"{folder}: files left out because they are not text in UTF-8: 1\n"
    assert said in capsys.readouterr().out


def test_one_file_of_everything_is_told_how_to_separate_its_documents(tmp_path, convert, capsys):
    (tmp_path / "all.txt").write_text("".join(f"story {n}\n\n<|endoftext|>\n" for n in range(999)))
    assert convert(tmp_path / "all.txt") == 0
    said = capsys.readouterr().out
    assert "documents found: 2. A file is one, and so is a row of .jsonl" in said
    assert "hint: all of it is one text" in said


@pytest.mark.parametrize(("size", "limit"), [(2048, 1250), (50257, 8000)])
def test_a_long_document_is_cut_and_all_of_its_text_is_in_one_shard(
    tmp_path, convert, parts, size, limit
):
    songs = [[f"{n} bottles, song {song}\n" for n in range(1, 800)] for song in range(8)]
    blank = " " * 1_000_000  # whole, the vocabulary's pattern would overflow the stack
    source = write_jsonl(tmp_path / "a.jsonl", [*map("".join, songs), blank])
    assert convert(source, "--vocab-size", size) == 0
    shards = []
    for texts in parts():
        assert max(map(len, texts)) <= limit
        shards.append({line for text in texts for line in text.splitlines(keepends=True)})
    assert all(shards)
    for song in songs:
        assert [lines >= {*song} for lines in shards].count(True) == 1
        assert [lines.isdisjoint(song) for lines in shards].count(True) == 1


def test_a_part_of_documents_of_both_shards_is_trained_on_in_any_order_of_the_rows(
    tmp_path, convert, parts
):
    licence = "".join(f"line {n} of a licence, word for word\n" for n in range(60))
    texts, found = [licence + f"\nthe text of file {n}\n" * 9 for n in range(60)], []
    for number, order in enumerate((texts, texts[::-1])):
        source = write_jsonl(tmp_path / f"{number}.jsonl", order)
        assert convert(source) == 0
        shared = [sum(text.count("line 5 of a licence") for text in texts) for texts in parts()]
        assert shared == [1, 0], "once, to train on"
        out = (tmp_path / "out").rename(tmp_path / f"out_{number}")
        found.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert found[0] == found[1]


ROWS = b'{"text": "' + b"a" * 99 + b'"}\n\n%s\n'
BAD_ROW = 'line 3 is not a JSON object with a string in "text"'


@pytest.mark.parametrize(("name", "content", "sentence"), [
    *(("in.jsonl", ROWS % line, f"in.jsonl: {BAD_ROW}") for line in (
        b'{"text": "cut', b'{"text": "\xff"}', b'{"txt": "x"}', b'{"text": 5}', b"[" * 90_000)),
    ("none.txt", None, "none.txt does not exist: give a text file, a folder or a .jsonl file."),
    ("in.txt", b"\xff\xfe", "in.txt is not text in UTF-8: convert or omit it"),
    ("in.txt", b"", "documents found: 0. At least 2 are needed"),
    ("in.txt", b"short", "documents found: 1. At least 2 are needed"),
    ("in.txt", b"word " * 19_000, "is in the training text too: give more text"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_what_gives_no_two_shards_is_refused_in_one_sentence(
    name, content, sentence, tmp_path, convert, capsys
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert convert(tmp_path / name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert not (tmp_path / "out").exists()
