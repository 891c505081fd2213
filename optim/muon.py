"""Muon and NorMuon: momentum whose update is orthogonalized, matrix by matrix."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import ShardedOptimizer, State, decay_of, descend
from .buckets import Bucket
from .orthogonalize import CPU_BATCH_BYTES, Choice, choose, native_dtype, orthogonalized

# Factor on the step of a matrix, by its stored shape (rows, cols).
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, cols: max(1.0, rows / cols) ** 0.5,  # Jordan et al.: spectral norm lr
    "rms": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,  # Liu et al., arXiv:2502.16982
}


# ---- The methods, on stacks (k, rows, cols). tests/reference.py has them for one matrix.


def muon(
    gradients: Tensor, weights: Tensor, momentum: Tensor, *,
    rate: Any, decay: Any, beta: Any, nesterov: bool, cautious: bool, choice: Choice,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One step of Muon. Returns new (weights, momentum).

    rate: learning rate times the scale of the shape. decay: a share of the weights, or None.
    """
    momentum = torch.lerp(momentum, gradients, 1 - beta)
    update = torch.lerp(gradients, momentum, beta) if nesterov else momentum
    direction = orthogonalized(update, choice)
    return descend(weights, direction * rate, decay, cautious), momentum


def normuon(
    gradients: Tensor, weights: Tensor, momentum: Tensor, variance: Tensor, *,
    rate: Any, decay: Any, beta: Any, nesterov: bool, cautious: bool, choice: Choice,
    beta2: float, axis: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One step of NorMuon. Returns new (weights, momentum, variance).

    variance: running mean square along `axis`, (k, rows, 1) for -1 and (k, 1, cols) for -2.
    """
    momentum = torch.lerp(momentum, gradients, 1 - beta)
    update = torch.lerp(gradients, momentum, beta) if nesterov else momentum
    direction = orthogonalized(update, choice)
    squares = direction.to(update.dtype).square().sum(axis, keepdim=True)
    variance = torch.lerp(variance, squares / direction.shape[axis], 1 - beta2)
    factor = variance.clamp_min(1e-10).rsqrt()  # 1e-10: rows that never had a gradient
    # The norm is kept. Both Frobenius norms follow from the sums of squares: no second pass.
    before = squares.sum((-2, -1), keepdim=True).sqrt()
    after = (squares * factor.square()).sum((-2, -1), keepdim=True).sqrt()
    factor = factor * (rate * before / after.clamp_min(1e-10))
    # Trap: a float32 factor keeps the step float32. Rounded to bf16, the step cost loss.
    return descend(weights, direction * factor, decay, cautious), momentum, variance


def matrix_shape(shape: torch.Size, split: int | None) -> tuple[int, int, int]:
    """How a parameter's memory is viewed: (matrices, rows, cols). split cuts the longer side."""
    *batch, rows, cols = shape
    split = split or 1
    count = math.prod(batch) * split
    return (count, rows, cols // split) if cols >= rows else (count, rows // split, cols)


class Muon(ShardedOptimizer):
    """EMA momentum, Nesterov, orthogonalization, decoupled decay (Jordan et al., "Muon", 2024).

    For hidden weights (rows, cols) or stacks of them (k, rows, cols); give embeddings, heads, gains
    and biases to Adam. Group keys: lr, lr_mul, momentum, weight_decay, wd_mul, method and backend
    (see `choose`), split (number of matrices packed in one: 4 for Q, K, V, O as (C, 4C)). scale:
    "spectral" or "rms". cautious: no decay where it works against the step. dtype of the products;
    None: bf16 where native. State, on the owning rank only: momentum, shaped as the parameter.
    ValueError for an impossible setting or a backend that cannot run.
    """

    RANGES: ClassVar = {**ShardedOptimizer.RANGES, "momentum": (0, 1)}
    more_defaults: Mapping[str, Any] = {}  # group keys that a subclass adds

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
        method: str = "polar_express",
        backend: str = "auto",
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        if scale not in SCALES:
            raise ValueError(f"unknown scale {scale!r}; choose one of {', '.join(SCALES)}")
        self.nesterov, self.scale, self.dtype = nesterov, scale, dtype
        self.at_once = CPU_BATCH_BYTES // (dtype or native_dtype(torch.device("cpu"))).itemsize
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        defaults |= {"split": split, "method": method, "backend": backend}
        super().__init__(params, {**defaults, **self.more_defaults}, **options)

    def _check(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        super()._check(name, param, group)
        if param.ndim not in (2, 3):
            what = f"parameter {name} has shape {tuple(param.shape)}"
            raise ValueError(f"{what}, Muon needs (rows, cols) or (k, rows, cols); give it to Adam")
        split, long = group["split"], max(param.shape[-2:])
        if split is not None and (split < 1 or long % split):
            side = f"{long}, the longer side of parameter {name}"
            raise ValueError(f"split must divide {side}, got {split!r}")
        self._choice(param, group)

    def _choice(self, param: Tensor, group: dict[str, Any]) -> Choice:
        _, rows, cols = matrix_shape(param.shape, group["split"])
        dtype = self.dtype or native_dtype(param.device)
        short, long = min(rows, cols), max(rows, cols)
        return choose(short, long, group["method"], dtype, param.device, group["backend"])

    def _cuts(self, param: Tensor, group: dict[str, Any], ranks: int) -> list[tuple[int, ...]]:
        # Several ranks can share the matrices of a parameter. One rank alone handles fewer tensors.
        count, rows, cols = matrix_shape(param.shape, group["split"])
        return [(count, rows, cols)] if ranks == 1 else [(1, rows, cols)] * count

    def _states(self, param: Tensor, group: dict[str, Any]) -> dict[str, State]:
        return {"momentum": State(param.shape, None, param.dtype)}

    def _method(self, bucket: Bucket) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
        group = bucket.group
        scale = SCALES[self.scale](*bucket.param.shape[-2:])
        rates = {"rate": group["lr"] * group["lr_mul"] * scale, "beta": group["momentum"]}
        choice = self._choice(bucket.param, group)
        fixed = {"nesterov": self.nesterov, "cautious": self.cautious, "choice": choice}
        return muon, fixed, rates | decay_of(group)

    def describe(self) -> str:
        """The line of `ShardedOptimizer`, then one a shape: method, backend, dtype."""
        lines = [super().describe()]
        for param, group in self._group_of.items():
            _, rows, cols = matrix_shape(param.shape, group["split"])
            choice = self._choice(param, group)
            products = f"{choice.backend} products in {choice.dtype}"
            line = f"{rows} x {cols}: {choice.method}, {products}"
            if line not in lines:
                lines.append(line)
        return "\n".join(lines)


class NorMuon(Muon):
    """Muon with the update divided by a running RMS, at unchanged norm (arXiv:2510.05491).

    As in modded-nanogpt, there is one RMS for each row of a matrix if the parameter has rows >=
    cols, else for each column; in the paper, always for each row. beta2, also a group key: weight
    of the past. There is no bias correction: when gradients return to a row after a pause, its step
    is 1 / sqrt(1 - beta2) times as long. The rest is Muon's.
    State besides momentum: variance, (matrices, rows, 1) or (matrices, 1, cols).
    """

    RANGES: ClassVar = {**Muon.RANGES, "beta2": (0, 1)}

    def __init__(self, params: Iterable[Any], lr: float, *, beta2: float = 0.95, **options: Any):
        self.more_defaults = {"beta2": beta2}  # before the constructor, which reads it
        super().__init__(params, lr, **options)

    def _states(self, param: Tensor, group: dict[str, Any]) -> dict[str, State]:
        count, rows, cols = matrix_shape(param.shape, group["split"])
        each = (rows, 1) if mean_axis(param) == -1 else (1, cols)
        variance = State((count, *each), each, param.dtype)
        return {**super()._states(param, group), "variance": variance}

    def _method(self, bucket: Bucket) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
        _, fixed, rates = super()._method(bucket)
        fixed["beta2"] = bucket.group["beta2"]
        fixed["axis"] = mean_axis(bucket.param)
        return normuon, fixed, rates


def mean_axis(param: Tensor) -> int:
    """The axis that NorMuon's mean squares run along: -1 gives one number a row."""
    rows, cols = param.shape[-2:]
    return -1 if rows >= cols else -2
