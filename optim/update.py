"""The update of stacked parts: runs a method, and writes what the guard's flag says."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .buckets import copy_all


def update(
    method: Callable[..., tuple[Tensor, ...]],
    gradients: list[Tensor], weights: list[Tensor], target: Tensor | None, state: list[Tensor],
    taken: Tensor | None, divisor: float | Tensor, rates: dict[str, Any],
) -> None:  # fmt: skip
    """Run a method on stacked parts. Writes state in place, and weights to `target` or in place.

    taken: a flag, or one a matrix; where it is false, old values stay. Computes in float32 at
    least. This function is compiled.
    """
    wide = torch.promote_types(weights[0].dtype, torch.float32)
    old, sums = stack(weights), stack(gradients).to(wide)
    if isinstance(divisor, Tensor) or divisor != 1:
        sums = sums / divisor  # once, in float32: dividing each bf16 gradient would lose bits
    new, *fresh = method(sums, old.to(wide), *[tensor.to(wide) for tensor in state], **rates)
    if taken is not None:
        flag = taken.view(-1, *[1] * (old.ndim - 1))
        new = torch.where(flag, new.to(old.dtype), old)
        pairs = zip(fresh, state, strict=True)
        fresh = [torch.where(flag, value.to(kept.dtype), kept) for value, kept in pairs]
    if target is None:
        copy_all(weights, new.split([len(part) for part in weights]))
    else:
        target.copy_(new)
    copy_all(state, fresh)


@functools.cache
def compiled_update() -> Callable[..., Any]:
    """`update`, compiled once for each kind of bucket; torch's own limit would be 8 graphs.

    If compiling fails, the compiler logs why and the update stays eager.
    """
    settings = torch._dynamo.config.patch(recompile_limit=256, suppress_errors=True)
    return settings(torch.compile(update, dynamic=False))


def stack(tensors: list[Tensor]) -> Tensor:
    """Join parts (n, ...) along their first dimension. A single part is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def descend(weights: Tensor, step: Tensor, decay: Any, cautious: bool) -> Tensor:
    """The weights after decoupled decay and the step.

    decay: a share of the weights, or None. cautious: decay only where it works with the step
    (Liang et al., arXiv:2411.16085), so not in rows without a gradient.
    """
    if decay is None:
        return weights - step
    if cautious:
        return weights - torch.where(weights * step > 0, weights * decay, 0) - step
    return (weights * (1 - decay)).sub_(step)
