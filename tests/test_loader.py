"""The loader against a reference on plain lists: rows, boundaries, positions, plans and errors."""

import hashlib
import json
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import loader
from data.copied import pair_distances
from data.loader import Data, Order, Reading, TrainLoader, validation_batches
from data.shards import Shard, ShardError, write_shard

pytestmark = pytest.mark.core

BOS = 0


examples = settings(max_examples=50, deadline=None)


def order_of(*readings, seq_len=8, bos=BOS):
    return Order(seq_len, bos, [Reading(*each) for each in readings])


ORDER = order_of((0, 32, 6))


# ---- The reference has no offsets or ranks; a row is (its tokens, lengths of its documents)


def slow_steps(shards, order):
    return (slow_dense_steps if order.bos is None else slow_aligned_steps)(shards, order)


def slow_aligned_steps(shards, order):
    steps, sequence = [], order.seq_len
    for shard in shards:
        documents = []
        for token in shard:
            if token == BOS:
                documents.append([])
            if documents:
                documents[-1].append(token)
        while documents:
            step, (rows, cut) = [], rows_at(order, len(steps))
            for _ in range(rows):
                row, lengths = [], []
                while documents and len(row) < sequence + 1:
                    piece = documents.pop(0)[:cut][: sequence + 1 - len(row)]
                    row += piece
                    lengths.append(len(piece))
                if len(row) == sequence + 1:
                    lengths[-1] -= 1
                    step.append((row, [length for length in lengths if length]))
            if len(step) == rows:
                steps.append(step)
    return steps


def rows_at(order, step):
    """Rows of a step and its longest document: those of the last reading that begins before it."""
    _, tokens, cut = [each for each in order.readings if each.first <= step][-1]
    return tokens // order.seq_len, cut


def slow_dense_steps(shards, order):
    steps, sequence = [], order.seq_len
    for shard in shards:
        shard = list(shard)
        while len(shard) >= (rows := rows_at(order, len(steps))[0]) * sequence + 1:
            starts = range(0, rows * sequence, sequence)
            steps.append([(shard[start : start + sequence + 1], [sequence]) for start in starts])
            shard = shard[rows * sequence :]
    return steps


def rows_of(batches):
    """(tokens, lengths of documents) for each row of these batches, from their tensors alone."""
    rows = []
    for batch in batches:
        count, sequence = batch.inputs.shape
        ends = batch.cu_seqlens.tolist()
        starts = [end for end in ends if end < count * sequence]
        assert ends == sorted(set(starts)) + [count * sequence] * (len(ends) - len(starts))
        assert ends[0] == 0
        assert ends[-1] == count * sequence
        for k in range(count):
            inside = [end for end in ends if k * sequence <= end <= (k + 1) * sequence]
            lengths = [int(length) for length in np.diff(inside) if length]
            assert sum(lengths) == sequence  # so every row start is a boundary
            inputs, targets = batch.inputs[k].tolist(), batch.targets[k].tolist()
            assert inputs[1:] == targets[:-1]
            rows.append((inputs + targets[-1:], lengths))
    return rows


def remaining_steps(loader):
    steps = []
    try:
        while True:
            steps.append(rows_of(next(loader)))
    except ShardError:
        return steps


def joined(lists):
    return list(chain.from_iterable(lists))


# ---- data


def shard_of(lengths, before=0):
    """Documents of these lengths after `before` stray tokens; no two tokens are alike but BOS."""
    tokens = [*range(10_001, 10_001 + before)]
    for index, length in enumerate(lengths):
        tokens += [BOS, *range(100 * index + 1, 100 * index + length)]
    return tokens


@contextmanager
def written(shards):
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"train_{index:06d}.bin" for index in range(len(shards))]
        for file, tokens in zip(files, shards, strict=True):
            write_shard(file, tokens)
        yield files


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    files = [tmp_path / name for name in ("train_000001.bin", "train_000002.bin", "val_000000.bin")]
    for file in files:
        write_shard(file, shard_of(rng.integers(1, 20, size=60), before=3))
    return files[:2]


def make(files, order=ORDER, steps=5, rank=0, world_size=1, *micro_batch):
    return TrainLoader(files, order, steps, rank, world_size, *micro_batch)


# Few documents and many, else most examples would have no step.
lengths_strategy = st.lists(st.integers(1, 14), min_size=1, max_size=9)
lengths_strategy |= st.lists(st.integers(1, 14), min_size=40, max_size=60)
shard_strategy = st.builds(shard_of, lengths_strategy, st.integers(0, 3))
shards_strategy = st.lists(shard_strategy, min_size=1, max_size=3)


