"""The loader against a slow twin on plain lists: rows, boundaries, positions, plans and every refusal."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import loader as loader_module
from data.loader import NotEnoughTokens, Order, TrainLoader, capacity_for, open_data, plan_run, validation_batches
from data.shards import ShardError, write_shard

BOS = 0
CAPACITY = 128
ORDER = Order(batch_tokens=32, sequence=8, max_document=6, bos=BOS)
examples = settings(max_examples=60, deadline=None)


# ----- the twin: no offsets, no laziness, no ranks; a step is a list of (tokens of a row, lengths of its documents)


def slow_aligned_steps(shards, rows, sequence, max_document):
    steps = []
    for shard in shards:
        documents = []
        for token in shard:
            if token == BOS:
                documents.append([])
            if documents:
                documents[-1].append(token)
        while documents:
            step = []
            for _ in range(rows):
                row, lengths = [], []
                while documents and len(row) < sequence + 1:
                    piece = documents.pop(0)[:max_document][: sequence + 1 - len(row)]
                    row += piece
                    lengths.append(len(piece))
                if len(row) == sequence + 1:
                    lengths[-1] -= 1
                    step.append((row, [length for length in lengths if length]))
            if len(step) == rows:
                steps.append(step)
    return steps


def slow_dense_steps(shards, rows, sequence):
    steps = []
    for shard in shards:
        shard = list(shard)
        while len(shard) >= rows * sequence + 1:
            steps.append([(shard[k * sequence : (k + 1) * sequence + 1], [sequence]) for k in range(rows)])
            shard = shard[rows * sequence :]
    return steps


def rows_of(batches):
    """(tokens of a row, lengths of its documents) for each row of these batches, from their three tensors alone."""
    rows = []
    for batch in batches:
        count, sequence = batch.inputs.shape
        ends = batch.cu_seqlens.tolist()
        assert ends[0] == 0
        assert ends[-1] == count * sequence
        starts = [end for end in ends if end < count * sequence]
        assert ends == sorted(set(starts)) + [count * sequence] * (len(ends) - len(starts))
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
    except NotEnoughTokens:
        return steps


def joined(lists):
    return list(chain.from_iterable(lists))


# ----- data


def shard_of(lengths, before=0):
    """Tokens of documents of these lengths, after `before` tokens that belong to none; no two tokens alike but BOS."""
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
    files = [tmp_path / "train_000001.bin", tmp_path / "train_000002.bin"]
    for file in files:
        write_shard(file, shard_of(rng.integers(1, 20, size=60), before=3))
    return files


def make(files, order=ORDER, micro_rows=1, capacity=CAPACITY, **place):
    return TrainLoader(files, order, micro_rows=micro_rows, capacity=capacity, **place)


def validate(files, documents=True, rank=0, world_size=1, **sizes):
    return validation_batches(files, documents=documents, rank=rank, world_size=world_size, bos=BOS, **sizes)


shard_strategy = st.builds(shard_of, st.lists(st.integers(1, 14), min_size=1, max_size=50), st.integers(0, 3))
shards_strategy = st.lists(shard_strategy, min_size=1, max_size=3)
order_strategy = st.builds(
    lambda rows, sequence, max_document, align: Order(rows * sequence, sequence, max_document, BOS, align),
    rows=st.sampled_from([1, 2, 4, 8]),
    sequence=st.integers(1, 12),
    max_document=st.integers(1, 15),
    align=st.booleans(),
)


def slow_steps(shards, order):
    rows, sequence = order.batch_tokens // order.sequence, order.sequence
    if order.align:
        return slow_aligned_steps(shards, rows, sequence, order.max_document)
    return slow_dense_steps(shards, rows, sequence)


# ----- rows


def test_a_row_by_hand(tmp_path):
    """Cut at 4 tokens, cut at the row's end, tails lost, one-token documents, a last piece that is only a target."""
    file = tmp_path / "a.bin"
    first_row = [[0, 1, 2, 3, 4, 5], [0, 6], [0, 7, 8]]  # 4 + 2 + 1 of sequence + 1 = 7 tokens
    second_row = [[0, 9, 10], [0, 11, 12], [0, 13]]  # 3 + 3 + 1
    write_shard(file, [77, 78] + joined(first_row + second_row) + [0, 14])
    order = Order(batch_tokens=12, sequence=6, max_document=4, bos=0)
    with TrainLoader([file], order, micro_rows=2, capacity=8) as loader:
        (batch,) = next(loader)
        assert batch.inputs.tolist() == [[0, 1, 2, 3, 0, 6], [0, 9, 10, 0, 11, 12]]
        assert batch.targets.tolist() == [[1, 2, 3, 0, 6, 0], [9, 10, 0, 11, 12, 0]]
        assert batch.cu_seqlens.tolist() == [0, 4, 6, 9, 12, 12, 12, 12]
        assert loader.state_dict()["position"] == {"step": 1, "shard": 0, "offset": 2 + 11 + 8}


