"""Which tokens are copies, and the loss on copied and on new ones."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data import copied
from data.copied import COPY_REACH, copied_and_new_loss, is_copied
from data.loader import Batch

BOS = 0


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60))
def test_a_pair_is_copied_if_it_stood_before_in_its_document(tokens):
    expected = []
    for place in range(len(tokens) - 1):
        start = max((i for i in range(place + 1) if tokens[i] == BOS), default=0)
        earlier = [(tokens[i], tokens[i + 1]) for i in range(start, place)]
        expected.append((tokens[place], tokens[place + 1]) in earlier)
    assert is_copied(torch.tensor([tokens]), BOS)[0].tolist() == expected


@pytest.mark.parametrize(("between", "found"), [(COPY_REACH - 2, True), (COPY_REACH - 1, False)])
def test_a_pair_too_far_back_is_no_copy(between, found):
    tokens = [1, 2, *range(10, 10 + between), 1, 2]
    assert bool(is_copied(torch.tensor([tokens]), BOS)[0, -1]) is found


def batch_of(rows, context=0):
    """A batch of these tokens; the first `context` inputs of a row lack targets."""
    tokens = torch.tensor(rows)
    return Batch(tokens[:, :-1].int(), tokens[:, 1 + context :], torch.tensor([0]))


@pytest.mark.parametrize("context", [0, 3])
def test_each_loss_is_the_mean_over_its_tokens(context):
    batch = batch_of([[BOS, 1, 2, 3, 1, 2, 4, 1, 2]], context)

    def by_place(inputs, targets):
        return torch.arange(8.0)[-targets.size(1) :].view(1, -1)

    new = [place for place in (0, 1, 2, 3, 5, 6) if place >= context]
    found = copied_and_new_loss(by_place, [batch], BOS)
    assert found == {"copy_loss": (4 + 7) / 2, "new_loss": pytest.approx(sum(new) / len(new))}


@pytest.mark.parametrize(("batches", "shapes"), [
    ([(5, 8, 0)], [(3, 8, 8)]),
    ([(2, 60, 0)], [(1, 24, 24)]),
    ([(1, 20, 0), (1, 40, 20)], [(1, 20, 20), (1, 24, 4)]),
    ([(3, 8, 0), (3, 8, 0)], [(3, 8, 8)]),
], ids=["whole rows", "a long row", "a row in parts", "enough"])  # fmt: skip
def test_no_more_is_read_at_once_than_is_needed(monkeypatch, batches, shapes):
    monkeypatch.setattr(copied, "MOST_TOKENS", 24)
    whole = [batch_of(torch.arange(rows * (length + 1)).view(rows, -1).tolist(), context)
             for rows, length, context in batches]  # fmt: skip
    seen = []

    def losses(inputs, targets):
        rows, length = inputs.shape
        assert torch.equal(inputs, whole[len(seen)].inputs[:rows, :length])
        assert torch.equal(targets, whole[len(seen)].targets[:rows, : targets.size(1)])
        seen.append((rows, length, targets.size(1)))
        return torch.ones(targets.shape)

    assert copied_and_new_loss(losses, whole, BOS)["new_loss"] == 1
    assert seen == shapes


def test_without_rows_there_is_no_mean():
    found = copied_and_new_loss(lambda inputs, targets: torch.ones(targets.shape), [], BOS)
    assert math.isnan(found["copy_loss"])
    assert math.isnan(found["new_loss"])
