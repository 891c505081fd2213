"""Muon and NorMuon: momentum whose update is orthogonalized, matrix by matrix."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import ShardedOptimizer, decay_of, descend
from .buckets import Bucket
from .orthogonalize import (
    LARGEST_SINGULAR_VALUE,
    Choice,
    batch_limit,
    choose,
    native_dtype,
    orthogonalized,
    spectral_norm,
)
from .state import State

# Factor on the step of a matrix, by its stored shape (rows, cols).
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, cols: max(1.0, rows / cols) ** 0.5,  # Jordan et al.: spectral norm lr
    "rms": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,  # Liu et al., arXiv:2502.16982
    "none": lambda rows, cols: 1.0,
}
AXES = ("stored", "rows", "cols")
VOCABULARY = 20_000  # a side this long, and six times the other, is probably a vocabulary


# ---- The methods, on stacks (k, rows, cols). tests/reference.py has them for one matrix.


def muon(
    gradients: Tensor,
    weights: Tensor,
    momentum: Tensor,
    *,
    rate: Any,
    decay: Any,
    beta: Any,
    nesterov: bool,
    cautious: bool,
    choice: Choice,
    guarded: bool,
) -> tuple[Tensor, ...]:
    """One step of Muon. Returns (weights, momentum) and, if guarded, largest singular values.

    rate: learning rate times the scale of the shape. decay: a share of the weights, or None.
    """
    momentum = torch.lerp(momentum, gradients, 1 - beta)
    update = torch.lerp(gradients, momentum, beta) if nesterov else momentum
    direction, *largest = sound(orthogonalized(update, choice), guarded)
    return descend(weights, direction * rate, decay, cautious), momentum, *largest


def normuon(
    gradients: Tensor,
    weights: Tensor,
    momentum: Tensor,
    variance: Tensor,
    *,
    rate: Any,
    decay: Any,
    beta: Any,
    beta2: float,
    axis: int,
    nesterov: bool,
    cautious: bool,
    choice: Choice,
    guarded: bool,
) -> tuple[Tensor, ...]:
    """One step of NorMuon. Returns (weights, momentum, variance), and the rest as `muon` does.

    variance: running mean square along `axis`, (k, rows, 1) for -1 and (k, 1, cols) for -2.
    """
    momentum = torch.lerp(momentum, gradients, 1 - beta)
    update = torch.lerp(gradients, momentum, beta) if nesterov else momentum
    direction, *largest = sound(orthogonalized(update, choice), guarded)
    squares = direction.to(update.dtype).square().sum(axis, keepdim=True)
    variance = torch.lerp(variance, squares / direction.shape[axis], 1 - beta2)
    factor = variance.clamp_min(1e-10).rsqrt()  # 1e-10: rows that never had a gradient
    # The norm is kept. Both Frobenius norms follow from the sums of squares: no second pass.
    before = squares.sum((-2, -1), keepdim=True).sqrt()
    after = (squares * factor.square()).sum((-2, -1), keepdim=True).sqrt()
    factor = factor * (rate * before / after.clamp_min(1e-10))
    # Trap: a float32 factor keeps the step float32. Rounded to bf16, the step cost loss.
    return descend(weights, direction * factor, decay, cautious), momentum, variance, *largest


def sound(directions: Tensor, guarded: bool) -> tuple[Tensor, ...]:
    """Directions; if guarded, failed ones set to zero, and the largest singular values (k,)."""
    if not guarded:
        return (directions,)
    largest = spectral_norm(directions)
    failed = ~(largest <= LARGEST_SINGULAR_VALUE).view(-1, 1, 1)
    return directions.masked_fill_(failed, 0), largest


def matrix_shape(shape: torch.Size, split: int | None, flatten: bool) -> tuple[int, int, int]:
    """How a parameter's memory is viewed: (matrices, rows, cols). split cuts the longer side."""
    if flatten and len(shape) > 2:
        shape = torch.Size((shape[0], math.prod(shape[1:])))
    *batch, rows, cols = shape
    split = split or 1
    count = math.prod(batch) * split
    return (count, rows, cols // split) if cols >= rows else (count, rows // split, cols)


class Muon(ShardedOptimizer):
    """EMA momentum, Nesterov, orthogonalization, decoupled decay (Jordan et al., "Muon", 2024).

    For hidden weights (..., rows, cols); give embeddings, heads, gains and biases to Adam. Group
    keys: lr, lr_mul, momentum, weight_decay, wd_mul, method and backend (see `orthogonalize`),
    split (number of matrices packed in one: 4 for Q, K, V, O as (C, 4C)), flatten (view a
    convolution's (out, in, height, width) as (out, rest)). scale: "spectral", "rms" or "none".
    cautious: no decay where it works against the step. dtype of the products: "auto" is bf16 where
    native. State, on the owning rank only: momentum, shaped as the parameter.
    ValueError for an impossible setting or a backend that cannot run, TypeError for a DTensor.
    """

    RANGES: ClassVar = {**ShardedOptimizer.RANGES, "momentum": (0, 1, 0.95)}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scale: str = "spectral",
        split: int | None = None,
        flatten: bool = False,
        method: str = "polar_express",
        backend: str = "auto",
        dtype: torch.dtype | str = "auto",
        **options: Any,
    ):
        if scale not in SCALES:
            raise ValueError(f"unknown scale {scale!r}; choose one of {', '.join(SCALES)}")
        if dtype != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f'dtype must be "auto" or a floating-point torch.dtype, got {dtype!r}')
        self.nesterov, self.scale = nesterov, scale
        self.dtype = None if isinstance(dtype, str) else dtype
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        defaults |= {"split": split, "flatten": flatten, "method": method, "backend": backend}
        super().__init__(params, {**defaults, **self._extra_defaults()}, **options)

    def _extra_defaults(self) -> dict[str, Any]:
        """Group keys, with defaults, that a subclass adds."""
        return {}

    def _check(self, group: dict[str, Any], names: list[str]) -> None:
        super()._check(group, names)
        split, flatten = group["split"], group["flatten"]
        for name, param in zip(names, group["params"], strict=True):
            what = f"parameter {name} has shape {tuple(param.shape)}"
            if param.ndim < 2:
                raise ValueError(f"{what}, Muon needs matrices; give it to Adam")
            if param.ndim > 3 and not flatten:
                raise ValueError(f"{what}; flatten=True steps it as (out, in * height * width)")
            rows, cols = matrix_shape(param.shape, None, flatten)[1:]
            long = max(rows, cols)
            if split is not None and (type(split) is not int or split < 1 or long % split):
                side = f"{long}, the longer side of parameter {name}"
                raise ValueError(f"split must divide {side}, got {split!r}")
            _, rows, cols = matrix_shape(param.shape, split, flatten)
            if max(rows, cols) >= max(VOCABULARY, 6 * min(rows, cols)):
                warnings.warn(f"{what}, as embeddings have; those belong to Adam", stacklevel=2)
            if param.numel():
                self._choice(rows, cols, group, param.device)

    def _choice(self, rows: int, cols: int, group: dict[str, Any], device: torch.device) -> Choice:
        dtype = self.dtype or native_dtype(device)
        short, long = min(rows, cols), max(rows, cols)
        return choose(short, long, group["method"], dtype, device, group["backend"])

    def _cuts(self, param: Tensor, group: dict[str, Any], ranks: int) -> list[tuple[int, ...]]:
        # Several ranks can share the matrices of a parameter. One rank alone handles fewer tensors.
        count, rows, cols = matrix_shape(param.shape, group["split"], group["flatten"])
        return [(count, rows, cols)] if ranks == 1 else [(1, rows, cols)] * count

    def _states(self, param: Tensor, group: dict[str, Any]) -> dict[str, State]:
        return {"momentum": State(param.shape, None, param.dtype)}

    def _limit(self, bucket: Bucket) -> int:
        dtype = self.dtype or native_dtype(bucket.param.device)
        return batch_limit(bucket.parts[0].numel, dtype, bucket.param.device)

    def _method(self, bucket: Bucket) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
        group = bucket.group
        stored = matrix_shape(bucket.param.shape, None, group["flatten"])[1:]
        rate = group["lr"] * group["lr_mul"] * SCALES[self.scale](*stored)
        rates = {"rate": rate, "beta": group["momentum"], **decay_of(group)}
        fixed = {
            "nesterov": self.nesterov,
            "cautious": self.cautious,
            "choice": self._choice(bucket.shape[-2], bucket.shape[-1], group, bucket.param.device),
            "guarded": self._guarded,
        }
        return muon, fixed, rates

    def fall_back(self) -> None:
        """Use the plain backend from now on, with one warning."""
        forced = [group for group in self.param_groups if group["backend"] != "plain"]
        for group in forced:
            group["backend"] = "plain"
        if forced:
            warnings.warn(
                "an orthogonalization went wrong and its matrix was not moved; its optimizer falls "
                "back to backend 'plain'",
                stacklevel=3,
            )

    def describe(self) -> str:
        """One line a shape: method, backend, dtype. Then the line of `ShardedOptimizer`."""
        lines: dict[str, None] = {}
        for param, group in self._group_of.items():
            _, rows, cols = matrix_shape(param.shape, group["split"], group["flatten"])
            choice = self._choice(rows, cols, group, param.device)
            dtype = str(choice.dtype).removeprefix("torch.")
            lines[f"{rows} x {cols}: {choice.method}, {choice.backend} products in {dtype}"] = None
        return "\n".join([*lines, super().describe()])


