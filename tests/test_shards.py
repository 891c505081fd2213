"""Shards: their format against bytes written by hand, how runs find them, and their audit."""

import errno
import hashlib
import os
import shlex
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.loader import Data, Reading
from data.shards import PREFIX, Shard, ShardError, audit, find_shards, write_shard

pytestmark = pytest.mark.core

ROOT = Path(__file__).resolve().parents[1]
MAGIC, VERSION = 20240520, 1


def shard_bytes(tokens, magic=MAGIC, version=VERSION, claimed=None):
    count = len(tokens) if claimed is None else claimed
    header = struct.pack("<256i", magic, version, count, *[0] * 253)
    return header + struct.pack(f"<{len(tokens)}H", *tokens)


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, ">u2"])
@given(st.lists(st.integers(0, 65535), min_size=1, max_size=30), st.data())
@settings(max_examples=30, deadline=None)
def test_tokens_are_written_in_public_format_and_slices_are_those_of_a_list(dtype, tokens, data):
    bound = st.none() | st.integers(-40, 40)
    where = slice(data.draw(bound), data.draw(bound))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.bin")
        write_shard(path, np.array(tokens, dtype=dtype))
        assert path.read_bytes() == shard_bytes(tokens)
        shard = Shard(path)
        assert len(shard) == len(tokens)
        assert shard[:].dtype == np.uint16
        assert shard[where].tolist() == tokens[where]


@pytest.mark.parametrize("tokens", [
    [1, 65536], [1, -1], [], [1.0, 2.0], [[1, 2], [3, 4]], np.broadcast_to(np.uint16(0), 2**31),
], ids=str)  # fmt: skip
def test_tokens_that_do_not_fit_are_refused_and_leave_no_file(tmp_path, tokens):
    with pytest.raises(ShardError, match=r"a\.bin: a shard holds .* integers from 0 to 65535"):
        write_shard(tmp_path / "a.bin", tokens)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_shard_and_no_partial_file(tmp_path, monkeypatch):
    def full_disk(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_shard(tmp_path / "a.bin", [1, 2, 3])
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "a.bin", [4, 5, 6, 7])
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]
    assert Shard(tmp_path / "a.bin")[:].tolist() == [1, 2, 3]


# ---- files that are no shards


@pytest.mark.parametrize(("content", "message"), [
    (b"", "starts with 0, 0; a token shard starts with 20240520, 1"),
    (shard_bytes([1, 2])[:11], "2 tokens take 1,028 bytes; the file has 11"),
    (shard_bytes([1, 2], version=2), "starts with 20240520, 2; a token shard"),
    (shard_bytes([1, 2, 3], claimed=2), "2 tokens take 1,028 bytes; the file has 1,030"),
])  # fmt: skip
def test_a_bad_file_is_refused_with_its_name_the_value_and_the_fix(tmp_path, content, message):
    path = tmp_path / "bad.bin"
    path.write_bytes(content)
    with pytest.raises(ShardError, match=rf"bad\.bin: .*{message}.* Delete the file and fetch"):
        Shard(path)


@pytest.mark.parametrize("kind", ["nanoGPT", "llm.c", "NumPy"])
def test_the_command_that_an_error_gives_makes_a_shard_of_a_foreign_token_file(tmp_path, kind):
    tokens, path = np.arange(100, 1400, dtype="u2"), tmp_path / "foreign train.bin"
    if kind == "nanoGPT":
        tokens.tofile(path)
    elif kind == "llm.c":  # version 7
        header = np.zeros(256, "i4")
        header[:3] = 20240801, 7, len(tokens)
        path.write_bytes(header.tobytes() + tokens.astype("u4").tobytes())
    else:
        with path.open("wb") as file:
            np.save(file, tokens)
    with pytest.raises(ShardError) as caught:
        Shard(path)
    command = str(caught.value).partition("repository: python ")[2]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, *shlex.split(command)]
    subprocess.run(words, cwd=tmp_path, env=env, check=True)
    assert np.array_equal(Shard(tmp_path / "train_000000.bin")[:], tokens)