@given(shards_strategy, order_strategy)
@examples
def test_steps_equal_the_slow_twin(shards, order):
    with written(shards) as files, make(files, order) as loader:
        assert remaining_steps(loader) == slow_steps(shards, order)


@given(shards_strategy, st.integers(1, 12), st.integers(1, 15), st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_same_rows_whoever_reads_them(shards, sequence, max_document, align):
    order = Order(8 * sequence, sequence, max_document, BOS, align)
    expected = slow_steps(shards, order)
    with written(shards) as files:
        for world_size in (1, 2, 4):
            for micro_rows in {1, 2, 8 // world_size}:
                ranks = []
                for rank in range(world_size):
                    with make(files, order, micro_rows, rank=rank, world_size=world_size) as loader:
                        ranks.append(remaining_steps(loader))
                assert [joined(parts) for parts in zip(*ranks, strict=True)] == expected


def test_batches_have_the_stated_dtypes_and_static_shapes(files):
    with make(files, micro_rows=2) as loader:
        for _ in range(3):
            batches = next(loader)
            assert len(batches) == 2
            for batch in batches:
                moved = batch.to("cpu")
                for tensor, dtype, shape in (
                    (moved.inputs, torch.int32, (2, 8)),
                    (moved.targets, torch.int64, (2, 8)),
                    (moved.cu_seqlens, torch.int32, (CAPACITY,)),
                ):
                    assert tensor.dtype == dtype
                    assert tensor.shape == shape
                    assert tensor.is_contiguous()


@given(shard_strategy, st.integers(1, 9), st.integers(0, 60))
@examples
def test_documents_scanned_in_small_blocks_equal_one_scan(tokens, block, offset):
    tokens = np.array(tokens, dtype=np.uint16)
    starts = [index for index, token in enumerate(tokens) if token == BOS and index >= offset]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "SCAN_BLOCK", block)
        found = list(loader_module._documents(tokens, BOS, offset))
    assert found == list(zip(starts, [*starts[1:], len(tokens)], strict=False))


def test_neither_start_nor_resume_scans_beyond_the_block_it_needs(monkeypatch):
    class Recorder:
        def __init__(self, tokens):
            self.tokens, self.read = tokens, []

        def __len__(self):
            return len(self.tokens)

        def __getitem__(self, where):
            self.read.append((where.start, where.stop))
            return self.tokens[where]

    monkeypatch.setattr(loader_module, "SCAN_BLOCK", 100)
    tokens = np.array(shard_of([10] * 100), dtype=np.uint16)
    for offset in (0, 500):
        recorder = Recorder(tokens)
        assert next(loader_module._documents(recorder, BOS, offset)) == (offset, offset + 10)
        assert recorder.read == [(offset, offset + 100)]


# ----- position


@given(shards_strategy, st.booleans(), st.data())
@settings(max_examples=40, deadline=None)
def test_resuming_at_any_step_and_world_size_equals_the_uninterrupted_run(shards, align, data):
    order = replace(ORDER, align=align)
    expected = slow_steps(shards, order)
    step = data.draw(st.integers(0, len(expected)))
    world_size = data.draw(st.sampled_from([1, 2, 4]))
    with written(shards) as files:
        with make(files, order) as loader:
            for _ in range(step):
                next(loader)
            state = json.loads(json.dumps(loader.state_dict()))
        ranks = []
        for rank in range(world_size):
            with make(files, order, rank=rank, world_size=world_size) as loader:
                loader.load_state_dict(state)
                assert loader.state_dict() == state
                ranks.append(remaining_steps(loader))
    assert [joined(parts) for parts in zip(*ranks, strict=True)] == expected[step:]


@pytest.mark.parametrize("align", [True, False])
def test_resuming_at_each_step_continues_across_the_end_of_a_shard(files, align):
    order = replace(ORDER, align=align)
    with make(files, order) as loader, make(files, order) as resumed:
        shards, expected = [], remaining_steps(loader)
        loader.reset()
        for step in range(len(expected)):
            resumed.load_state_dict(loader.state_dict())
            assert remaining_steps(resumed) == expected[step:]
            next(loader)
            shards.append(loader.state_dict()["position"]["shard"])
    assert shards[2] == 0
    assert shards[-1] == 1


def test_the_state_is_of_the_step_handed_out_not_of_the_one_built_ahead(files):
    with make(files) as loader:
        assert loader.state_dict()["position"] == {"step": 0, "shard": 0, "offset": 0}
        for step in range(1, 4):
            next(loader)
            loader._pending.result()  # the next step is now built
            assert loader.state_dict()["position"] == plan_run(files, ORDER, step).end._asdict()
            assert loader.state_dict()["position"]["step"] == step


def test_loading_and_resetting_drop_what_was_built_ahead(files):
    with make(files) as loader:
        start = loader.state_dict()
        first, second = rows_of(next(loader)), rows_of(next(loader))
        assert first != second
        loader.reset()
        assert loader.state_dict() == start
        assert [rows_of(next(loader)), rows_of(next(loader))] == [first, second]
        loader.load_state_dict(start)
        assert rows_of(next(loader)) == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence": 16}, "sequence was 8 and is 16"),
        ({"batch_tokens": 64}, "batch_tokens was 32 and is 64"),
        ({"max_document": 7}, "max_document was 6 and is 7"),
        ({"bos": 1}, "bos was 0 and is 1"),
        ({"align": False}, "align was True and is False"),
        ({"bos": 1, "max_document": 7}, "max_document was 6 and is 7; bos was 0 and is 1"),
    ],
)
def test_a_position_of_another_order_is_refused_naming_the_difference(files, changes, message):
    with make(files) as loader, make(files, replace(ORDER, **changes)) as other:
        before = other.state_dict()
        with pytest.raises(ValueError, match=f"does not fit this run: {message}.*resume with the settings and shards"):
            other.load_state_dict(loader.state_dict())
        assert other.state_dict() == before


