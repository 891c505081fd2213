"""AdamW: Adam with decoupled weight decay, on one or many ranks."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Method, ShardedOptimizer, State
from .buckets import Bucket, widest
from .sharded import is_sharded, shard_length
from .update import decay_of, descend

LARGE = 2**15  # elements; from here on every rank owns a share of the parameter


def adamw(
    gradients: Tensor, weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *,
    t: Tensor, rate: Any, decay: Any, beta1: Any, beta2: float, eps: float, cautious: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One step of AdamW on stacks (k, n). Returns (new weights, exp_avg, exp_avg_sq).

    t (k, 1): number of this step, from 1. eps acts before bias correction, as in section 2 of the
    paper. decay: a share of the weights, or None. The moments are updated in place.
    """
    exp_avg.lerp_(gradients, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    # In float64 where it exists: 1 - beta2^t loses most of its digits in float32.
    t = t.to(widest(t.device))
    corrections = (1 - beta2**t).sqrt() / (1 - beta1**t)
    # Rows of a table without a gradient so far have second moments of 0. On a CPU the root of 0
    # takes five times as long as that of a normal number, so the smallest of these is added.
    root = (exp_avg_sq + torch.finfo(exp_avg_sq.dtype).tiny).sqrt_()
    step = (exp_avg / root.add_(eps)).mul_((corrections * rate).to(weights.dtype))
    return descend(weights, step, decay, cautious), exp_avg, exp_avg_sq


class AdamW(ShardedOptimizer):
    """Adam (Kingma & Ba, arXiv:1412.6980) with decoupled decay: p -= lr' m / (sqrt(v) + eps).

    lr' = lr lr_mul sqrt(1 - beta2^t) / (1 - beta1^t). Group keys: lr, lr_mul, betas, eps,
    weight_decay, wd_mul. Computes in float32 at least. cautious: no decay where it works against
    the step. State, on the owning rank only: exp_avg and exp_avg_sq, as the parameter, and step (),
    int64. Options of torch's AdamW that change no step, such as fused, are ignored. ValueError for
    an impossible setting.
    """

    RANGES: ClassVar = {**ShardedOptimizer.RANGES, "eps": (0, float("inf")), "betas": (0, 1)}
    elementwise = True
    at_once = 2**18  # a few such float32 pieces fit a CPU's cache

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, **options)

    def _cuts(self, param: Tensor, group: dict[str, Any], ranks: int) -> list[tuple[int, ...]]:
        if is_sharded(param):
            length, total = shard_length(param, ranks), param.numel()
            return [(1, min(length, total - begin)) for begin in range(0, total, length)]
        pieces = ranks if param.numel() >= LARGE else 1
        pieces *= math.ceil(param.numel() / pieces / self._limit(param))
        bounds = [param.numel() * piece // pieces for piece in range(pieces + 1)]
        return [(1, bounds[piece + 1] - bounds[piece]) for piece in range(pieces)]

    def _states(self, param: Tensor, group: dict[str, Any]) -> dict[str, State]:
        moment, counter = State(param.shape, (-1,), param.dtype), State((), (1,), torch.int64)
        return {"step": counter, "exp_avg": moment, "exp_avg_sq": moment}

    def _means_the_same(self, group: Mapping[str, Any]) -> dict[str, tuple[Any, ...] | None]:
        decoupled = (True,) if group.get("weight_decay") else (True, False)  # torch's Adam: False
        return super()._means_the_same(group) | {"decoupled_weight_decay": decoupled}

    def _method(self, bucket: Bucket) -> Method:
        group = bucket.group
        beta1, beta2 = group["betas"]
        fixed = {"beta2": beta2, "eps": group["eps"], "cautious": self.cautious}
        rates = {"rate": group["lr"] * group["lr_mul"], "beta1": beta1}  # OneCycleLR changes both
        return adamw, fixed, rates | {"decay": decay_of(group)}
