"""Probes: which tokens are copies, and what a model that copies scores on random text."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
