"""The embedded corpus: the same bytes everywhere, and validation that training does not hold.

Then shards of one's own documents, with the vocabulary of the corpus in place of GPT-2's.
"""

import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken

from data import corpus
from data.shards import Shard
from data.tokenizers import CODE, PROSE, encode, read_tokenizer

ROOT = Path(__file__).parents[1]
END = 1023  # <|endoftext|>


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A corpus built where file order, hash seed and locale differ from every other machine's."""
    folder = tmp_path_factory.mktemp("embedded") / "corpus"
    program = (
        "import sys, pathlib; from data import corpus\n"
        "rglob = pathlib.Path.rglob\n"
        "pathlib.Path.rglob = lambda self, pattern: reversed(list(rglob(self, pattern)))\n"
        "sys.exit(corpus.main(['--out', sys.argv[1]]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345", "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", program, str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return folder


def test_built_files_have_the_pinned_hashes(built):
    """Those of the files that the derivation of the vocabulary wrote, header included."""
    hashes = {path.name: sha256(path.read_bytes()).hexdigest() for path in built.iterdir()}
    assert hashes == {
        "train_000000.bin": "bf4c179eaf4df3ddccfe872aea9e5a67be700118df210ef24b90efce0cad135a",
        "val_000000.bin": "33ca12509e60032d71e96b276b207975be606b8b7e989a8be0a8b6f21c4946e2",
    }
    vocabulary = sha256(CODE.read_bytes()).hexdigest()
    assert vocabulary == "6b12be81afa8f1528671ba7899bddfb30c576e51e6617d7a7b9256fc57fd1413"


def windows(tokens):
    """Every run of 50 tokens, as bytes."""
    raw = tokens[tokens != END].tobytes()
    return [raw[start : start + 100] for start in range(0, len(raw) - 99, 2)]


def test_files_left_out_of_validation_are_near_duplicates_and_no_other_file_is(built):
    tokenizer = read_tokenizer(CODE)
    left_out = corpus.LEFT_OUT.read_text().split()
    files = {}
    for digest, name, documents in corpus.read_files():
        if digest[0] < 16:
            files[name] = windows(np.concatenate([encode(each, tokenizer) for each in documents]))
    wanted = set().union(*files.values())
    training = Shard(built / "train_000000.bin")[:]
    seen = wanted.intersection(windows(training))
    for name, own in files.items():
        share = np.mean([window in seen for window in own]) if own else 0
        assert (share > 0.25) == (name in left_out), name


def test_a_missing_package_is_named_with_the_fix_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpus, "PACKAGES", ("no-such-text",))
    assert corpus.main(["--out", str(tmp_path / "out")]) == 2
    restore = r"no-such-text is not installed\. .* --force-reinstall -r requirements\.txt\n"
    assert re.search(restore, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"raise SystemExit  # " + b"x" * 600, b"\xff" * 600])
def test_sources_that_were_tampered_with_are_refused_and_never_run(
    content, tmp_path, monkeypatch, capsys
):
    (tmp_path / "package.py").write_bytes(content)
    monkeypatch.setattr(corpus, "PACKAGES", ("networkx",))
    found = SimpleNamespace(locate_file=lambda package: tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda package: found)
    monkeypatch.setattr(corpus, "VAL_BELOW", 0)
    assert corpus.main(["--out", str(tmp_path / "out")]) == 2
    assert "a package is not the pinned release" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*"))


# ---- Documents of one's own

# In both vocabularies their hashes put some into training and some into validation.
DOCUMENTS = ["the other thing", "naïve 日本語 <|endoftext|> inside", "last\nlines\n" * 9, "the end"]


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """Runs the command on files of one's own; returns its exit code."""
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: read_tokenizer(CODE))
    monkeypatch.setattr(corpus, "VAL_BELOW", 128)  # every other document
    return lambda *words: corpus.main([*map(str, words), "--out", str(tmp_path / "out")])


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n \n" for text in documents))
    return path


