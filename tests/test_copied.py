"""Which tokens are copies, and the loss on copied and on new ones."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.copied import FIRST_TOKENS, REACH, means, pair_distances, sums_by_kind

pytestmark = pytest.mark.core

BOS = 0


@given(st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1, max_size=4))
def test_a_pair_is_as_far_back_as_it_stood_last_in_its_document(rows):
    expected = []
    for row in rows:
        for place in range(len(row) - 1):
            start = max((i for i in range(place + 1) if row[i] == BOS), default=0)
            pair = row[place], row[place + 1]
            earlier = [i for i in range(start, place) if (row[i], row[i + 1]) == pair]
            expected.append(place - earlier[-1] if earlier else 0)
    assert pair_distances(np.array(rows), BOS).ravel().tolist() == expected


def mean_losses(losses, distances, ranks=1):
    """As `ranks` ranks with equal shares of the tokens find them."""
    shares = zip(np.split(losses, ranks), np.split(distances, ranks), strict=True)
    size = len(losses) // ranks
    return means(sums_by_kind(*share, rank * size) for rank, share in enumerate(shares))


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_mean_loss_of_each_kind_of_token_is_the_same_on_any_number_of_ranks(ranks):
    generator = np.random.default_rng(0)
    losses = generator.random(4 * FIRST_TOKENS, dtype=np.float32)
    distances = generator.choice([0, 1, REACH, REACH + 1, 500], size=len(losses))
    first, back = losses[:FIRST_TOKENS], distances[:FIRST_TOKENS]
    assert mean_losses(losses, distances, ranks) == pytest.approx({
        "loss_on_copied": losses[distances > 0].mean(dtype=float),
        "loss_on_new": losses[distances == 0].mean(dtype=float),
        "new_loss": first[(back == 0) | (back > REACH)].mean(dtype=float),
    }, rel=1e-12)  # fmt: skip


def test_without_tokens_of_a_kind_there_is_no_mean():
    found = mean_losses(np.ones(3, np.float32), np.zeros(3, int))
    assert found["loss_on_new"] == 1
    assert math.isnan(found["loss_on_copied"])
