"""Probes: which tokens are copies, and what a model that copies scores on random text."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data import probes
from data.loader import Batch
from data.probes import COPY_REACH, REPEATED, is_copied, probe_copying, repeated_text

BOS = 0


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60))
def test_a_pair_is_copied_if_it_stood_before_in_its_document(tokens):
    expected = []
    for place in range(len(tokens) - 1):
        start = max((i for i in range(place + 1) if tokens[i] == BOS), default=0)
        earlier = [(tokens[i], tokens[i + 1]) for i in range(start, place)]
        expected.append((tokens[place], tokens[place + 1]) in earlier)
    assert is_copied(torch.tensor([tokens]), BOS)[0].tolist() == expected


@pytest.mark.parametrize(("between", "copied"), [(COPY_REACH - 2, True), (COPY_REACH - 1, False)])
def test_a_pair_too_far_back_is_no_copy(between, copied):
    tokens = [1, 2, *range(10, 10 + between), 1, 2]
    assert bool(is_copied(torch.tensor([tokens]), BOS)[0, -1]) is copied


def test_random_text_is_read_twice_and_holds_no_other_document():
    text, again = repeated_text(vocab_size=10, bos=5), repeated_text(vocab_size=10, bos=5)
    assert all(torch.equal(one, other) for one, other in zip(text, again, strict=True))
    assert torch.equal(text.targets[:, :REPEATED], text.targets[:, REPEATED:])
    assert torch.equal(text.inputs[:, 1:], text.targets[:, :-1])
    assert (text.inputs[:, 0] == 5).all()
    assert set(text.targets.flatten().tolist()) == set(range(10)) - {5}


def test_a_model_that_copies_and_one_that_cannot_are_told_apart():
    tokens = torch.tensor([[BOS, 1, 2, 3, 1, 2, 4, 1, 2]])
    batch = Batch(tokens[:, :-1].int(), tokens[:, 1:], torch.tensor([0, 8], dtype=torch.int32))

    def copies(given):
        pairs = torch.cat([given.inputs, given.targets[:, -1:]], dim=1)
        return torch.where(is_copied(pairs, BOS), 1.0, 4.0)

    found = probe_copying(copies, [batch], vocab_size=1000, bos=BOS)
    assert (found["copy_loss"], found["new_loss"]) == (1.0, 4.0)
    assert found["induction"] == pytest.approx(-3, abs=0.1)
    assert probe_copying(lambda given: torch.ones(given.targets.shape), [batch], 1000, BOS) == {
        "copy_loss": 1, "new_loss": 1, "induction": 0,
    }  # fmt: skip


def rows_of(rows, length, context=0):
    """A batch of random tokens, a document in each half of a row; `context` inputs lack targets."""
    tokens = torch.randint(1, 5, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = tokens[:, length // 2] = BOS
    ends = torch.arange(2 * rows + 1, dtype=torch.int32) * (length // 2)
    return Batch(tokens[:, :-1].int(), tokens[:, 1 + context :], ends)


@pytest.mark.parametrize(
    ("batches", "shapes", "ends"),
    [
        ([rows_of(5, 8)], [(3, 8, 8)], [0, 4, 8, 12, 16, 20, 24, 24, 24, 24, 24]),
        ([rows_of(2, 60)], [(1, 24, 24)], [0, 24, 24, 24, 24]),
        ([rows_of(1, 20), rows_of(1, 40, 20)], [(1, 20, 20), (1, 24, 4)], [0, 20, 24]),
        ([rows_of(3, 8), rows_of(3, 8)], [(3, 8, 8)], [0, 4, 8, 12, 16, 20, 24]),
    ],
    ids=["whole rows", "a long row", "a row in parts", "enough"],
)
def test_no_batch_is_larger_than_the_probe_needs(monkeypatch, batches, shapes, ends):
    monkeypatch.setattr(probes, "MOST_TOKENS", 24)
    seen = []

    def losses(given):
        seen.append(given)
        return torch.ones(given.targets.shape)

    assert probe_copying(losses, batches, vocab_size=10, bos=BOS)["new_loss"] == 1
    *validated, _ = seen  # the last is the random text
    assert [(*part.inputs.shape, part.targets.size(1)) for part in validated] == shapes
    for part, whole in zip(validated, batches, strict=False):
        rows, length, targets = *part.inputs.shape, part.targets.size(1)
        assert torch.equal(part.inputs, whole.inputs[:rows, :length])
        assert torch.equal(part.targets, whole.targets[:rows, :targets])
    assert validated[-1].cu_seqlens.tolist() == ends


def test_random_text_fits_a_model_of_few_positions_and_no_rows_have_no_mean():
    def losses(given):
        assert given.inputs.size(1) <= 41
        return torch.ones(given.targets.shape).cumsum(1)

    found = probe_copying(losses, [], vocab_size=10, bos=BOS, positions=41)
    assert math.isnan(found["copy_loss"])
    assert math.isnan(found["new_loss"])
    assert found["induction"] == 20