def test_a_position_in_other_shards_is_refused_but_added_shards_are_welcome(files, tmp_path):
    with make(files) as loader:
        first = rows_of(next(loader))
        state = loader.state_dict()
        second = rows_of(next(loader))
    assert first != second

    with make(files[:1]) as fewer, pytest.raises(ValueError, match=r"shard 1 was train_000002\.bin of .* is absent"):
        fewer.load_state_dict(state)
    with make(files[::-1]) as swapped, pytest.raises(ValueError, match=r"shard 0 was train_000001\.bin .*_000002\.bin"):
        swapped.load_state_dict(state)

    moved = [tmp_path / "elsewhere" / file.name for file in files]
    moved[0].parent.mkdir()
    for old, new in zip(files, moved, strict=True):
        new.write_bytes(old.read_bytes())
    write_shard(tmp_path / "train_000003.bin", shard_of([9] * 10))
    with make([*moved, tmp_path / "train_000003.bin"]) as more:
        more.load_state_dict(state)
        assert rows_of(next(more)) == second

    write_shard(files[0], shard_of([9] * 10))
    with make(files) as rebuilt, pytest.raises(ValueError, match=r"shard 0 was .* and is train_000001\.bin of 90 tok"):
        rebuilt.load_state_dict(state)


# ----- where a step was read, and its batches