def make_order(sequence, max_document, bos, changes):
    later = [(step, rows * sequence, cut) for step, (rows, cut) in changes.items()]
    first = (0, 8 * sequence, max_document)
    return order_of(first, *sorted(later), seq_len=sequence, bos=bos)


order_strategy = st.builds(
    make_order, sequence=st.integers(1, 12), max_document=st.integers(1, 15),
    bos=st.sampled_from([BOS, None]),
    changes=st.dictionaries(
        st.integers(1, 5), st.tuples(st.sampled_from([8, 16, 24]), st.integers(1, 15)), max_size=2
    ),
)  # fmt: skip


# ---- rows


def test_a_row_by_hand(tmp_path):
    """Cut at 4 tokens, cut at the row's end, documents of one token, a piece that is a target."""
    first_row = [[0, 1, 2, 3, 4, 5], [0, 6], [0, 7, 8]]  # 4 + 2 + 1 of sequence + 1 = 7 tokens
    second_row = [[0, 9, 10], [0, 11, 12], [0, 13]]  # 3 + 3 + 1
    write_shard(tmp_path / "a.bin", [77, 78] + joined(first_row + second_row) + [0, 14])
    order = order_of((0, 12, 4), seq_len=6)
    loader = make([tmp_path / "a.bin"], order, 1)
    (batch,) = next(loader)
    assert batch.inputs.tolist() == [[0, 1, 2, 3, 0, 6], [0, 9, 10, 0, 11, 12]]
    assert [part.dtype for part in batch] == [torch.int32, torch.int64, torch.int32]
    assert batch.targets.tolist() == [[1, 2, 3, 0, 6, 0], [9, 10, 0, 11, 12, 0]]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 9] + [12] * 28
    assert loader.state_dict()["position"] == {"step": 1, "shard": 0, "offset": 2 + 11 + 8}
    other = make([tmp_path / "a.bin"], order, 1, rank=1, world_size=2)
    next(other)
    assert loader.places == other.places == {1: {"shard": "a.bin", "token_offset": 2}}