@pytest.mark.parametrize(("size", "vocabulary"), [(2048, PROSE), (50257, CODE)])
def test_own_documents_come_back_each_in_one_shard(tmp_path, convert, size, vocabulary, capsys):
    first = write_jsonl(tmp_path / "b.jsonl", [*DOCUMENTS[:1], "", *DOCUMENTS[1:2]])
    second = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[2:])
    assert convert(first, second, "--vocab-size", size) == 0
    tokenizer, found = read_tokenizer(vocabulary), []
    for name in ("train_000000.bin", "val_000000.bin"):
        stream = Shard(tmp_path / "out" / name)[:]
        for part in np.split(stream, np.flatnonzero(stream == tokenizer.eot_token))[1:]:
            found.append(tokenizer.decode(part[1:].tolist()))
    order = {text: sha256(encode(text, tokenizer).data).hexdigest() for text in DOCUMENTS}
    held_out = {text: sha256(text.encode()).hexdigest() < "8" for text in DOCUMENTS}
    assert found == sorted(DOCUMENTS, key=lambda text: (held_out[text], order[text]))
    assert convert(first) == 2
    assert "out exists: give another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "vocabulary", "limit"), [(2048, PROSE, 1250), (50257, CODE, 8000)]
)
def test_a_long_document_is_cut_and_all_of_its_text_is_in_one_shard(
    tmp_path, convert, size, vocabulary, limit
):
    songs = [[f"{n} bottles, song {song}\n" for n in range(1, 800)] for song in range(8)]
    blank = " " * 1_000_000  # whole, the vocabulary's pattern would overflow the stack
    source = write_jsonl(tmp_path / "a.jsonl", [*map("".join, songs), blank])
    assert convert(source, "--vocab-size", size) == 0
    tokenizer, shards = read_tokenizer(vocabulary), []
    for path in (tmp_path / "out").iterdir():
        stream, lines = Shard(path)[:], []
        for part in np.split(stream, np.flatnonzero(stream == tokenizer.eot_token))[1:]:
            text = tokenizer.decode(part[1:].tolist())
            assert len(text) <= limit
            lines += [line for line in text.splitlines(keepends=True) if line.strip()]
        shards.append({*lines})
    assert all(shards)
    for song in songs:
        assert [lines >= {*song} for lines in shards].count(True) == 1
        assert [lines.isdisjoint(song) for lines in shards].count(True) == 1


def test_a_part_of_documents_of_both_shards_is_trained_on_in_any_order_of_the_rows(
    tmp_path, convert
):
    licence = "".join(f"line {n} of a licence, word for word\n" for n in range(60))
    texts, found = [licence + f"\nthe text of file {n}\n" * 9 for n in range(60)], []
    for number, order in enumerate((texts, texts[::-1])):
        source = write_jsonl(tmp_path / f"{number}.jsonl", order)
        assert convert(source, "--vocab-size", 2048) == 0
        out = (tmp_path / "out").rename(tmp_path / f"out_{number}")
        found.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert found[0] == found[1]
    texts = {path.name: read_tokenizer(PROSE).decode(Shard(path)[:].tolist())
             for path in out.iterdir()}  # fmt: skip
    shared = [text.count("line 5 of a licence") for _, text in sorted(texts.items())]
    assert shared == [1, 0], "once, to train on"


@pytest.mark.parametrize(
    "line", [b'{"text": "cut', b'{"text": "\xff"}', b'{"txt": "x"}', b'{"text": 5}', b"[" * 90_000]
)
def test_a_bad_line_is_named_and_leaves_no_shard(tmp_path, convert, capsys, line):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "' + b"a" * 99 + b'"}\n' + line + b"\n")
    assert convert(source) == 2
    assert f'{source}: row 2 is no JSON with a string in "text"' in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", [b"aGk=", b"<<<<<<< HEAD", b"aGk 7"])
def test_a_damaged_vocabulary_is_named_with_the_fix(tmp_path, line):
    (tmp_path / "damaged.tiktoken").write_bytes(CODE.read_bytes() + line)
    with pytest.raises(ValueError, match=r"vocabulary .*damaged\.tiktoken: .*restore the file"):
        read_tokenizer(tmp_path / "damaged.tiktoken")


def test_documents_that_leave_a_shard_empty_are_refused(tmp_path, convert, capsys):
    assert convert(write_jsonl(tmp_path / "in.jsonl", ["short"])) == 2
    assert "one document in 16 is for validation. Give more." in capsys.readouterr().err
