"""Muon and NorMuon: momentum whose update is orthogonalized, matrix by matrix."""

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Method, ShardedOptimizer, State
from .buckets import Bucket
from .options import ANY
from .orthogonalize import CPU_BATCH_BYTES, METHODS, Choice, choose, native_dtype, orthogonalized
from .update import decay_of, descend

# Factor on the step of a matrix, by its stored shape (rows, cols).
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, cols: max(1.0, rows / cols) ** 0.5,  # Jordan et al.: spectral norm lr
    "rms": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,  # Liu et al., arXiv:2502.16982
}

# How many equal matrices are packed in one, or the rows of each; None: one matrix.
Split = int | tuple[int, ...] | None

# ---- The methods, on stacks (k, rows, cols). tests/reference.py has them for one matrix.


def muon(
    gradients: Tensor, weights: Tensor, momentum: Tensor, *,
    rate: Any, decay: Any, beta: Any, nesterov: bool, cautious: bool, choice: Choice,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One step of Muon. Returns (new weights, momentum), which is updated in place.

    rate: learning rate times the scale of the shape. decay: a share of the weights, or None.
    """
    momentum.lerp_(gradients, 1 - beta)
    update = torch.lerp(gradients, momentum, beta) if nesterov else momentum
    direction = orthogonalized(update, choice)
    return descend(weights, direction * rate, decay, cautious), momentum


def normuon(
    gradients: Tensor, weights: Tensor, momentum: Tensor, variance: Tensor, *,
    rate: Any, decay: Any, beta: Any, nesterov: bool, cautious: bool, choice: Choice,
    beta2: float, axis: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One step of NorMuon. Returns (new weights, momentum, variance); state is updated in place.

    variance: running mean square along `axis`, (k, rows, 1) for -1 and (k, 1, cols) for -2. It
    stays where a direction is not finite; `new_values` then keeps the weights.
    """
    momentum.lerp_(gradients, 1 - beta)
    update = torch.lerp(gradients, momentum, beta) if nesterov else momentum
    direction = orthogonalized(update, choice)
    squares = direction.to(update.dtype, copy=True).square_().sum(axis, keepdim=True)
    # The norm is kept. Both Frobenius norms follow from the sums of squares: no second pass.
    before = squares.sum((-2, -1), keepdim=True).sqrt()
    means = torch.where(before.isfinite(), squares / direction.shape[axis], variance)
    variance.lerp_(means, 1 - beta2)
    factor = variance.clamp_min(1e-10).rsqrt()  # 1e-10: rows that never had a gradient
    after = (squares * factor.square()).sum((-2, -1), keepdim=True).sqrt()
    factor = factor * (rate * before / after.clamp_min(1e-10))
    # Trap: a float32 factor keeps the step float32. Rounded to bf16, the step cost loss.
    return descend(weights, direction * factor, decay, cautious), momentum, variance


def stored_shape(param: Tensor, group: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape as which a parameter holds matrices: flattened, (outputs, all others)."""
    shape = tuple(param.shape)
    flat = group["flatten"] and len(shape) > 2
    return (shape[0], math.prod(shape[1:])) if flat else shape


def matrix_shapes(shape: tuple[int, ...], split: Split) -> list[tuple[int, int, int]]:
    """How a parameter's memory is viewed: stacks of equal matrices (matrices, rows, cols)."""
    *batch, rows, cols = shape
    stacks, short = math.prod(batch), min(rows, cols)
    if isinstance(split, tuple):
        width = cols if sum(split) == rows else short
        runs = [(len(list(run)), height, width) for height, run in groupby(split)]
        return runs * stacks or [(0, split[0], short)]
    split = split or 1
    if cols >= rows:
        return [(stacks * split, rows, cols // split)]
    return [(stacks * split, rows // split, cols)]


def require_split(split: Split, rows: int, long: int, name: str) -> None:
    """ValueError unless the parts make up the rows or the longer side of the parameter `name`."""
    side = f"{long}, the longer side of parameter {name}"
    if isinstance(split, tuple):
        whole = all(type(height) is int and height > 0 for height in split)
        if not whole or sum(split) not in (rows, long):
            side += f", or to its {rows} rows" if rows < long else ""
            raise ValueError(f"split must hold positive rows that add up to {side}, got {split}")
    elif split is not None and (type(split) is not int or split < 1 or long % split):
        raise ValueError(f"split must divide {side}, or be a tuple of rows, got {split!r}")


class Muon(ShardedOptimizer):
    """EMA momentum, Nesterov, orthogonalization, decoupled decay (Jordan et al., "Muon", 2024).

    For hidden weights (rows, cols) or stacks of them (k, rows, cols); give embeddings, heads, gains
    and biases to AdamW. Group keys: lr, lr_mul, momentum, weight_decay, wd_mul, method and backend
    (see `choose`), split (matrices packed in one, below), flatten (filters of convolutions
    (outputs, inputs, ...) are stepped as matrices (outputs, all others)). scale: "spectral" or
    "rms". cautious: no decay where it works against the step. dtype of the products; None: bf16
    where native. State, on the owning rank only: momentum, shaped as the parameter. Options of
    torch's Muon that change no step, such as ns_steps=5, are ignored. ValueError for an impossible
    setting or a backend that cannot run.

    split is the number of equal matrices, 4 for Q, K, V, O as (C, 4C), or a tuple of their rows,
    (768, 128, 128) for Q, K and V of unequal heights. A tuple that adds up to the longer side
    reads the memory in rows as long as the shorter: with six heads, (C // 3,) * 6 + (C, C) takes
    Q and K of (C, 4C) by pairs of heads, V and O whole.
    """

    RANGES: ClassVar = {**ShardedOptimizer.RANGES, "momentum": (0, 1)}
    RENAMED: ClassVar = {"momentum_buffer": "momentum"}  # torch's Muon and KellerJordan's
    more_defaults: Mapping[str, Any] = {}  # group keys that a subclass adds

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        scale: str = "spectral",
        split: Split = None,
        flatten: bool = False,
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
        defaults |= {"split": split, "flatten": flatten, "method": method, "backend": backend}
        super().__init__(params, {**defaults, **self.more_defaults}, **options)

    def _check(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        super()._check(name, param, group)
        shape = stored_shape(param, group)
        if len(shape) not in (2, 3):
            rule = "Muon needs (rows, cols) or (k, rows, cols); give it to AdamW"
            rule += ", or flatten=True if these are filters" if len(shape) > 3 else ""
            raise ValueError(f"parameter {name} has shape {shape}, {rule}")
        require_split(group["split"], shape[-2], max(shape[-2:]), name)
        for _, rows, cols in matrix_shapes(shape, group["split"]):
            self._choice(param, group, rows, cols)

    def _means_the_same(self, group: Mapping[str, Any]) -> dict[str, tuple[Any, ...] | None]:
        scales = {"spectral": (None, "original"), "rms": ("match_rms_adamw",)}
        same: dict[str, Any] = {"nesterov": (self.nesterov,), "adjust_lr_fn": scales[self.scale]}
        same |= dict.fromkeys(("ns_steps", "ns_coefficients"), ANY)
        if group.get("method") in METHODS:  # a saved group of torch has none: it stays as built
            iterations = METHODS[group["method"]].coefficients
            same["ns_steps"] = (len(iterations),)
            same["ns_coefficients"] = iterations[:1] if len({*iterations}) == 1 else ()
        # Matrices are scaled before their norm is taken, which an eps then cannot change. SGD,
        # which has a dampening, does not average its momentum.
        return {"dampening": (), "eps": ANY} | super()._means_the_same(group) | same

    def _choice(self, param: Tensor, group: dict[str, Any], rows: int, cols: int) -> Choice:
        dtype = self.dtype or native_dtype(param.device)
        return choose(*sorted((rows, cols)), group["method"], dtype, param.device, group["backend"])

    def _cuts(self, param: Tensor, group: dict[str, Any], ranks: int) -> list[tuple[int, ...]]:
        # Several ranks can share the matrices of a parameter. One rank alone handles fewer tensors.
        cuts: list[tuple[int, ...]] = []
        for count, rows, cols in matrix_shapes(stored_shape(param, group), group["split"]):
            most = 1
            if ranks == 1:
                most = count if param.device.type == "cpu" else self.elsewhere // (rows * cols) or 1
            whole, rest = divmod(count, most)
            cuts += [(most, rows, cols)] * whole + [(rest, rows, cols)] * (rest > 0)
        return cuts

    def _states(self, param: Tensor, group: dict[str, Any]) -> dict[str, State]:
        return {"momentum": State(param.shape, (-1, -1), param.dtype)}

    def _method(self, bucket: Bucket) -> Method:
        group = bucket.group
        scale = SCALES[self.scale](*stored_shape(bucket.param, group)[-2:])
        rates = {"rate": group["lr"] * group["lr_mul"] * scale, "beta": group["momentum"]}
        choice = self._choice(bucket.param, group, *bucket.shape[1:])
        fixed = {"nesterov": self.nesterov, "cautious": self.cautious, "choice": choice}
        return muon, fixed, rates | {"decay": decay_of(group)}

    def describe(self) -> str:
        """The line of `ShardedOptimizer`, then one a shape: method, backend, dtype."""
        lines = {super().describe(): None}
        for param, group in self._group_of.items():
            for _, rows, cols in matrix_shapes(stored_shape(param, group), group["split"]):
                method, dtype, backend = self._choice(param, group, rows, cols)
                lines[f"{rows} x {cols}: {method}, {backend} products in {dtype}"] = None
        return "\n".join(lines)


class NorMuon(Muon):
    """Muon with the update divided by a running RMS, at unchanged norm (arXiv:2510.05491).

    As in modded-nanogpt, there is one RMS for each row of a matrix if the parameter has rows >=
    cols, else for each column; in the paper, always for each row. beta2, also a group key: weight
    of the past. There is no bias correction: when gradients return to a row after a pause, its step
    is 1 / sqrt(1 - beta2) times as long. The rest is Muon's.
    State besides momentum: variance, (matrices, rows, 1) or (matrices, 1, cols); (all rows, 1) if
    split says the rows of each matrix.
    """

    RANGES: ClassVar = {**Muon.RANGES, "beta2": (0, 1)}

    def __init__(self, params: Iterable[Any], lr: float, *, beta2: float = 0.95, **options: Any):
        self.more_defaults = {"beta2": beta2}  # before the constructor, which reads it
        super().__init__(params, lr, **options)

    def _states(self, param: Tensor, group: dict[str, Any]) -> dict[str, State]:
        shapes = matrix_shapes(stored_shape(param, group), group["split"])
        count = sum(matrices for matrices, _, _ in shapes)
        _, rows, cols = shapes[0]
        variance = State((count, 1, cols), (1, -1), param.dtype)
        if mean_axis(param, group) == -1:
            whole: tuple[int, ...] = (count, rows, 1)
            if isinstance(group["split"], tuple):
                whole = (sum(matrices * height for matrices, height, _ in shapes), 1)
            variance = State(whole, (-1, 1), param.dtype)
        return super()._states(param, group) | {"variance": variance}

    def _method(self, bucket: Bucket) -> Method:
        _, fixed, rates = super()._method(bucket)
        fixed["beta2"] = bucket.group["beta2"]
        fixed["axis"] = mean_axis(bucket.param, bucket.group)
        return normuon, fixed, rates


def mean_axis(param: Tensor, group: Mapping[str, Any]) -> int:
    """The axis that NorMuon's mean squares run along: -1 gives one number a row."""
    rows, cols = stored_shape(param, group)[-2:]
    return -1 if rows >= cols else -2
