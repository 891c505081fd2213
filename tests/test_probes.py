"""Probes: which tokens are copies, and what a model that copies scores on random text."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.probes import COPY_REACH, REPEATED, is_copied, repeated_tokens

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
    text = repeated_tokens(4, vocab_size=10, bos=5)
    assert torch.equal(text, repeated_tokens(4, vocab_size=10, bos=5))
    assert torch.equal(text[:, 1 : 1 + REPEATED], text[:, 1 + REPEATED :])
    assert (text == 5).sum().item() == 4  # the first of each row
    assert set(text.flatten().tolist()) == set(range(10))
