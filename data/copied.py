"""Copied and new tokens: how much of its score a model owes to copying from its context.

A token is copied if the pair of the token before it and itself occurred earlier in its document,
however far back; else it is new.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Logs before 2026-11-29 have only the loss on new tokens as it was measured then: on the first
# FIRST_TOKENS of validation, where a pair farther back than REACH counts as new. Runs still log it
# as `new_loss`, until tuned AdamW, with which claims of `small` are compared, is claimed again.
FIRST_TOKENS, REACH = 16_384, 176
Sums = dict[str, tuple[float, int]]  # by kind of token: the sum of its losses, and their number


def pair_distances(tokens_BT: ArrayLike, bos: int) -> NDArray[np.int64]:
    """Return how far back each pair of neighbours stood last in its document, (B, T - 1); 0: never.

    tokens_BT: integers (B, T). Rows and `bos` begin documents.
    """
    tokens_BT = np.asarray(tokens_BT, dtype=np.int64)
    before, after = tokens_BT[:, :-1], tokens_BT[:, 1:]
    begins = before == bos
    begins[:, 0] = True
    document, vocabulary = begins.cumsum().reshape(begins.shape), tokens_BT.max(initial=0) + 1
    pairs = ((document * vocabulary + before) * vocabulary + after).ravel()
    order = pairs.argsort(kind="stable")  # equal pairs stay in the order of the text
    distances = np.zeros_like(pairs)
    distances[order[1:]] = np.where(np.diff(pairs[order]) == 0, np.diff(order), 0)
    return distances.reshape(before.shape)


def sums_by_kind(losses: NDArray, distances: NDArray, before: int) -> Sums:
    """Return the sums of a rank's token losses (N,), of copied and of new tokens.

    distances: see `pair_distances`. before: how many tokens are those of the ranks before it.
    """
    count = max(FIRST_TOKENS - before, 0)
    first, back = losses[:count], distances[:count]
    kinds = {
        "loss_on_copied": losses[distances > 0],
        "loss_on_new": losses[distances == 0],
        "new_loss": first[(back == 0) | (back > REACH)],
    }
    return {name: sum_and_count(kind) for name, kind in kinds.items()}


def sum_and_count(losses: NDArray) -> tuple[float, int]:
    return float(losses.sum(dtype=np.float64)), len(losses)


def means(ranks: Iterable[Sums]) -> dict[str, float]:
    """Return the mean loss of each kind over the sums of all ranks; NaN where there is no token."""
    found: dict[str, list[tuple[float, int]]] = {}
    for sums in ranks:
        for name, each in sums.items():
            found.setdefault(name, []).append(each)
    totals = {name: np.sum(each, axis=0) for name, each in found.items()}
    return {name: float(loss / count) if count else float("nan")
            for name, (loss, count) in totals.items()}  # fmt: skip
