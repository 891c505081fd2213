"""Muon and NorMuon: momentum whose update for each matrix is replaced by a nearly orthogonal one."""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from .orthogonalize import METHODS, batch_limit, orthogonalize
from .sharding import Gradients, Layout, ShardedOptimizer, Stack

# How the step of a (rows, cols) matrix depends on its stored shape.
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, cols: max(1.0, rows / cols) ** 0.5,  # Jordan et al.; lr is in units of spectral norm
    "rms": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,  # Liu et al., arXiv:2502.16982; lr as for AdamW
    "none": lambda rows, cols: 1.0,
}
AXES = ("stored", "rows", "cols")


def matrix_shape(shape: torch.Size, split: int | None) -> tuple[int, int, int]:
    """(split, rows, cols) of the matrices that a stored one is viewed as: its longer side is divided by `split`."""
    rows, cols = shape[-2:]
    split = 1 if split is None else split
    return (split, rows, cols // split) if cols >= rows else (split, rows // split, cols)


class Muon(ShardedOptimizer):
    """EMA momentum, Nesterov, orthogonalization, decoupled decay (Jordan et al., "Muon", 2024), on 1..N ranks.

    For hidden weights (..., rows, cols); give embeddings, heads, gains and biases to Adam. Group keys: lr, lr_mul,
    momentum, weight_decay, wd_mul, method (see `orthogonalize`), split (view each matrix's memory as that many: 4 for
    Q, K, V, O packed as (C, 4C)). scale: "spectral", "rms", "none". dtype of the products: "auto" is bf16 where native.
    State, on the owning rank alone: momentum. ValueError for an impossible setting, TypeError for a DTensor.
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
        method: str = "polar_express",
        dtype: torch.dtype | str = "auto",
        process_group: Any = None,
        grad_divisor: float = 1,
    ):
        if scale not in SCALES:
            raise ValueError(f"unknown scale {scale!r}; choose one of {', '.join(SCALES)}")
        if dtype != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f'dtype must be "auto" or a floating-point torch.dtype, got {dtype!r}')
        self.nesterov, self.scale = nesterov, SCALES[scale]
        self.dtype = None if isinstance(dtype, str) else dtype
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "split": split, "method": method}
        super().__init__(params, {**defaults, **self._extra_defaults()}, process_group, grad_divisor)

    def _extra_defaults(self) -> dict[str, Any]:
        """Group keys that a subclass adds."""
        return {}

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["method"] not in METHODS:
            raise ValueError(f"unknown method {group['method']!r}; choose one of {', '.join(METHODS)}")

    def _check_parameter(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        if param.ndim < 2:
            raise ValueError(f"parameter {name} has shape {tuple(param.shape)}, Muon needs matrices; give it to Adam")
        split, longer = group["split"], max(param.shape[-2:])
        if split is not None and (split < 1 or longer % split):
            raise ValueError(f"split must divide {longer}, the longer side of parameter {name}, got {split}")

    def _layouts(self, params: list[Tensor]) -> list[Layout]:
        stacks: dict[Any, list[Tensor]] = {}
        for param in sorted(params, key=self._batch_key):  # neighbours then share a batched call
            stacks.setdefault((param.shape, param.dtype, param.device), []).append(param)
        # Smallest first: the first update starts while the large reductions still travel.
        by_size = sorted(stacks.values(), key=lambda stack: len(stack) * stack[0].numel())
        kind = Stack if self.team.size > 1 else Layout
        return [kind(stack, self.team) for stack in by_size]

    def _batch_key(self, param: Tensor) -> tuple[int, str]:
        group = self._group_of[param]
        return group["split"] or 1, group["method"]

    def _blank(self, param: Tensor, device: Any) -> dict[str, Tensor]:
        return {"momentum": torch.zeros(param.shape, dtype=param.dtype, device=device)}

    def _update(self, layout: Layout, gradients: Gradients) -> None:
        like = layout.params[0]
        limit = batch_limit(like.numel(), like.dtype, like.device)
        for (split, method), run in groupby(gradients, key=lambda pair: self._batch_key(pair[0])):
            pairs = list(run)
            # A slice goes through all its passes while it is in the cache.
            for start in range(0, len(pairs), limit):
                params, grads = zip(*pairs[start : start + limit], strict=True)
                self._step_alike(list(params), torch.stack(grads), split, method)

    def _step_alike(self, params: list[Tensor], update: Tensor, split: int, method: str) -> None:
        """Step k parameters of one shape at once; `update`, their stacked gradients (k, *shape), is overwritten."""
        if self.grad_divisor != 1:
            update.div_(self.grad_divisor)
        groups = [self._group_of[param] for param in params]
        self._apply_momentum(params, list(update), groups)
        matrices = update.view(*update.shape[:-2], *matrix_shape(update.shape, split))
        direction = self._normalize(params, orthogonalize(matrices, method, self.dtype), groups)
        # The step is added in float32 at least, and rounded once to the dtype of the parameter.
        direction = direction.reshape(update.shape).to(torch.promote_types(update.dtype, torch.float32))
        scale = self.scale(*update.shape[-2:])
        steps = list(direction)
        torch._foreach_mul_(steps, [group["lr"] * group["lr_mul"] * scale for group in groups])
        if any(group["weight_decay"] for group in groups):
            torch._foreach_mul_(params, [1 - g["lr"] * g["weight_decay"] * g["wd_mul"] for g in groups])
        torch._foreach_sub_(params, steps)

    def _apply_momentum(self, params: list[Tensor], grads: list[Tensor], groups: list[dict[str, Any]]) -> None:
        buffers = [self.state[param]["momentum"] for param in params]
        torch._foreach_lerp_(buffers, grads, [1 - group["momentum"] for group in groups])
        if self.nesterov:
            torch._foreach_lerp_(grads, buffers, [group["momentum"] for group in groups])
        else:
            torch._foreach_copy_(grads, buffers)

    def _normalize(self, params: list[Tensor], direction: Tensor, groups: list[dict[str, Any]]) -> Tensor:
        return direction


class NorMuon(Muon):
    """Muon whose update is divided by a running RMS and keeps its norm (Li et al., "NorMuon", arXiv:2510.05491).

    axis "rows": one RMS a row of each matrix; "cols": one a column; "stored": a row if the stored shape has
    rows >= cols, else a column. With split_variance=False it is taken over the stored matrix, not each of its `split`
    parts. beta2, a group key too, is the weight of the past; there is no bias correction. The rest is Muon's.
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
        split_variance: bool = True,
        **options: Any,
    ):
        if axis not in AXES:
            raise ValueError(f"unknown axis {axis!r}; choose one of {', '.join(AXES)}")
        self.axis, self.split_variance, self._beta2 = axis, split_variance, beta2
        super().__init__(params, lr, **options)

    def _extra_defaults(self) -> dict[str, Any]:
        return {"beta2": self._beta2}

    def _mean_axis(self, shape: torch.Size) -> int:
        per_row = self.axis == "rows" or (self.axis == "stored" and shape[-2] >= shape[-1])
        return -1 if per_row else -2

    def _blank(self, param: Tensor, device: Any) -> dict[str, Tensor]:
        split, rows, cols = matrix_shape(param.shape, self._group_of[param]["split"] if self.split_variance else None)
        kept = (rows, 1) if self._mean_axis(param.shape) == -1 else (1, cols)
        variance = torch.zeros(*param.shape[:-2], split, *kept, dtype=param.dtype, device=device)
        return {**super()._blank(param, device), "variance": variance.flatten(0, -3)}

    def _normalize(self, params: list[Tensor], direction: Tensor, groups: list[dict[str, Any]]) -> Tensor:
        axis = self._mean_axis(params[0].shape)
        if not self.split_variance:
            direction = direction.reshape(len(params), *params[0].shape[:-2], 1, *params[0].shape[-2:])
        matrices = direction.flatten(1, -3)  # (k, matrices of a parameter, rows, cols)
        wide = torch.promote_types(direction.dtype, torch.float32)
        squares = matrices.to(wide).square().sum(dim=axis, keepdim=True)
        variances = [self.state[param]["variance"] for param in params]
        means = (squares / matrices.shape[axis]).to(variances[0].dtype)
        torch._foreach_lerp_(variances, list(means), [1 - group["beta2"] for group in groups])
        factor = torch.stack(variances).to(wide).clamp_min(1e-10).rsqrt()
        # Both Frobenius norms follow from the sums of squares: the matrix is read once and written once.
        before = squares.sum(dim=(-2, -1), keepdim=True).sqrt()
        after = (squares * factor.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
        return matrices * (factor * (before / after.clamp_min(1e-10)))
