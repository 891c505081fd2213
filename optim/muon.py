"""Muon and NorMuon: momentum whose update for each matrix is replaced by a nearly orthogonal one."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Lists, ShardedOptimizer, Update
from .orthogonalize import METHODS, batch_limit, choose, native_dtype, orthogonalize, spectral_norm, work
from .sharding import Gradients, Layout, Parcel, Team, Unit, deal

# How the step of a (rows, cols) matrix depends on its stored shape.
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, cols: max(1.0, rows / cols) ** 0.5,  # Jordan et al.; lr is in units of spectral norm
    "rms": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,  # Liu et al., arXiv:2502.16982; lr as for AdamW
    "none": lambda rows, cols: 1.0,
}
AXES = ("stored", "rows", "cols")
VOCABULARY = 20_000  # a side as long as this, and six times the other, is one of tokens


def matrix_shape(shape: torch.Size, split: int | None) -> tuple[int, int, int]:
    """(matrices, rows, cols) that a parameter's memory is viewed as: the longer side is divided by `split`."""
    *batch, rows, cols = shape
    split = split or 1
    count = math.prod(batch) * split
    return (count, rows, cols // split) if cols >= rows else (count, rows // split, cols)


class Muon(ShardedOptimizer):
    """EMA momentum, Nesterov, orthogonalization, decoupled decay (Jordan et al., "Muon", 2024), on 1..N ranks.

    For hidden weights (..., rows, cols); give embeddings, heads, gains and biases to Adam, and hold the kernels of a
    convolution as (out, in * height * width). Group keys: lr, lr_mul, momentum, weight_decay, wd_mul, method, backend
    (see `orthogonalize`), split (view each matrix's memory as that many: 4 for Q, K, V, O packed as (C, 4C)).
    scale: "spectral", "rms", "none". cautious: no decay against the step. dtype of the products: "auto" is bf16 where
    native. exact_accumulation: bf16 weights are updated as float32 ones. State, on the owning rank alone: momentum.
    ValueError for an impossible setting or a backend that cannot run, TypeError for a DTensor.
    """

    RANGES: ClassVar = {**ShardedOptimizer.RANGES, "momentum": (0, 1, 0.95)}
    ELEMENTWISE: ClassVar = ("momentum",)

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
        dtype: torch.dtype | str = "auto",
        **options: Any,
    ):
        if scale not in SCALES:
            raise ValueError(f"unknown scale {scale!r}; choose one of {', '.join(SCALES)}")
        if dtype != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f'dtype must be "auto" or a floating-point torch.dtype, got {dtype!r}')
        self.nesterov, self.scale = nesterov, scale
        self.dtype = None if isinstance(dtype, str) else dtype
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "split": split, "method": method}
        super().__init__(params, {**defaults, "backend": backend, **self._extra_defaults()}, **options)

    def _extra_defaults(self) -> dict[str, Any]:
        """Group keys that a subclass adds."""
        return {}

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["method"] not in METHODS:
            raise ValueError(f"unknown method {group['method']!r}; choose one of {', '.join(METHODS)}")

    def _check_parameter(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        what, split = f"parameter {name} has shape {tuple(param.shape)}", group["split"]
        if param.ndim < 2:
            raise ValueError(f"{what}, Muon needs matrices; give it to Adam")
        if param.ndim > 3:
            raise ValueError(f"{what}; hold convolution kernels as (out, in * height * width)")
        longer = max(param.shape[-2:])
        if split is not None and (type(split) is not int or split < 1 or longer % split):
            raise ValueError(f"split must divide {longer}, the longer side of parameter {name}, got {split!r}")
        matrices = matrix_shape(param.shape, split)
        shorter, longer = sorted(matrices[1:])
        if longer >= max(VOCABULARY, 6 * shorter):
            raise ValueError(f"{what}, as embeddings and output heads have; give it to Adam")
        self._choice(matrices, group, param.device)

    def _choice(self, shape: tuple[int, ...], group: dict[str, Any], device: torch.device) -> Any:
        short, long = sorted(shape[-2:])
        return choose(short, long, group["method"], self.dtype or native_dtype(device), device, group["backend"])

    def describe(self, world_size: int | None = None) -> str:
        """What orthogonalizes matrices of each shape, at what cost, and the owner table of `ShardedOptimizer`."""
        found = {}
        for param, group in self._group_of.items():
            shape = matrix_shape(param.shape, group["split"])
            short, long = sorted(shape[-2:])
            choice = self._choice(shape, group, param.device)
            cost = 2e-9 * work(short, long, choice.runs, choice.backend)
            dtype = self.dtype or native_dtype(param.device)
            found[short, long, choice] = f"{short} x {long}: {choice}, {cost:.3g} GFLOP a matrix in {str(dtype)[6:]}"
        return "\n".join([*found.values(), super().describe(world_size)])

    def _layouts(self, team: Team) -> list[Layout]:
        together: dict[Any, list[Unit]] = {}
        for param, group in self._group_of.items():
            count, rows, cols = matrix_shape(param.shape, group["split"])
            # Several ranks can share a parameter's matrices; one rank has fewer tensors to handle.
            each = count if team.size == 1 or not self._divisible else 1
            units = [Unit(param, index * rows * cols, (each, rows, cols)) for index in range(0, count, each)]
            together.setdefault((param.dtype, param.device), []).extend(units)
        order = {param: number for number, param in enumerate(self._group_of)}
        layouts = []
        for units in together.values():
            for shares in deal(units, team.size) if team.size > 1 else [[units]]:
                for share in shares:  # neighbours then share a batched call
                    share.sort(key=lambda unit: (self._key(unit), order[unit.param], unit.start))
                layouts.append((Parcel if team.size > 1 else Layout)(shares, team))
        return layouts

    @property
    def _divisible(self) -> bool:
        """Whether the matrices of one parameter can be stepped apart."""
        return True

    def _key(self, unit: Unit) -> tuple[Any, ...]:
        """Units with the same are orthogonalized in one call."""
        group = self._group_of[unit.param]
        return unit.shape, group["method"], group["backend"]

    def fall_back(self) -> None:
        """From now on the plain backend; says so once."""
        forced = [group for group in self.param_groups if group["backend"] != "plain"]
        for group in forced:
            group["backend"] = "plain"
        if forced:
            warnings.warn("an orthogonalization went wrong; its optimizer falls back to backend 'plain'", stacklevel=2)

    def _blank(self, param: Tensor, device: Any) -> dict[str, Tensor]:
        return {"momentum": torch.zeros(param.shape, dtype=self._state_dtype(param), device=device)}

    def _updates(self, gradients: Gradients) -> Iterator[Update]:
        for _, run in groupby(gradients, key=lambda pair: self._key(pair[0])):
            pairs = list(run)
            first = pairs[0][0]
            limit = batch_limit(first.numel, self.dtype or native_dtype(first.param.device), first.param.device)
            # A slice goes through all its passes while it is in the cache.
            for start in range(0, len(pairs), limit):
                yield from self._orthogonalized(pairs[start : start + limit])

    def _orthogonalized(self, gradients: Gradients) -> list[Update]:
        """The updates of k units of one shape, one for each param group, from one batch (k, matrices, rows, cols)."""
        batch = torch.stack([grad for _, grad in gradients]).to(self._state_dtype(gradients[0][0].param))
        if self.grad_divisor != 1:
            batch.div_(self.grad_divisor)
        wide = torch.promote_types(batch.dtype, torch.float32)
        norms = torch.linalg.vector_norm(batch, dim=(1, 2, 3), dtype=wide).float() if self._step.measuring else None
        updates, scale = [], SCALES[self.scale]
        for _, run in groupby(range(len(gradients)), key=lambda index: id(self._group_of[gradients[index][0].param])):
            units, grads = zip(*(gradients[index] for index in run), strict=True)
            group = self._group_of[units[0].param]
            rates = [group["lr"] * group["lr_mul"] * scale(*unit.param.shape[-2:]) for unit in units]
            updates.append(Update(list(units), list(grads), group, rates))
        self._apply_momentum(batch, updates)
        group = updates[0].group
        matrices = orthogonalize(batch.flatten(0, 1), group["method"], self.dtype, group["backend"])
        rows: tuple[Tensor, ...] = ()
        if norms is not None:
            rows = torch.stack([norms, spectral_norm(matrices).view(batch.shape[:2]).amax(1)], dim=1).unbind()
        directions = self._normalized(matrices.view(batch.shape), updates).unbind()
        for update in updates:
            count = len(update.units)
            update.directions, directions = list(directions[:count]), directions[count:]
            update.measures, rows = list(rows[:count]), rows[count:]
        return updates

    def _apply_momentum(self, batch: Tensor, updates: list[Update]) -> None:
        """What is orthogonalized: momentum b m + (1 - b) g, and with Nesterov the same once more, in one pass."""
        inputs = batch.unbind()
        for update in updates:
            mine, inputs = inputs[: len(update.units)], inputs[len(update.units) :]
            kept = update.group["momentum"] ** (2 if self.nesterov else 1)
            torch._foreach_lerp_(mine, [self._slots[unit]["momentum"] for unit in update.units], kept)

    def _normalized(self, directions: Tensor, updates: list[Update]) -> Tensor:
        kept = self._kept(updates[0].units[0], directions.shape, directions.dtype)
        return directions if kept is None else kept.copy_(directions)

    def _advance(self, grads: list[Tensor], state: Lists, group: dict[str, Any]) -> None:
        torch._foreach_lerp_(state[0], grads, 1 - group["momentum"])

    def _steps(self, state: Lists, directions: list[Tensor], rates: list[Any], group: dict[str, Any]) -> list[Tensor]:
        return list(torch._foreach_mul(directions, rates))


class NorMuon(Muon):
    """Muon whose update is divided by a running RMS and keeps its norm (Li et al., "NorMuon", arXiv:2510.05491).

    axis "rows": one RMS a row of each matrix; "cols": one a column; "stored": a row if the stored shape has
    rows >= cols, else a column. With split_variance=False it is taken over the stored matrix, not each of its `split`
    parts. beta2, a group key too, is the weight of the past; there is no bias correction, so a row whose gradients
    return after a pause takes a step 1 / sqrt(1 - beta2) times the others'; waking_limit bounds that factor (None: no
    bound, as in modded-nanogpt). The rest is Muon's.
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
        waking_limit: float | None = None,
        **options: Any,
    ):
        if axis not in AXES:
            raise ValueError(f"unknown axis {axis!r}; choose one of {', '.join(AXES)}")
        if waking_limit is not None and not waking_limit >= 1:
            raise ValueError(f"waking_limit must be at least 1, got {waking_limit!r}; 2 is usual, None sets no limit")
        self.axis, self.split_variance, self.waking_limit, self._beta2 = axis, split_variance, waking_limit, beta2
        super().__init__(params, lr, **options)

    def _extra_defaults(self) -> dict[str, Any]:
        return {"beta2": self._beta2}

    @property
    def _divisible(self) -> bool:
        return self.split_variance

    def _key(self, unit: Unit) -> tuple[Any, ...]:
        # Whether the mean runs over rows or columns depends on the stored shape.
        return (*super()._key(unit), self._mean_axis(unit.param.shape), () if self._divisible else unit.param.shape)

    def _mean_axis(self, shape: torch.Size) -> int:
        per_row = self.axis == "rows" or (self.axis == "stored" and shape[-2] >= shape[-1])
        return -1 if per_row else -2

    def _blank(self, param: Tensor, device: Any) -> dict[str, Tensor]:
        split = self._group_of[param]["split"] if self.split_variance else None
        count, rows, cols = matrix_shape(param.shape, split)
        kept = (count, rows, 1) if self._mean_axis(param.shape) == -1 else (count, 1, cols)
        return {
            **super()._blank(param, device),
            "variance": torch.zeros(kept, dtype=self._state_dtype(param), device=device),
        }

    def _normalized(self, directions: Tensor, updates: list[Update]) -> Tensor:
        like = updates[0].units[0].param
        axis = self._mean_axis(like.shape)
        # (k, matrices of a unit, rows, cols)
        matrices = directions if self.split_variance else directions.view(len(directions), -1, *like.shape[-2:])
        wide = torch.promote_types(directions.dtype, torch.float32)
        squares = matrices.to(wide).square().sum(dim=axis, keepdim=True)
        means = squares / matrices.shape[axis]
        variances = self._new_variances(means, updates)
        if self.waking_limit is not None:
            variances = torch.maximum(variances, means / self.waking_limit**2)
        factor = variances.clamp_min(1e-10).rsqrt()
        # Both Frobenius norms follow from the sums of squares: the matrix is read once and written once.
        before = squares.sum(dim=(-2, -1), keepdim=True).sqrt()
        after = (squares * factor.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
        factor *= before / after.clamp_min(1e-10)
        kept = self._kept(updates[0].units[0], matrices.shape, wide)  # float32: rounding it to bf16 once more cost loss
        return torch.mul(matrices, factor, out=kept).view(directions.shape)

    def _new_variances(self, means: Tensor, updates: list[Update]) -> Tensor:
        """The running means, shaped as `means`; they become state when the update is written."""
        parts, found = means.unbind(), list[Tensor]()
        for update in updates:
            mine, parts = parts[: len(update.units)], parts[len(update.units) :]
            for unit, mean in zip(update.units, mine, strict=True):
                old = self._slots[unit]["variance"]
                # Rounded as it is stored: the step follows from the state.
                new = torch.lerp(old.view_as(mean).to(mean.dtype), mean, 1 - update.group["beta2"]).to(old.dtype)
                update.changes.append((old, new.view_as(old)))
                found.append(new.to(mean.dtype))
        return torch.stack(found)
