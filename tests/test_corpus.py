"""The embedded corpus: the same bytes everywhere, an honest split, and a tokenizer that says what was written."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from data import corpus
from data.shards import open_shard

ROOT = Path(__file__).parent.parent
SMALL = {"mpmath": corpus.PACKAGES["mpmath"]}
MEASURED_OVERLAP = 0.01826  # share of validation windows that also stand in training, as printed by the build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embedded") / "corpus"
    corpus.build(directory)
    return directory


@pytest.fixture(scope="session")
def sources() -> list[corpus.SourceFile]:
    return corpus.read_sources()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    corpus.build(directory, vocab_size=300, packages=SMALL)
    return directory


def documents_of(shard: Path, tokenizer: tiktoken.Encoding) -> list[str]:
    tokens = open_shard(shard)[:]
    starts = np.flatnonzero(tokens == tokenizer.eot_token)
    assert starts[0] == 0
    return [tokenizer.decode(part[1:].tolist()) for part in np.split(tokens, starts[1:])]


# ---- the same bytes everywhere


def test_built_files_have_the_pinned_hashes(built: Path):
    found = {
        path.name: sha256(path.read_bytes()).hexdigest() for path in built.iterdir() if path.name != corpus.MANIFEST
    }
    assert found == {name: digest for name, digest in corpus.PINS.items() if name != "source"}
    assert json.loads((built / corpus.MANIFEST).read_text())["sha256"] == corpus.PINS


def test_hash_seed_locale_and_folder_order_leave_no_trace(small: Path, tmp_path: Path):
    program = (
        "import sys, pathlib; from data import corpus\n"
        "rglob = pathlib.Path.rglob\n"
        "pathlib.Path.rglob = lambda self, pattern: reversed(list(rglob(self, pattern)))\n"
        f"corpus.build(sys.argv[1], vocab_size=300, packages={SMALL!r})"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345", "LC_ALL": "C", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", program, tmp_path], cwd=ROOT, env=environment, check=True)
    for name in (corpus.TRAIN, corpus.VAL, corpus.VOCAB, corpus.MANIFEST):
        assert (tmp_path / name).read_bytes() == (small / name).read_bytes(), name


def test_a_second_build_changes_nothing_and_reads_no_package(built: Path, monkeypatch: pytest.MonkeyPatch):
    before = {path.name: path.stat().st_mtime_ns for path in built.iterdir()}
    monkeypatch.setattr(corpus, "read_sources", lambda packages: pytest.fail("read the packages again"))
    manifest = corpus.build(built)
    assert manifest == json.loads((built / "corpus.json").read_text())
    assert {path.name: path.stat().st_mtime_ns for path in built.iterdir()} == before


@pytest.mark.parametrize("name", [corpus.TRAIN, corpus.VAL, corpus.VOCAB, corpus.MANIFEST])
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"{")])
def test_a_missing_or_damaged_file_is_built_again(name: str, damage, small: Path, tmp_path: Path):
    directory = Path(shutil.copytree(small, tmp_path / "corpus"))
    damage(directory / name)
    corpus.build(directory, vocab_size=300, packages=SMALL)
    assert (directory / name).read_bytes() == (small / name).read_bytes()


def test_another_vocabulary_size_is_built_anew(small: Path, tmp_path: Path):
    directory = Path(shutil.copytree(small, tmp_path / "corpus"))
    assert corpus.build(directory, vocab_size=290, packages=SMALL)["vocab_size"] == 290
    assert corpus.encoding(directory).n_vocab == 290


# ---- bad input


def test_another_package_version_is_an_error_that_names_both_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "3.4.2" if name == "networkx" else version(name))
    assert corpus.main(["--out", str(tmp_path / "corpus")]) == 2
    error = capsys.readouterr().err
    for part in ("networkx 3.4.2", "networkx 3.6.1", "python -m pip install networkx==3.6.1"):
        assert part in error
    assert not (tmp_path / "corpus").exists()


def test_a_missing_package_is_an_error_that_names_it():
    with pytest.raises(corpus.CorpusError, match=r"no-such-text is not installed.*no-such-text==1\.0"):
        corpus.read_sources({"no-such-text": "1.0"})


@pytest.mark.parametrize(("name", "advice"), [("source", "--force-reinstall"), (corpus.VAL, "tiktoken")])
def test_a_wrong_hash_is_an_error_with_both_hashes_and_leaves_no_file(
    name: str, advice: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = json.loads((small / corpus.MANIFEST).read_text())["sha256"]
    monkeypatch.setattr(corpus, "PACKAGES", SMALL)
    monkeypatch.setattr(corpus, "VOCAB_SIZE", 300)
    monkeypatch.setattr(corpus, "PINS", found | {name: "0" * 64})
    with pytest.raises(corpus.CorpusError, match=f"{name}.*{found[name]}.*{'0' * 64}.*{advice}"):
        corpus.build(tmp_path, 300, SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("size", "reason"), [(200, "need 257"), (100_000, "the text yields")])
def test_a_vocabulary_that_cannot_be_learned_is_an_error(size: int, reason: str, tmp_path: Path):
    with pytest.raises(corpus.CorpusError, match=f"{size:,} tokens were asked for.*{reason}"):
        corpus.train_bpe(["some text"], size - 1)


# ---- the split


def test_every_file_is_whole_in_the_split_that_its_hash_says(built: Path, sources: list[corpus.SourceFile]):
    tokenizer = corpus.encoding(built)
    left_out = json.loads((built / corpus.MANIFEST).read_text())["near_duplicates"]
    train = "".join(documents_of(built / corpus.TRAIN, tokenizer))
    val = "".join(documents_of(built / corpus.VAL, tokenizer))
    assert train == "".join(file.text for file in sources if file.digest[0] >= 16)
    assert val == "".join(file.text for file in sources if file.digest[0] < 16 and file.name not in left_out)
    assert [len(file.digest) for file in sources] == [32] * len(sources)
    assert sources == sorted(sources, key=lambda file: file.digest)


@pytest.fixture(scope="session")
def seen_windows(built: Path) -> set[bytes]:
    """Every run of 50 tokens of validation that also stands in training, by comparing the tokens themselves."""
    wanted = set(raw_windows(built / corpus.VAL))
    return {window for window in raw_windows(built / corpus.TRAIN) if window in wanted}


def raw_windows(shard: Path):
    tokens = open_shard(shard)[:]
    raw = tokens[tokens != 1023].tobytes()
    return (raw[start : start + 100] for start in range(0, len(raw) - 99, 2))


def test_few_validation_windows_stand_in_training(built: Path, seen_windows: set[bytes]):
    share = float(np.mean([window in seen_windows for window in raw_windows(built / corpus.VAL)]))
    assert share <= MEASURED_OVERLAP
    assert share == pytest.approx(json.loads((built / corpus.MANIFEST).read_text())["val_overlap"], rel=0.02)


def test_no_validation_file_is_a_near_duplicate_and_every_one_left_out_is(
    built: Path, sources: list[corpus.SourceFile], seen_windows: set[bytes]
):
    tokenizer = corpus.encoding(built)
    manifest = json.loads((built / corpus.MANIFEST).read_text())
    kept = [file for file in sources if file.is_validation and file.name not in manifest["near_duplicates"]]
    assert len(kept) == manifest["files"]["val"]
    for tokens in corpus.encode_files(kept, tokenizer):
        raw = tokens[tokens != tokenizer.eot_token].tobytes()
        hits = [raw[start : start + 100] in seen_windows for start in range(0, len(raw) - 99, 2)]
        assert np.mean(hits or [0]) <= 0.25
    assert all(share > 0.25 for share in manifest["near_duplicates"].values())


def test_a_validation_file_copied_from_training_is_left_out(small: Path):
    tokenizer = corpus.encoding(small)
    files = corpus.read_sources(SMALL)
    train, other = files[5:], files[:4]
    copy = corpus.SourceFile("copy.py", train[3].text.replace("def ", "def my_", 1), b"\0")
    encoded = corpus.encode_files([*other, copy], tokenizer)
    training = np.concatenate(corpus.encode_files(train, tokenizer))
    screening = corpus.screen_validation([*other, copy], encoded, training, tokenizer.eot_token)
    assert list(screening.near_duplicates) == ["copy.py"]
    assert screening.kept == [0, 1, 2, 3]


@given(st.lists(st.integers(0, 2), max_size=130))
def test_window_hashes_agree_exactly_when_the_windows_do(tokens: list[int]):
    hashes = corpus.window_hashes(np.array(tokens, dtype=np.uint16), end_of_text=2).tolist()
    text = [token for token in tokens if token != 2]
    windows = [tuple(text[start : start + 50]) for start in range(len(text) - 49)]
    assert len(hashes) == len(windows)
    assert len(set(zip(hashes, windows, strict=True))) == len(set(hashes)) == len(set(windows))


# ---- documents


code_like = st.lists(st.sampled_from(["\n", "\n\n", "    ", "def f():", "x = 1", "é\r", "\t"])).map("".join)


@given(code_like, st.integers(2, 40))
def test_documents_are_the_text_in_pieces_no_longer_than_the_limit(text: str, limit: int):
    documents = corpus.split_documents(text, limit)
    assert "".join(documents) == text
    assert all(len(document) <= limit for document in documents)
    assert all(len(document) >= limit // 2 for document in documents[:-1])


def test_a_document_ends_before_a_top_level_block_if_it_can():
    method = "    def f(self):\n        return 1\n\n"
    text = "import a\n\nclass A:\n\n" + method * 2 + "def g():\n    return 2\n\n" + method * 4
    first, second, *_ = corpus.split_documents(text, 150)
    assert second.startswith("def g()")
    assert corpus.split_documents("class A:\n\n" + method * 9, 150)[1].startswith("    def f")
    assert corpus.split_documents("x = 1\n" * 99, 150)[1].startswith("x = 1\n")
    assert first.endswith("\n\n")


def test_most_training_documents_fit_in_512_tokens(built: Path):
    tokens = open_shard(built / corpus.TRAIN)[:]
    lengths = np.diff(np.append(np.flatnonzero(tokens == 1023), tokens.size))
    assert np.minimum(lengths, 512).sum() > 0.98 * tokens.size


# ---- the tokenizer


def naive_bpe(text: str, size: int) -> list[bytes]:
    """Byte-level BPE by recounting everything before each merge."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = Counter(re.findall(corpus.PATTERN, text))
    splits = {word: [tokens[byte] for byte in word.encode()] for word in words}
    while len(tokens) < size:
        counts: Counter = Counter()
        for word, parts in splits.items():
            for pair in pairwise(parts):
                counts[pair] += words[word]
        if not counts:
            break
        left, right = min(counts, key=lambda pair: (-counts[pair], tokens.index(pair[0]), tokens.index(pair[1])))
        if left + right not in tokens:
            tokens.append(left + right)
        for parts in splits.values():
            position = 0
            while position < len(parts) - 1:
                if parts[position] == left and parts[position + 1] == right:
                    parts[position : position + 2] = [left + right]
                position += 1
    return tokens


