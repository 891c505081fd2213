"""Adam with decoupled decay, sharded by rows over 1..N ranks."""

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Lists, ShardedOptimizer, Update
from .sharding import Gradients, Layout, Mirror, Parcel, Team, Unit

# A smaller parameter is updated on every rank: that costs less than collectives of its own.
LARGE = 2**15


class Adam(ShardedOptimizer):
    """Adam (Kingma & Ba, arXiv:1412.6980) with decoupled decay: p -= lr' m / (sqrt(v) + eps).

    lr' = lr lr_mul sqrt(1 - beta2^t) / (1 - beta1^t), so eps acts before bias correction, as in the paper's section 2.
    Group keys: lr, lr_mul, betas, eps, weight_decay, wd_mul. Computes in float32 at least; state_dtype None stores the
    state as the parameter. cautious: no decay against the step. exact_accumulation: bf16 weights are updated as float32
    ones. Large parameters are sharded by rows. ValueError for an impossible setting, TypeError for a DTensor.
    """

    RANGES: ClassVar = {**ShardedOptimizer.RANGES, "eps": (0, float("inf"), 1e-8)}
    ELEMENTWISE: ClassVar = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_dtype: torch.dtype | None = None,
        **options: Any,
    ):
        if state_dtype is not None and not state_dtype.is_floating_point:
            raise ValueError(f"state_dtype must be floating-point, got {state_dtype}; None follows the parameter")
        self.state_dtype = state_dtype
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **options)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        betas = group["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}; usual values are (0.9, 0.95)")

    def _layouts(self, team: Team) -> list[Layout]:
        params = sorted(self._group_of, key=lambda param: (param.numel() >= LARGE, str(param.dtype), param.numel()))
        if team.size == 1:
            return [Layout([[Unit(param, 0, param.shape) for param in params]], team)]
        small = [param for param in params if param.numel() < LARGE]
        layouts: list[Layout] = [Mirror([[Unit(param, 0, param.shape) for param in small]], team)] if small else []
        # Smallest first: the first update starts while the large reductions still travel.
        return [*layouts, *(Parcel(rows(param, team.size), team) for param in params[len(small) :])]

    def _blank(self, param: Tensor, device: Any) -> dict[str, Tensor]:
        dtype = self.state_dtype or self._state_dtype(param)
        moments = {name: torch.zeros(param.shape, dtype=dtype, device=device) for name in self.ELEMENTWISE}
        return {"step": torch.zeros((), dtype=torch.int64, device=device), **moments}

    def _key(self, unit: Unit) -> tuple[Any, ...]:
        """Units with the same are stepped in one call."""
        return id(self._group_of[unit.param]), unit.param.dtype, unit.param.device

    def _updates(self, gradients: Gradients) -> Iterator[Update]:
        for _, run in groupby(gradients, key=lambda pair: self._key(pair[0])):
            units, grads = zip(*run, strict=True)
            group = self._group_of[units[0].param]
            # Counts stay on the device, since whether this step counts is decided there.
            counts = [self._slots[unit]["step"] for unit in units]
            t = torch.stack(counts) + 1
            beta1, beta2 = group["betas"]
            corrections = (1 - beta2 ** t.double()).sqrt() / (1 - beta1 ** t.double())
            rates = (corrections * (group["lr"] * group["lr_mul"])).unbind()
            update = Update(list(units), list(grads), group, list(rates))
            update.changes = list(zip(counts, t.unbind(), strict=True))
            if self._step.measuring:
                wide = torch.promote_types(grads[0].dtype, torch.float32)
                norms = torch.stack(torch._foreach_norm(update.grads, dtype=wide)).float() / self.grad_divisor
                update.measures = list(torch.stack([norms, torch.zeros_like(norms)], dim=1).unbind())
            yield update

    def _advance(self, grads: list[Tensor], state: Lists, group: dict[str, Any]) -> None:
        (m, v), (beta1, beta2) = state, group["betas"]
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)

    def _steps(self, state: Lists, directions: list[Tensor], rates: list[Any], group: dict[str, Any]) -> list[Tensor]:
        m, v = state
        denominators = torch._foreach_sqrt(v)
        torch._foreach_add_(denominators, group["eps"])
        steps = torch._foreach_div(m, denominators)
        torch._foreach_mul_(steps, [rate.to(steps[0].dtype) for rate in rates])
        return list(steps)


def rows(param: Tensor, size: int) -> list[list[Unit]]:
    """The rows of a parameter in `size` nearly equal blocks."""
    height, width = param.shape[0], param[0].numel()
    bounds = [height * rank // size for rank in range(size + 1)]
    return [
        [Unit(param, begin * width, (end - begin, *param.shape[1:]))] if end > begin else []
        for begin, end in pairwise(bounds)
    ]