@pytest.mark.parametrize("align", [True, False])
def test_the_place_of_a_step_is_where_its_rows_stand_in_the_file_whichever_rank_asks(files, align):
    order = replace(ORDER, align=align)
    with make(files, order) as loader, make(files, order, rank=1, world_size=2) as other:
        steps = len(remaining_steps(loader))
        loader.reset()
        for step in range(1, steps + 1):
            rows = rows_of(next(loader))
            name, start, end = loader.where(step)
            tokens = np.fromfile(files[0].with_name(name), dtype="<u2", offset=1024).tolist()
            first, length = rows[0][0], rows[0][1][0]
            assert first[:length] == tokens[start : start + length]
            assert rows[-1][0][-1] == tokens[end - 1]
            next(other)
            assert other.where(step) == (name, start, end)
    assert name == files[1].name


def test_the_place_of_a_row_by_hand(tmp_path):
    write_shard(tmp_path / "a.bin", [77, 0, 1, 2, 3, 4, 0, 5, 6, 0, 7])
    with TrainLoader([tmp_path / "a.bin"], Order(4, 4, 3, BOS), micro_rows=1, capacity=8) as loader:
        assert rows_of(next(loader)) == [([0, 1, 2, 0, 5], [3, 1])]
        assert loader.where(1) == ("a.bin", 1, 8)


def test_the_last_eight_steps_are_remembered_as_they_were_handed_out(files):
    with make(files, micro_rows=2) as loader:
        handed_out = {step: next(loader) for step in range(1, 11)}
        for step in range(3, 11):
            assert loader.batches(step) is handed_out[step]
        for step in (2, 11):
            with pytest.raises(ValueError, match=rf"step {step} is not remembered.*\[3, 4, 5, 6, 7, 8, 9, 10\]"):
                loader.where(step)


def test_after_a_reset_or_a_resume_steps_have_the_number_they_have_in_the_run(files):
    with make(files) as loader:
        handed_out = [next(loader) for _ in range(4)]
        third, state = loader.where(3), loader.state_dict()
        fifth = rows_of(next(loader))
        loader.reset()
        with pytest.raises(ValueError, match="step 1 is not remembered"):
            loader.batches(1)
        assert rows_of(next(loader)) == rows_of(handed_out[0])
        next(loader), next(loader)
        assert loader.where(3) == third
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match="step 3 is not remembered"):
            loader.where(3)
        assert rows_of(next(loader)) == rows_of(loader.batches(5)) == fifth


# ----- smaller micro-batches of the same data


def open_both(files, micro_batch, **changes):
    sizes = {"rank": 1, "world_size": 2, "steps": 5, "val_tokens": 64, "val_sequence": 16, "val_batch": 32}
    fields = {"batch_tokens": 64, "sequence": 8, "max_document": 6, "bos": BOS, "align": True}
    return open_data(files, files[:1], micro_batch=micro_batch, **(sizes | fields | changes))


def same_batches(ones, others):
    same = [torch.equal(a, b) for one, other in zip(ones, others, strict=True) for a, b in zip(one, other, strict=True)]
    return all(same)


def test_without_a_micro_batch_a_rank_takes_all_its_rows_at_once(files):
    data = open_both(files, None)
    with data.train:
        assert data.micro_rows == 4
        assert [batch.inputs.shape for batch in next(data.train)] == [(4, 8)]


@pytest.mark.parametrize(("micro_batch", "rows"), [(32, 4), (31, 2), (16, 2), (8, 1)])
def test_split_data_equal_data_opened_with_that_micro_batch(files, micro_batch, rows):
    split, fresh = open_both(files, None), open_both(files, micro_batch)
    with split.train, fresh.train:
        first = rows_of(next(split.train))
        split.split(micro_batch)
        assert split.micro_rows == fresh.micro_rows == rows
        assert rows_of(next(fresh.train)) == first
        for _ in range(4):
            assert same_batches(next(split.train), next(fresh.train))
        split.train.reset()
        assert rows_of(next(split.train)) == first