@given(st.text(alphabet="aab b\né1_", max_size=120), st.integers(0, 25))
def test_fast_bpe_learns_what_naive_bpe_learns(text: str, merges: int):
    expected = naive_bpe(text, 256 + merges)
    if len(expected) < 256 + merges:
        with pytest.raises(corpus.CorpusError, match="the text yields"):
            corpus.train_bpe([text], 256 + merges)
    ranks = corpus.train_bpe([text], len(expected))
    assert list(ranks) == expected
    assert list(ranks.values()) == list(range(len(expected)))


def test_fast_bpe_learns_what_naive_bpe_learns_from_real_code():
    text = Path(corpus.__file__).read_text(encoding="utf-8")[:6000]
    assert list(corpus.train_bpe([text], 400)) == naive_bpe(text, 400)


@given(text=st.text())
def test_any_text_survives_the_tokenizer(text: str, built: Path):
    tokenizer = corpus.encoding(built)
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text


def test_end_of_text_is_the_last_id_and_is_never_made_from_text(built: Path):
    tokenizer = corpus.encoding(built)
    assert tokenizer.n_vocab == 1024
    assert tokenizer.encode("<|endoftext|>", allowed_special="all") == [1023]
    assert 1023 not in tokenizer.encode_ordinary("a<|endoftext|>b")
    assert open_shard(built / corpus.TRAIN)[:].max() == 1023


def test_manifest_counts_what_the_shards_hold(built: Path):
    manifest = json.loads((built / corpus.MANIFEST).read_text())
    tokenizer = corpus.encoding(built)
    for split, name in (("train", corpus.TRAIN), ("val", corpus.VAL)):
        assert manifest["tokens"][split] == len(open_shard(built / name))
        assert manifest["bytes"][split] == sum(len(text.encode()) for text in documents_of(built / name, tokenizer))
