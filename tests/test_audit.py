"""The audit of a run's data: overlap, hashes, bad tokens, and errors that name a command."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.loader import Data, Reading
from data.shards import PREFIX, ShardError, audit, find_shards, write_shard

BOS, VOCAB = 9, 10
SETTINGS = {
    "track": "short", "vocab_size": VOCAB, "bos": BOS, "document_mask": True, "seq_len": 16,
    "micro_batch": 64, "val_tokens": 64, "val_seq_len": 16, "val_batch": 16,
    "val_sha256": "",
}  # fmt: skip


def write(folder, **splits):
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
    found = audit(write(folder, train=[train[:cut], train[cut:] or train[:1]], val=[val]), 2)
    assert found["overlap"] == pytest.approx(overlap_by_loop(train, val))


def test_a_split_is_found_by_a_whole_word_of_the_file_name(tmp_path):
    names = ["fineweb_val_000000.bin", "retrieval_train_000000.bin", "train_000001.bin"]
    for name in names:
        (tmp_path / name).touch()
    found = {split: [path.name for path in find_shards({"data_dir": tmp_path}, split)]
             for split in ("val", "train")}  # fmt: skip
    assert found == {"val": names[:1], "train": names[1:]}


def test_a_token_beyond_the_vocabulary_is_named_with_its_file_and_place(tmp_path):
    splits = {"train": [[text(0, 90)]], "val": [[text(0, 90)]]}
    bad = [[*text(1, 70), VOCAB + 5, *text(2, 9)]]
    for split in splits:
        settings = write(tmp_path / split, **splits | {split: [bad]})
        with pytest.raises(ShardError, match=rf"{split}_0\.bin: token 71 is 15; .* has 10 tokens"):
            audit(settings, 1)


@pytest.fixture
def run(tmp_path):
    train = [[text(10 * index + k, 30) for k in range(20)] for index in range(3)]
    folder = tmp_path / "data [v1]"  # characters that a pattern would interpret
    return write(folder, train=train, val=[[text(5, 100)]])


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