def test_a_split_opens_and_plans_nothing_again(files, monkeypatch):
    data = open_both(files, None)
    monkeypatch.setattr(loader_module, "plan_run", None)
    for file in files:
        file.unlink()
    with data.train:
        data.split(8)
        assert [batch.inputs.shape for batch in next(data.train)] == [(1, 8)] * 4


# ----- the end of the data


@given(shards_strategy, order_strategy)
@examples
def test_the_plan_and_the_loader_agree_on_every_number(shards, order):
    expected = slow_steps(shards, order)
    with written(shards) as files, make(files, order) as loader:
        plan = plan_run(files, order, len(expected))
        for _ in expected:
            next(loader)
        assert loader.state_dict()["position"] == plan.end._asdict()
        documents = [len(lengths) for step in expected for _, lengths in step]
        assert plan.max_documents == max(documents, default=0)
        assert plan.tokens_available == sum(map(len, shards))
        assert len(expected) * order.batch_tokens <= plan.tokens_needed <= plan.tokens_available

        number = len(expected)
        with pytest.raises(NotEnoughTokens, match=f"after {number:,} of {number + 1:,} steps: .*at most {number:,} st"):
            plan_run(files, order, number + 1)
        for _ in range(2):  # again and again, not once
            with pytest.raises(NotEnoughTokens, match=f"end after {number:,} steps: .*run at most {number:,} steps"):
                next(loader)


def test_too_little_data_is_told_with_what_there_is_what_is_needed_and_the_fix(tmp_path):
    write_shard(tmp_path / "a.bin", shard_of([9] * 9))  # 81 tokens: two steps of four documents
    with pytest.raises(NotEnoughTokens) as caught:
        plan_run([tmp_path / "a.bin"], replace(ORDER, max_document=9), 10)
    assert isinstance(caught.value, ShardError)
    assert str(caught.value) == (
        "the data end after 2 of 10 steps: 81 tokens in 1 shard(s); the run needs about 400. A step reads 32 tokens "
        "of documents that start with token 0, all from one shard. Fetch more shards, or run at most 2 steps."
    )


def test_shards_of_another_tokenizer_have_no_documents_and_that_is_told(tmp_path):
    write_shard(tmp_path / "a.bin", shard_of([9] * 100))
    with pytest.raises(NotEnoughTokens, match=r"after 0 of 1 steps: 900 tokens .* that start with token 50256"):
        plan_run([tmp_path / "a.bin"], replace(ORDER, bos=50256), 1)


def test_a_for_loop_over_the_steps_cannot_end_in_silence(files):
    with make(files) as loader, pytest.raises(NotEnoughTokens):
        for _ in loader:
            pass


