"""The audit of a run's data: overlap, hashes, bad tokens, and errors that name a command."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.audit import PREFIX, audit, open_audited
from data.shards import ShardError, write_shard

BOS, VOCAB = 9, 10


def shard(path, documents):
    write_shard(path, np.concatenate([[BOS, *document] for document in documents]))
    return path


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
    parts = [train[:cut], train[cut:] or train[:1]]
    files = [shard(folder / f"train_{index}.bin", part) for index, part in enumerate(parts)]
    found = audit(files, [shard(folder / "val_0.bin", val)], VOCAB, BOS, "")["overlap"]
    assert found == pytest.approx(overlap_by_loop(train, val))


def test_a_token_beyond_the_vocabulary_is_named_with_its_file_and_place(tmp_path):
    good = shard(tmp_path / "good.bin", [text(0, 90)])
    bad = shard(tmp_path / "bad.bin", [[*text(1, 70), VOCAB + 5, *text(2, 9)]])
    for train, val in ((bad, good), (good, bad)):
        with pytest.raises(ShardError, match=r"bad\.bin: token 71 is 15; .* has 10 tokens"):
            audit([train], [val], VOCAB, BOS, "")


# ---- opening a run's data

SETTINGS = {
    "track": "short", "vocab_size": VOCAB, "bos": BOS, "document_mask": True, "batch_tokens": 64,
    "seq_len": 16, "max_document": 16, "micro_batch": None, "steps": 3, "val_tokens": 64,
    "val_seq_len": 16, "val_batch": 16, "val_sha256": "",
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "data [v1]"  # characters that a pattern would interpret
    folder.mkdir()
    for index in range(3):
        documents = [text(10 * index + k, 30) for k in range(20)]
        shard(folder / f"mine_train_{index}.bin", documents)
    shard(folder / "mine_val_0.bin", [text(5, 100)])
    return SETTINGS | {"data_dir": str(folder)}


def test_the_audit_covers_the_shards_that_the_steps_read_and_no_others(run, tmp_path):
    files = sorted((tmp_path / "data [v1]").glob("*train*"))
    for steps, shards in ((2, 1), (3, 2)):
        data, found = open_audited(run | {"steps": steps}, (), 0, 0, 1, audited=True)
        assert data.plan.end.shard == shards - 1
        tokens = b"".join(file.read_bytes()[1024:] for file in files[:shards])
        assert found["train_sha256"] == hashlib.sha256(tokens).hexdigest()
    assert open_audited(run, (), 0, 1, 2, audited=False)[1] is None


def test_validation_data_other_than_the_targets_are_refused_with_the_command_that_makes_them(run):
    found = open_audited(run, (), 0, 0, 1, audited=True)[1]["val_sha256"]
    open_audited(run | {"val_sha256": found[:16]}, (), 0, 0, 1, audited=True)
    fix = r"2\.0 GB: \./run\.sh --track short$"
    with pytest.raises(ShardError, match=f"have SHA-256 {found}; the target holds for 0123.*{fix}"):
        open_audited(run | {"val_sha256": "0123"}, (), 0, 0, 1, audited=True)
