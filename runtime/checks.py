"""Checks on a model and its state: it sees no future, and state was restored bit for bit."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def is_causal(
    stream: Callable[[Tensor], Tensor],
    parameters: Iterable[Tensor],
    tokens: Tensor,
    vocab_size: int,
) -> bool:
    """Whether the first half of a stream stays the same when the second half of the row changes.

    tokens: (1, T). stream: maps tokens to (1, T, C). Adds noise to the parameters, in place, since
    weights that are zero would hide a leak.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.add_(0.1 * noise)
    half = tokens.size(1) // 2
    changed = tokens.clone()
    changed[:, half:] = (changed[:, half:] + 1) % vocab_size
    return torch.equal(stream(tokens)[:, :half], stream(changed)[:, :half])


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values or nested dicts of values are equal, tensors in every bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return bool(a == b)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    # Compare bytes: NaN then equals itself, and -0 differs from 0.
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