# ----- refusals and the background thread


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_tokens": 33}, r"batch_tokens 33 is not a multiple of sequence 8; .*Change one"),
        ({"batch_tokens": 0}, r"batch_tokens 0 is not a multiple"),
        ({"sequence": 0}, r"sequence 0"),
        ({"max_document": 0}, r"max_document is 0; .*Raise it"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_with_value_rule_and_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(ORDER, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 3}, r"world size 3 does not divide the 4 rows.*Start one of \[1, 2, 4\] processes"),
        ({"world_size": 0}, r"world size 0"),
        ({"world_size": 2, "rank": 2}, r"rank is 2; it must be in 0\.\.1"),
        ({"micro_rows": 3}, r"micro_rows 3 does not divide the 4 rows of a rank\. Take a divisor"),
        ({"world_size": 4, "micro_rows": 2}, r"micro_rows 2 does not divide the 1 rows of a rank"),
        ({"micro_rows": 0}, r"micro_rows 0"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_value_rule_and_fix(files, changes, message):
    with pytest.raises(ValueError, match=message):
        make(files, **changes)


def test_a_truncated_shard_is_refused_before_the_first_step(files):
    files[1].write_bytes(files[1].read_bytes()[:-10])
    with pytest.raises(ShardError, match=r"train_000002\.bin: .*cut short"):
        make(files)
    with pytest.raises(ShardError, match=r"train_000002\.bin: .*cut short"):
        plan_run(files, ORDER, 1)


CUT_IN_TRAINING = f"""
import os, sys
from data.loader import Order, TrainLoader
from data.shards import ShardError
loader = TrainLoader(sys.argv[1:], {ORDER}, micro_rows=1, capacity=128)
next(loader)
os.truncate(sys.argv[1], 1030)
try:
    while True:
        next(loader)
except ShardError as error:
    print(error)
    sys.exit(2)
"""


def test_a_shard_cut_in_training_ends_the_run_with_an_error_that_names_it(tmp_path):
    """In a process of its own: a loader that maps files into memory would kill it."""
    write_shard(tmp_path / "train_000001.bin", shard_of([9] * 600))
    command = [sys.executable, "-c", CUT_IN_TRAINING, str(tmp_path / "train_000001.bin")]
    child = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120)
    assert child.returncode == 2, child.stderr
    assert "train_000001.bin: tokens " in child.stdout
    assert "the file has 1,030 bytes and had 11,824 when it was opened" in child.stdout


def test_shards_deleted_in_training_change_nothing(files):
    with make(files) as loader:
        expected = remaining_steps(loader)
        loader.reset()
        found = [rows_of(next(loader))]
        for file in files:
            file.unlink()
        assert found + remaining_steps(loader) == expected


def test_a_disk_that_fails_in_training_is_named_at_the_step_that_needs_it(files, monkeypatch):
    with make(files) as loader:
        next(loader)
        loader._pending.result()  # the second step is built before the disk fails

        def fail(*_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "pread", fail)
        assert loader.where(1).shard == "train_000001.bin"
        next(loader)
        for _ in range(2):  # again and again, not once
            with pytest.raises(ShardError, match=r"train_000001\.bin: tokens .* \(Input/output error\)"):
                next(loader)


def test_validation_data_cut_while_they_are_read_are_named(tmp_path, monkeypatch):
    write_shard(tmp_path / "val.bin", range(100))
    pread = os.pread

    def cut_then_read(descriptor, count, offset):
        if offset >= 1024:  # the header was read when the file was whole
            os.truncate(tmp_path / "val.bin", 1100)
        return pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", cut_then_read)
    with pytest.raises(ShardError, match=r"val\.bin: tokens 0 to 65 .* has 1,100 bytes and had 1,224"):
        validate([tmp_path / "val.bin"], val_tokens=64, sequence=8, rows=1)


def test_capacity_is_a_multiple_of_32_and_holds_the_planned_documents(files):
    sizes_and_capacities = {(1, 0): 32, (1, 31): 32, (1, 32): 64, (4, 109): 448}
    assert {key: capacity_for(*key) for key in sizes_and_capacities} == sizes_and_capacities
    plan = plan_run(files, ORDER, 5)
    exact = 4 * plan.max_documents + 1
    with make(files, micro_rows=4, capacity=exact) as loader:
        for _ in range(5):
            assert len(rows_of(next(loader))) == 4


def test_an_error_in_the_background_reaches_the_caller(files):
    with make(files, micro_rows=4) as loader:
        documents = sum(len(lengths) for _, lengths in rows_of(next(loader)))
    with make(files, micro_rows=4, capacity=documents + 1) as loader:
        assert len(next(loader)) == 1
    message = f"4 rows holds {documents} documents, but capacity is {documents}; it must exceed .*capacity_for"
    with make(files, micro_rows=4, capacity=documents) as loader, pytest.raises(ValueError, match=message):
        next(loader)


def test_a_closed_loader_refuses_to_go_on(files):
    with make(files) as loader:
        next(loader)
    with pytest.raises(RuntimeError):
        next(loader)


