"""The audit of a run's data: what validation shares with training, and tokens that the vocabulary does not have."""

import hashlib
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.audit import PREFIX, audit
from data.shards import ShardError, write_shard

BOS, VOCAB = 9, 10


def shard(path, documents):
    write_shard(path, np.concatenate([[BOS, *document] for document in documents]))
    return path


def text(seed, length=PREFIX):
    return np.random.default_rng(seed).integers(0, BOS, length).tolist()


def overlap_by_loop(train, val):
    """Share of the validation documents of PREFIX tokens or more, BOS included, whose prefix begins a training one."""
    known = [[BOS, *document][:PREFIX] for document in train if len(document) + 1 >= PREFIX]
    counted = [[BOS, *document][:PREFIX] for document in val if len(document) + 1 >= PREFIX]
    return sum(prefix in known for prefix in counted) / len(counted) if counted else None


@settings(max_examples=25)
@given(
    train=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 80)), min_size=2, max_size=8),
    val=st.lists(st.tuples(st.integers(2, 7), st.integers(0, 80)), min_size=2, max_size=8),
    cut=st.integers(1, 7),
)
def test_overlap_is_what_a_loop_over_documents_counts(tmp_path_factory, train, val, cut):
    folder = tmp_path_factory.mktemp("shards")
    long = text(100, 2 * PREFIX)  # keeps every shard longer than a prefix
    train, val = ([text(seed, length) for seed, length in documents] for documents in (train, val))
    parts = [train[:cut], train[cut:] or train[:1]]
    train_files = [shard(folder / f"train_{i}.bin", [*part, long]) for i, part in enumerate(parts)]
    val_files = [shard(folder / "val_0.bin", [*val, text(200, 70)])]
    found = audit(train_files, val_files, VOCAB, BOS)["overlap"]
    assert found == pytest.approx(overlap_by_loop([*train, long], [*val, text(200, 70)]))


def test_overlap_of_known_documents(tmp_path):
    same, other = text(0, 90), text(1, 90)
    changed_late, changed_early = same[: PREFIX - 1] + [0] * 20, [(same[0] + 1) % BOS, *same[1:]]
    train = [shard(tmp_path / "train_0.bin", [same, text(2, 90)])]
    for val, expected in (([same], 1), ([other], 0), ([changed_late], 1), ([changed_early], 0), ([same, other], 0.5)):
        assert audit(train, [shard(tmp_path / "val.bin", val)], VOCAB, BOS)["overlap"] == expected


def test_documents_shorter_than_a_prefix_do_not_count_and_without_others_there_is_no_overlap(tmp_path):
    train = [shard(tmp_path / "train.bin", [text(0, 90)])]
    short = [text(0, PREFIX - 2), text(1, 3), text(2, 5)]
    assert audit(train, [shard(tmp_path / "val.bin", short)], VOCAB, BOS)["overlap"] is None


def test_a_shard_shorter_than_a_prefix_is_audited_like_any_other(tmp_path):
    train = [shard(tmp_path / "train.bin", [text(0, 90)]), shard(tmp_path / "train_1.bin", [text(1, 5)])]
    assert audit(train, [shard(tmp_path / "val.bin", [text(0, 90)])], VOCAB, BOS)["overlap"] == 1


def test_the_hash_is_that_of_all_tokens_in_the_order_of_the_files(tmp_path):
    documents = [text(0, 70), text(1, 80)]
    files = [shard(tmp_path / f"{i}.bin", [document]) for i, document in enumerate(documents)]
    stream = np.concatenate([[BOS, *document] for document in documents]).astype("<u2").tobytes()
    said = audit(files, files[:1], VOCAB, BOS)
    assert said["train_sha256"] == hashlib.sha256(stream).hexdigest()
    assert said["val_sha256"] == hashlib.sha256(stream[: 2 * 71]).hexdigest()


@pytest.mark.parametrize("where", ["train", "val"])
def test_a_token_beyond_the_vocabulary_is_named_with_its_file_and_place(tmp_path, where):
    good = shard(tmp_path / "good.bin", [text(0, 90)])
    bad = shard(tmp_path / "bad.bin", [[*text(1, 70), VOCAB + 5, *text(2, 9)]])
    train, val = ([bad], [good]) if where == "train" else ([good], [bad])
    with pytest.raises(ShardError, match=r"bad\.bin: token 71 is 15; the vocabulary has 10 tokens"):
        audit(train, val, VOCAB, BOS)


@pytest.mark.parametrize("reads", [1, 2, 3])
def test_a_shard_cut_in_the_audit_is_named(tmp_path, monkeypatch, reads):
    """Each shard is read three times: for its tokens, its hash and its documents."""
    train, val = (shard(tmp_path / f"{name}.bin", [text(0, 90)]) for name in ("train", "val"))
    pread, seen = os.pread, []

    def cut_then_read(descriptor, count, offset):
        if offset >= 1024 and os.path.samestat(os.fstat(descriptor), val.stat()):
            seen.append(offset)
            if len(seen) == reads:
                os.truncate(val, 1030)
        return pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", cut_then_read)
    with pytest.raises(ShardError, match=r"val\.bin: tokens 0 to 91 .*has 1,030 bytes and had 1,206"):
        audit([train], [val], VOCAB, BOS)


def test_a_missing_shard_is_named(tmp_path):
    good = shard(tmp_path / "good.bin", [text(0, 90)])
    with pytest.raises(ShardError, match=r"gone\.bin: no such file"):
        audit([good], [tmp_path / "gone.bin"], VOCAB, BOS)


def test_validation_data_other_than_the_targets_are_refused(tmp_path):
    for name in ("train", "val"):
        write_shard(tmp_path / f"{name}.bin", np.arange(10))
    files = [tmp_path / "train.bin"], [tmp_path / "val.bin"]
    found = audit(*files, 10, 9)["val_sha256"]
    assert audit(*files, 10, 9, found[:16])["val_sha256"] == found
    with pytest.raises(ShardError, match=f"have SHA-256 {found}, but the target holds for 0123"):
        audit(*files, 10, 9, "0123")