class NorMuon(Muon):
    """Muon with the update divided by a running RMS, at unchanged norm (arXiv:2510.05491).

    axis "rows": one RMS for each row of a matrix; "cols": for each column; "stored": for each row
    if the stored shape has rows >= cols, else for each column, as in modded-nanogpt. beta2, also a
    group key: weight of the past. There is no bias correction: when gradients return to a row after
    a pause, its step is 1 / sqrt(1 - beta2) times as long. The rest is Muon's.
    State besides momentum: variance, (matrices, rows, 1) or (matrices, 1, cols).
    """

    RANGES: ClassVar = {**Muon.RANGES, "beta2": (0, 1, 0.95)}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        beta2: float = 0.95,
        axis: str = "stored",
        **options: Any,
    ):
        if axis not in AXES:
            raise ValueError(f"unknown axis {axis!r}; choose one of {', '.join(AXES)}")
        self.axis, self._beta2 = axis, beta2
        super().__init__(params, lr, **options)

    def _extra_defaults(self) -> dict[str, Any]:
        return {"beta2": self._beta2}

    def _mean_axis(self, param: Tensor, group: dict[str, Any]) -> int:
        _, rows, cols = matrix_shape(param.shape, None, group["flatten"])
        per_row = self.axis == "rows" or (self.axis == "stored" and rows >= cols)
        return -1 if per_row else -2

    def _states(self, param: Tensor, group: dict[str, Any]) -> dict[str, State]:
        count, rows, cols = matrix_shape(param.shape, group["split"], group["flatten"])
        each = (rows, 1) if self._mean_axis(param, group) == -1 else (1, cols)
        variance = State((count, *each), each, param.dtype)
        return {**super()._states(param, group), "variance": variance}

    def _method(self, bucket: Bucket) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
        _, fixed, rates = super()._method(bucket)
        fixed["beta2"] = bucket.group["beta2"]
        fixed["axis"] = self._mean_axis(bucket.param, bucket.group)
        return normuon, fixed, rates