def test_a_loader_left_open_does_not_hold_up_the_interpreter(files):
    code = (
        "import sys; from data.loader import Order, TrainLoader\n"
        f"loader = TrainLoader(sys.argv[1:], {ORDER}, micro_rows=1, capacity=128)\n"
        "next(loader); sys.exit(7)"
    )
    command = [sys.executable, "-c", code, *map(str, files)]
    assert subprocess.run(command, cwd=Path(__file__).parents[1], timeout=120).returncode == 7


# ----- validation


@given(shards_strategy, st.integers(1, 8), st.integers(1, 3), st.sampled_from([1, 2, 3, 5]), st.booleans(), st.data())
@examples
def test_validation_is_the_first_tokens_in_order_cut_at_rows_and_documents(
    shards, sequence, rows, world_size, documents, data
):
    stream = joined(shards)
    count = data.draw(st.integers(0, (len(stream) - 1) // sequence))
    val_tokens = count * sequence
    if count == 0:
        return
    with written(shards) as files:
        ranks = [
            validate(files, documents, rank, world_size, val_tokens=val_tokens, sequence=sequence, rows=rows)
            for rank in range(world_size)
        ]

    expected = []
    for k in range(count):
        row = stream[k * sequence : (k + 1) * sequence + 1]
        starts = [0] + [index for index in range(1, sequence) if documents and row[index] == BOS]
        expected.append((row, [b - a for a, b in zip(starts, [*starts[1:], sequence], strict=True)]))
    assert joined(rows_of(batches) for batches in ranks) == expected

    per_rank = [sum(len(batch.inputs) for batch in batches) for batches in ranks]
    assert max(per_rank) - min(per_rank) <= 1
    assert all(len(batch.inputs) == rows for batches in ranks for batch in batches[:-1])
    assert {len(batch.cu_seqlens) for batches in ranks for batch in batches} == {32}


def test_validation_capacity_is_the_exact_need_of_the_fullest_batch_on_every_rank(tmp_path):
    write_shard(tmp_path / "val.bin", [1] * 400 + [BOS] * 400 + [1])  # rank 0 has no document start, rank 1 has 400
    parts = [
        validate([tmp_path / "val.bin"], rank=rank, world_size=2, val_tokens=800, sequence=100, rows=3)
        for rank in range(2)
    ]
    assert [len(batch.cu_seqlens) for part in parts for batch in part] == [320] * 4  # 300 + 1, rounded up
    assert [len(batch.inputs) for batch in parts[0]] == [3, 1]


@pytest.mark.parametrize(("align", "val_sequence"), [(True, 16), (True, 32), (False, 16)])
def test_the_longest_validation_document_is_that_of_a_loop_over_tokens(files, align, val_sequence):
    data = open_both(files, None, align=align, val_sequence=val_sequence)
    longest = length = 0
    for row in (row for batch in data.validation for row in batch.inputs.tolist()):
        for place, token in enumerate(row):
            length = 1 if place == 0 or (align and token == BOS) else length + 1
            longest = max(longest, length)
    with data.train:
        assert data.val_longest == longest


def test_validation_needs_one_token_more_than_it_counts(tmp_path):
    write_shard(tmp_path / "val.bin", [1] * 16)
    assert len(validate([tmp_path / "val.bin"], val_tokens=8, sequence=8, rows=1)) == 1
    with pytest.raises(NotEnoughTokens, match=r"needs 17 tokens .*1 validation shard\(s\) hold 16\. .*lower val_t"):
        validate([tmp_path / "val.bin"], val_tokens=16, sequence=8, rows=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_tokens": 12}, "val_tokens 12 is not a multiple of sequence 8; .*Change one"),
        ({"val_tokens": 0}, "val_tokens 0"),
        ({"rows": 0}, "rows is 0"),
        ({"rank": 2, "world_size": 2}, r"rank is 2; it must be in 0\.\.1"),
    ],
)
def test_validation_sizes_that_make_no_sense_are_refused(files, changes, message):
    with pytest.raises(ValueError, match=message):
        validate(files, **{"val_tokens": 16, "sequence": 8, "rows": 2, **changes})
