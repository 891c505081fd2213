"""The update of stacked parts: runs a method; a flag or a fault keeps old values."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .buckets import Bucket, copy_all

# A method on stacks of parts, its fixed options, and its rates, which may change at every step.
Method = tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]


def new_values(
    method: Callable[..., tuple[Tensor, ...]], gradients: Tensor, weights: Tensor,
    state: list[Tensor], taken: Tensor | None, divisor: float | Tensor, rates: dict[str, Any],
) -> tuple[Tensor, ...]:  # fmt: skip
    """New weights and state by a method on stacks, and 1 for each matrix it failed to step (k,).

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
        faulty = ~sound & finite(moving[0] if moving else sums)
        new = torch.where(faulty.view(-1, 1, 1), weights.to(wide), new[0]), *new[1:]
        failed = [(faulty if taken is None else faulty & taken).float()]
    if taken is None:
        return *new, *failed
    flag = taken.view(-1, *[1] * (weights.ndim - 1))
    pairs = zip(new, old, strict=True)
    new = tuple(torch.where(flag, value.to(kept.dtype), kept) for value, kept in pairs)
    return *new, *failed


def finite(matrices: Tensor) -> Tensor:
    """Whether each matrix of a stack (k, rows, cols) is finite (k,): its sum is not otherwise."""
    return matrices.sum((-2, -1)).isfinite()


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled once for each kind of arguments; torch's own limit would be 8 graphs.

    If compiling fails, the compiler logs why and the function stays eager. Trap: see `new_values`.
    """
    settings = torch._dynamo.config.patch(recompile_limit=256, suppress_errors=True)
    return settings(torch.compile(function, dynamic=False))


def compiled_values() -> Callable[..., Any]:
    """`new_values`, compiled once for each kind of bucket."""
    return compiled(new_values)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`. From pinned memory the copy does not wait for a GPU."""
    cuda = device.type == "cuda"
    return (tensor.pin_memory() if cuda else tensor).to(device, non_blocking=cuda)


def on_device(methods: dict[Bucket, Method], divisor: Tensor | float) -> dict[Bucket, Method]:
    """Methods whose rates, and the divisor as one of them, are tensors () on the device.

    New values then need no new compilation. All numbers of the host travel in one copy.
    """
    found: dict[Bucket, Method] = {}
    host: dict[tuple[Bucket, str], float] = {}
    for bucket, (method, fixed, rates) in methods.items():
        found[bucket] = method, fixed, {}
        for name, rate in (rates | {"divisor": divisor}).items():
            if isinstance(rate, Tensor) and rate.device == bucket.param.device:
                found[bucket][2][name] = rate.to(bucket.wide)  # to read it would be a wait
            elif rate is None:
                found[bucket][2][name] = None
            else:
                host[bucket, name] = float(rate)
    for wide in {bucket.wide for bucket, _ in host}:
        some = {key: rate for key, rate in host.items() if key[0].wide == wide}
        # A compiled kernel expects inputs at multiples of 16 bytes: four elements for a number.
        rows = torch.tensor([[rate] * 4 for rate in some.values()], dtype=wide)
        rows = sent(rows, next(iter(some))[0].param.device)
        for (bucket, name), row in zip(some, rows[:, 0].unbind(), strict=True):
            found[bucket][2][name] = row
    return found


def update(
    bucket: Bucket, values: Callable[..., Any], given: dict[str, Any],
    taken: Tensor | None, divisor: Tensor | float,
) -> list[Tensor]:  # fmt: skip
    """Step a bucket by `new_values` of a method, compiled or not. Returns what failed, if known."""
    counter, weights = bucket.state.get("step"), bucket.weights()
    if counter is not None:  # the method sees the number of this step
        given["t"] = counter + 1
    state = {name: tensor for name, tensor in bucket.state.items() if name != "step"}
    stacks = stack(bucket.gradients()), stack(weights)
    new, *rest = values(*stacks, [*state.values()], taken, divisor, given)
    fresh, failed = rest[: len(state)], rest[len(state) :]
    if bucket.fresh is None:
        copy_all(weights, new.split(bucket.each))
    else:
        bucket.fresh.copy_(new)
    if taken is None:
        copy_all([*state.values()], fresh)
    else:
        bucket.state.update(zip(state, fresh, strict=True))  # new tensors: nothing to copy
    if counter is not None:
        counter += 1 if taken is None else taken.view(counter.shape)
    return failed


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
