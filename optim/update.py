"""The update of stacked parts: runs a method; a flag or a fault keeps old values."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def new_values(
    method: Callable[..., tuple[Tensor, ...]], gradients: Tensor, weights: Tensor,
    state: list[Tensor], taken: Tensor | None, divisor: float | Tensor, rates: dict[str, Any],
) -> tuple[Tensor, ...]:  # fmt: skip
    """New weights and state by a method on stacks, and which matrices it failed to step (k,).

    taken: a flag for each matrix; where it is false, old values stay. A method updates state in
    place: with `taken` a copy, without it the state itself if that has the computation's dtype,
    which is then the dtype of all results. This function is compiled, always with `taken`. Trap: it
    must then write to no input. A compiled kernel could read state that it overwrites elsewhere.

    A matrix has failed if its new weights are not finite though its momentum, the first of its
    state, is: a product overflowed, or a kernel has a fault. It keeps its weights. A gradient that
    is not finite is no such failure: where no guard skips the step, it must show. The flags are
    left out for elementwise methods, and without `taken` if nothing failed.
    """
    wide = torch.promote_types(weights.dtype, torch.float32)
    sums, old = gradients.to(wide), [weights, *state]
    if isinstance(divisor, Tensor) or divisor != 1:
        sums = sums / divisor  # once, in float32: dividing each bf16 gradient would lose bits
    moving = [tensor.to(wide, copy=taken is not None) for tensor in state]
    new = method(sums, weights.to(wide), *moving, **rates)
    failed = []
    if weights.ndim == 3:
        sound = finite(new[0])
        if taken is None and sound.all():
            return new
        failed = [~sound & finite(moving[0] if moving else sums)]
        new = torch.where(failed[0].view(-1, 1, 1), weights.to(wide), new[0]), *new[1:]
    if taken is None:
        return *new, *failed
    flag = taken.view(-1, *[1] * (weights.ndim - 1))
    pairs = zip(new, old, strict=True)
    new = tuple(torch.where(flag, value.to(kept.dtype), kept) for value, kept in pairs)
    return *new, *(each & taken for each in failed)


def finite(matrices: Tensor) -> Tensor:
    """Whether each matrix of a stack (k, rows, cols) is finite (k,): its sum is not otherwise."""
    return matrices.sum((-2, -1)).isfinite()


@functools.cache
def compiled_values() -> Callable[..., Any]:
    """`new_values`, compiled once for each kind of bucket; torch's own limit would be 8 graphs.

    If compiling fails, the compiler logs why and the function stays eager.
    """
    settings = torch._dynamo.config.patch(recompile_limit=256, suppress_errors=True)
    return settings(torch.compile(new_values, dynamic=False))


def stack(tensors: list[Tensor]) -> Tensor:
    """Join parts (n, ...) along their first dimension. A single part is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def decay_of(group: Mapping[str, Any]) -> Any:
    """The share of the weights that a step takes away, or None."""
    return group["lr"] * group["weight_decay"] * group["wd_mul"] if group["weight_decay"] else None


def descend(weights: Tensor, step: Tensor, decay: Any, cautious: bool) -> Tensor:
    """The weights after decoupled decay and the step.

    decay: a share of the weights, or None. cautious: decay only where it works with the step
    (Liang et al., arXiv:2411.16085), so not in rows without a gradient.
    """
    if decay is None:
        return weights - step
    if cautious:
        return (weights - (weights * step).gt_(0).mul_(weights).mul_(decay)).sub_(step)
    return (weights * (1 - decay)).sub_(step)
