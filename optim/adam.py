"""Adam with decoupled decay, sharded by rows over 1..N ranks."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from .sharding import Gradients, Layout, Mirror, Rows, ShardedOptimizer

# A smaller parameter is updated on every rank: that costs less than collectives of its own.
LARGE = 2**15
# Elements that go through all passes of an update together on a CPU: five float32 of each fit the inner cache.
CPU_PIECE = 2**15


class Adam(ShardedOptimizer):
    """Adam (Kingma & Ba, arXiv:1412.6980) with decoupled decay: p -= lr' m / (sqrt(v) + eps).

    lr' = lr lr_mul sqrt(1 - beta2^t) / (1 - beta1^t), so eps acts before bias correction, as in the paper's section 2.
    Group keys: lr, lr_mul, betas, eps, weight_decay, wd_mul. Computes in float32 at least; state_dtype None stores the
    state as the parameter. Large parameters whose rows divide by the ranks are sharded. ValueError for a bad setting.
    """

    RANGES: ClassVar = {**ShardedOptimizer.RANGES, "eps": (0, float("inf"), 1e-8)}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_dtype: torch.dtype | None = None,
        process_group: Any = None,
        grad_divisor: float = 1,
    ):
        if state_dtype is not None and not state_dtype.is_floating_point:
            raise ValueError(f"state_dtype must be floating-point, got {state_dtype}; None follows the parameter")
        self.state_dtype = state_dtype
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, process_group, grad_divisor)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        betas = group["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}; usual values are (0.9, 0.95)")

    def _check_parameter(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        if not param.is_contiguous():
            raise ValueError(f"parameter {name} is not contiguous in memory; create it from tensor.contiguous()")

    def _layouts(self, params: list[Tensor]) -> list[Layout]:
        alone = [p for p in params if p.numel() >= LARGE and p.shape[0] % self.team.size == 0]
        together = [p for p in params if p not in set(alone)]
        if self.team.size == 1:
            return [Layout(members, self.team) for members in [together, *([p] for p in alone)]]
        mirror = Mirror(together, self.team, counted=params)  # first, since the others ask for its counts
        return [mirror, *(Rows(p, self.team, census=mirror) for p in sorted(alone, key=Tensor.numel))]

    def _blank(self, param: Tensor, device: Any) -> dict[str, Tensor]:
        dtype = self.state_dtype or param.dtype
        # The count stays on the host, so that reading it never waits for the device.
        step = torch.zeros((), dtype=torch.int64, device="meta" if device == "meta" else "cpu")
        moments = {name: torch.zeros(param.shape, dtype=dtype, device=device) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": step, **moments}

    def _update(self, layout: Layout, gradients: Gradients) -> None:
        for param, _ in gradients:
            self.state[param]["step"] += 1
        for t, run in groupby(gradients, key=lambda pair: int(self.state[pair[0]]["step"])):
            for _, alike in groupby(run, key=lambda pair: id(self._group_of[pair[0]])):
                self._step_alike(layout, list(alike), t)

    def _step_alike(self, layout: Layout, gradients: Gradients, t: int) -> None:
        """Step parameters of one group that have all taken t - 1 steps."""
        pieces: list[tuple[Tensor, ...]] = []
        for param, grad in gradients:
            state, weight = self.state[param], layout.part(param, param.detach())
            assert weight is not None, "every rank owns a part of every Adam parameter"
            tensors = (weight, grad, state["exp_avg"], state["exp_avg_sq"])
            size = CPU_PIECE if param.device.type == "cpu" else param.numel()
            pieces += zip(*(tensor.reshape(-1).split(size) for tensor in tensors), strict=True)
        group = self._group_of[gradients[0][0]]
        together = 1 if gradients[0][0].device.type == "cpu" else len(pieces)
        for start in range(0, len(pieces), together):
            self._step_pieces(pieces[start : start + together], group, t)

    def _step_pieces(self, pieces: list[tuple[Tensor, ...]], group: dict[str, Any], t: int) -> None:
        wide = torch.promote_types(pieces[0][0].dtype, torch.float32)
        weight, grad, m, v = ([tensor.to(wide) for tensor in column] for column in zip(*pieces, strict=True))
        (beta1, beta2), lr = group["betas"], group["lr"]
        if self.grad_divisor != 1:
            grad = list(torch._foreach_div(grad, self.grad_divisor))
        torch._foreach_lerp_(m, grad, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grad, grad, 1 - beta2)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_add_(denominator, group["eps"])
        if group["weight_decay"]:
            torch._foreach_mul_(weight, 1 - lr * group["weight_decay"] * group["wd_mul"])
        rate = lr * group["lr_mul"] * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        torch._foreach_addcdiv_(weight, m, denominator, -rate)
        # A tensor stored in the wide dtype was updated in place; another one takes over the rounded result.
        for stored, computed in zip(pieces, zip(weight, grad, m, v, strict=True), strict=True):
            for index in (0, 2, 3):
                if stored[index] is not computed[index]:
                    stored[index].copy_(computed[index])