@given(shards_strategy, order_strategy, st.data())
@examples
def test_every_world_size_and_micro_batch_from_any_step_on_sees_the_rows_of_the_reference(
    shards, order, data
):
    expected = slow_steps(shards, order)
    step = data.draw(st.integers(0, len(expected)), label="step")
    with written(shards) as files:
        loader = make(files, order, len(expected))
        for _ in range(step):
            next(loader)
        state = json.loads(json.dumps(loader.state_dict()))
        remaining_steps(loader)
        for world_size in (1, 2, 4, 8):
            for micro_rows in {1, 8 // world_size}:
                ranks, rows_sum = [], 0
                for rank in range(world_size):
                    tokens = micro_rows * order.seq_len
                    resumed = make(files, order, len(expected), rank, world_size, tokens)
                    assert resumed.shares(0) == (8 // world_size // micro_rows, micro_rows)
                    if step > 0:
                        resumed.load_state_dict(state)
                    assert resumed.state_dict()["position"] == state["position"]
                    ranks.append(remaining_steps(resumed))
                    rows_sum += resumed.rows_sum
                assert [joined(parts) for parts in zip(*ranks, strict=True)] == expected[step:]
                assert rows_sum % 2**256 == loader.rows_sum % 2**256


# ---- position


def test_a_resume_on_shards_that_were_cut_anew_is_refused_and_more_shards_are_welcome(files):
    state = make(files).state_dict()
    make([*files, files[0]]).load_state_dict(state)
    tokens = np.concatenate([Shard(file)[:] for file in files])
    for file, part in zip(files, np.split(tokens, [len(tokens) // 3]), strict=True):
        write_shard(file, part)
    with pytest.raises(ShardError, match="cut elsewhere"):
        make(files).load_state_dict(state)


def test_rows_are_hashed_as_the_documentation_says(files):
    loader = make(files)
    batches = [next(loader), next(loader)]
    total = 0
    for step, micro_batches in enumerate(batches, 1):
        for place, (tokens, _) in enumerate(rows_of(micro_batches)):
            numbers = [step, place, *tokens[:-1], *tokens[1:]]
            content = b"".join(number.to_bytes(8, "little") for number in numbers)
            total += int.from_bytes(hashlib.sha256(content).digest(), "big")
    assert loader.state_dict()["rows_sha256"] == f"{total % 2**256:064x}"


def test_resetting_and_loading_drop_what_was_built_ahead(files):
    loader = make(files, order_of((0, 32, 6), (3, 64, 4)))
    start = loader.state_dict()
    first, second = rows_of(next(loader)), rows_of(next(loader))
    assert first != second
    for again in (loader.reset, lambda: loader.load_state_dict(start)):
        again()
        assert loader.state_dict() == start
        assert rows_of(next(loader)) == first
    loader.reset(3)  # the first tokens, as in a later step
    assert rows_of(next(loader)) == rows_of(next(make(files, order_of((0, 64, 4)), steps=1)))


# ---- the end of the data, and faults


@given(shards_strategy, order_strategy)
# Only warm-up has enough documents for the second stage, whose rows hold more of them.
@example([shard_of([14] * 30)], order_of((0, 16, 15), (1, 16, 1), seq_len=2))
@examples
def test_the_plan_and_the_loader_agree_on_every_number(shards, order):
    expected = slow_steps(shards, order)
    with written(shards) as files:
        loader = make(files, order, len(expected))
        for _ in expected:
            next(loader)
        assert loader.state_dict()["position"] == loader.end._asdict()
        read = [*expected]  # and what warm-up can read: the first shard, as later steps read it
        for first, *_ in order.readings[1:]:
            later = [Reading(max(begin - first, 0), *sizes) for begin, *sizes in order.readings]
            read += slow_steps(shards[:1], replace(order, readings=later))
        most = max([len(lengths) for step in read for _, lengths in step], default=0)
        assert most <= loader.max_documents <= most + 1  # the last piece may be only a target
        largest = max(each.batch_tokens for each in order.readings) // order.seq_len
        fits = sum(map(len, expected)) // largest
        fix = f"Set --steps to at most {fits:,}," if fits else "Lower --batch-tokens"
        message = f"data end after {len(expected):,} steps: .*{fix}"
        with pytest.raises(ShardError, match=message):
            make(files, order, len(expected) + 1)
        for _ in range(2):  # again and again, not once
            with pytest.raises(ShardError, match=message):
                next(loader)


# ---- validation


@given(shards_strategy, st.integers(1, 8), st.integers(1, 40), st.booleans(), st.data())
@examples
def test_validation_is_the_first_tokens_in_order_cut_at_rows_and_documents(
    shards, sequence, most, align, data
):
    stream = joined(shards)
    count = data.draw(st.integers(0, (len(stream) - 1) // sequence))
    world_size = data.draw(st.sampled_from([1, 2, 3, 5]))
    if count == 0:
        return
    values = {"val_tokens": count * sequence, "val_seq_len": sequence, "bos": BOS}
    values["document_mask"] = align
    with written(shards) as files:
        ranks = [validation_batches(files, values, max(most, sequence), 0, rank, world_size)
                 for rank in range(world_size)]  # fmt: skip
    expected = []
    for k in range(count):
        row = stream[k * sequence : (k + 1) * sequence + 1]
        starts = [0] + [place for place in range(1, sequence) if align and row[place] == BOS]
        expected.append((row, np.diff([*starts, sequence]).tolist()))
    assert joined(rows_of(batches) for batches in ranks) == expected
    per_rank = [sum(len(batch.inputs) for batch in batches) for batches in ranks]
    assert max(per_rank) - min(per_rank) <= 1
    assert per_rank[0], "rank 0 tells copied from new tokens"
    assert all(len(batch.inputs) <= max(most // sequence, 1) for batch in joined(ranks))
    assert len({len(batch.cu_seqlens) for batch in joined(ranks)}) == 1


# ---- both together

SETTINGS = {
    "track": "", "seq_len": 8, "bos": BOS, "document_mask": True, "steps": 5, "micro_batch": 64,
    "val_tokens": 64, "val_seq_len": 16, "val_batch": 32, "val_sha256": "",
}  # fmt: skip


def open_data(files, *readings, rank=1, world_size=2, **changed):
    """The data of one rank. readings: first step, tokens of a batch, longest document."""
    order = order_of(*(readings or [(0, 64, 6)]))
    values = SETTINGS | {"data_dir": files[0].parent} | changed
    return Data(values, order.readings, 0, rank, world_size)


@pytest.mark.parametrize(("micro_batch", "rows"), [
    (64, [2, 3, 4]), (32, [2, 3, 4]), (31, [2, 3, 2]), (16, [2, 1, 2]), (8, [1, 1, 1]),
])  # fmt: skip
def test_a_micro_batch_is_the_largest_equal_part_of_a_step_within_a_limit(files, micro_batch, rows):
    readings = [(0, 32, 6), (1, 48, 6), (2, 64, 6)]  # this rank has 2, 3, 4 rows of 8 tokens
    train = open_data(files, *readings, micro_batch=micro_batch).train
    for step, (owned, each) in enumerate(zip((2, 3, 4), rows, strict=True)):
        assert train.shares(step) == (owned // each, each)
        assert [len(batch.inputs) for batch in next(train)] == [each] * (owned // each)


@pytest.mark.parametrize(("align", "most"), [(True, [6, 6, 3, 3, 8]), (False, [8] * 5)])
@pytest.mark.parametrize("val_seq_len", [16, 32])
def test_the_longest_document_of_a_step_and_of_validation_is_that_of_the_rows(
    files, align, most, val_seq_len
):
    readings = [(0, 32, 6), (2, 32, 3), (4, 32, 20)]
    data = open_data(files, *readings, document_mask=align, val_seq_len=val_seq_len)
    assert [data.longest(step) for step in range(5)] == most
    handed_out = [next(data.train) for _ in range(5)]
    found = [max(length for _, lengths in rows_of(batches) for length in lengths)
             for batches in (*handed_out, data.validation)]  # fmt: skip
    assert found == [*most, data.val_longest]


# ---- the held-out slice

HELD_OUT = 192


@pytest.fixture
def race(tmp_path, monkeypatch):
    """Opens data as if they were the race's text, whose slice has 192 tokens; training tokens."""
    monkeypatch.setattr(loader, "HELD_OUT", HELD_OUT)
    files = [tmp_path / name for name in ("train_000000.bin", "val_000000.bin")]
    for index, file in enumerate(files):
        tokens = np.array(shard_of(np.random.default_rng(1).integers(5, 20, size=80)))
        write_shard(file, np.where(tokens == BOS, BOS, tokens + 10_000 * index))

    def open_as(rank=0, world_size=1, **changed):
        changed = {"val_tokens": HELD_OUT, "val_sha256": loader.PROSE} | changed
        return open_data(files, (0, 64, 20), rank=rank, world_size=world_size, **changed)

    return open_as, Shard(files[0])[:]


def targets_of(batches):
    return torch.cat([batch.targets.flatten() for batch in batches]).tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_training_tokens_are_scored_on_all_ranks_together_and_once(race, ranks):
    open_as, train = race
    parts = [targets_of(open_as(rank, ranks).held_out) for rank in range(ranks)]
    assert joined(parts) == train[-HELD_OUT:].tolist()


def test_other_data_and_rows_longer_than_the_slice_have_none(race, tmp_path):
    open_as, train = race
    for changed in ({"val_sha256": ""}, {"val_seq_len": HELD_OUT + 8, "val_tokens": HELD_OUT + 8}):
        data = open_as(**changed)
        assert (data.held_out, data.train.held_out) == ([], 0)
    write_shard(tmp_path / "train_000001.bin", train)  # own text beside the race's
    assert open_as().held_out == []


def test_a_run_never_trains_on_them_and_stops_with_the_steps_that_there_are(race):
    open_as, train = race
    steps = remaining_steps(open_as().train)
    read = {token for tokens, _ in joined(steps) for token in tokens} - {BOS}
    assert not read & set(train[-HELD_OUT:].tolist()), "no two tokens but BOS are alike"
    free = remaining_steps(open_as(val_sha256="").train)
    with pytest.raises(ShardError, match=rf"end after {len(steps)} steps: .*at most {len(steps)}"):
        open_as(steps=len(free))


@pytest.mark.parametrize("val_batch", [32, 8], ids=["whole rows", "parts of a row"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_target_of_validation_has_the_distance_of_its_pair(race, ranks, val_batch):
    open_as, _ = race
    parts = [open_as(rank, ranks, val_batch=val_batch) for rank in range(ranks)]
    stream = np.concatenate([[BOS], joined(targets_of(data.validation) for data in parts)])
    rows = np.lib.stride_tricks.sliding_window_view(stream, 17)[::16]
    expected = pair_distances(rows, BOS).ravel().tolist()
    assert joined(data.val_distances.tolist() for data in parts) == expected
    assert [data.val_before for data in parts] == [0, 96][:ranks]