# ---- the shards of a run, and their audit

BOS, VOCAB = 9, 10
SETTINGS = {
    "track": "short", "vocab_size": VOCAB, "bos": BOS, "document_mask": True, "seq_len": 16,
    "micro_batch": 64, "val_tokens": 64, "val_seq_len": 16, "val_batch": 16, "val_sha256": "",
}  # fmt: skip


def test_a_split_is_found_by_a_whole_word_of_the_file_name(tmp_path):
    names = ["fineweb_val_000000.bin", "retrieval_train_000000.bin", "train_000001.bin"]
    for name in names:
        (tmp_path / name).touch()
    found = {split: [path.name for path in find_shards({"data_dir": tmp_path}, split)]
             for split in ("val", "train")}  # fmt: skip
    assert found == {"val": names[:1], "train": names[1:]}


def write_run(folder, **splits):
    """Write shards of these lists of documents for each split; return the settings of a run."""
    folder.mkdir(exist_ok=True)
    for split, shards in splits.items():
        for index, documents in enumerate(shards):
            tokens = np.concatenate([[BOS, *document] for document in documents])
            write_shard(folder / f"mine_{split}_{index}.bin", tokens)
    return SETTINGS | {"data_dir": str(folder)}


def text(seed, length=PREFIX):
    return np.random.default_rng(seed).integers(0, BOS, length).tolist()


def overlap_by_loop(train, val):
    """Share of the long enough validation documents whose prefix begins a training document."""
    known = [[BOS, *document][:PREFIX] for document in train if len(document) + 1 >= PREFIX]
    counted = [[BOS, *document][:PREFIX] for document in val if len(document) + 1 >= PREFIX]
    return sum(prefix in known for prefix in counted) / len(counted) if counted else None


@settings(max_examples=25)
@given(
    train=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 80)), min_size=2, max_size=8),
    val=st.lists(st.tuples(st.integers(2, 7), st.integers(0, 80)), min_size=1, max_size=8),
    cut=st.integers(1, 7),
)
def test_overlap_is_what_a_loop_over_documents_counts(tmp_path_factory, train, val, cut):
    folder = tmp_path_factory.mktemp("shards")
    train = [text(seed, length) for seed, length in train]
    val = [text(seed, length) for seed, length in val]
    found = audit(write_run(folder, train=[train[:cut], train[cut:] or train[:1]], val=[val]), 2)
    assert found["overlap"] == pytest.approx(overlap_by_loop(train, val))


@pytest.fixture
def run(tmp_path):
    train = [[text(10 * index + k, 30) for k in range(20)] for index in range(3)]
    folder = tmp_path / "data [v1]"  # characters that a pattern would interpret
    return write_run(folder, train=train, val=[[text(5, 100)]])


def test_the_audit_covers_the_shards_that_the_steps_read_and_no_others(run, tmp_path):
    files = sorted((tmp_path / "data [v1]").glob("*train*"))
    for steps, shards in ((2, 1), (3, 2)):
        data = Data(run | {"steps": steps}, [Reading(0, 64, 16)], 0)
        assert data.train.end.shard == shards - 1
        tokens = b"".join(file.read_bytes()[1024:] for file in files[:shards])
        assert audit(run, shards)["train_sha256"] == hashlib.sha256(tokens).hexdigest()


def test_validation_data_other_than_the_targets_are_refused_with_the_command_that_makes_them(run):
    found = audit(run, 1)["val_sha256"]
    audit(run | {"val_sha256": found[:16]}, 1)
    what = rf"have SHA-256 {found}; the target holds for 0123.*\./run\.sh --track"
    with pytest.raises(ShardError, match=what):
        audit(run | {"val_sha256": "0123"}, 1)
