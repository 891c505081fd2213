"""RowAdam: Adam for large tables, with one second moment for each row and no first moment."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Method, ShardedOptimizer, State
from .buckets import Bucket, Part, widest
from .sharded import is_sharded
from .state import params_of
from .update import decay_of, descend


def row_adam(
    gradients: Tensor, weights: Tensor, row_avg_sq: Tensor, *,
    t: Tensor, rate: Any, decay: Any, beta2: float, eps: float, cautious: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One step of RowAdam on stacks of tables (k, rows, width). Returns (new weights, row_avg_sq).

    row_avg_sq (k, rows, 1), updated in place: the moving average of each row's mean square
    gradient. t (k, 1, 1): number of this step, from 1. decay: a fraction of the weights, or None.
    """
    squares = gradients.square().mean(-1, keepdim=True)
    row_avg_sq.mul_(beta2).add_(squares, alpha=1 - beta2)
    # In float64 where it exists: 1 - beta2^t loses most of its digits in float32.
    correction = (1 - beta2 ** t.to(widest(t.device))).sqrt() * rate
    # Rows without a gradient so far have a second moment of 0, whose root takes a CPU five times
    # as long as that of a normal number.
    root = (row_avg_sq + torch.finfo(row_avg_sq.dtype).tiny).sqrt_().add_(eps)
    factor = correction.to(weights.dtype) / root
    if decay is not None and not cautious:
        decay = (squares > 0).to(weights.dtype) * decay  # a row without a gradient keeps every bit
    return descend(weights, gradients * factor, decay, cautious), row_avg_sq


class RowAdam(ShardedOptimizer):
    """Adam with beta1 = 0 and a second moment v for each row: p -= lr' g / (sqrt(v) + eps).

    For tables (rows, width) of which a step reads few rows. v <- beta2 v + (1 - beta2) mean(g^2)
    over the row, at every step, so it also decays while the row is not read. lr' = lr lr_mul
    sqrt(1 - beta2^t). A row without a gradient keeps its weights, decay included. Group keys: lr,
    lr_mul, beta2, eps, weight_decay, wd_mul. Computes in float32 at least. cautious: no decay where
    it works against the step.

    State: row_avg_sq (rows,), float32 at least, and step (), int64. On a CPU sparse gradients, as
    F.embedding(..., sparse=True) makes them, are stepped row by row: the time does not depend on
    the table's size. Nor do messages: every rank of the group replaces its gradients by their sum
    over the ranks, of which only the touched rows are sent, and steps the whole table. Elsewhere
    gradients are made dense first, and each rank steps the rows whose state it owns.
    modded-nanogpt's record 92 and nanochat#854 keep one second moment a row too.
    ValueError for an impossible setting or a parameter that is not a table.
    """

    RANGES: ClassVar = {**ShardedOptimizer.RANGES, "eps": (0, float("inf")), "beta2": (0, 1)}
    elementwise = True  # whole rows, which shards keep together
    at_once = 2**18

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        beta2: float = 0.95,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        **options: Any,
    ):
        defaults = {"lr": lr, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        self._everyone = options.get("process_group")  # None: one process
        super().__init__(params, defaults, **options)

    def _build(self) -> None:
        tables = params_of(self)
        self._by_rows = any(each.device.type == "cpu" and not is_sharded(each) for each in tables)
        self._process_group = None if self._by_rows else self._everyone
        super()._build()
        if self._by_rows:  # the ranks share out nothing
            self.ranks = self.ranks._replace(group=self._everyone)

    def _check(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        super()._check(name, param, group)
        if param.ndim != 2:
            rule = "RowAdam steps tables (rows, width); give it to AdamW"
            raise ValueError(f"parameter {name} has the shape {tuple(param.shape)}; {rule}")

    def _cuts(self, param: Tensor, group: dict[str, Any], ranks: int) -> list[tuple[int, ...]]:
        rows, width = param.shape
        own = most = -(-rows // ranks)  # rows of a rank, with fully_shard too
        if ranks > 1 or param.device.type != "cpu":  # else one part, for sparse gradients
            most = min(own, max(1, self._limit(param) // width))
        cuts: list[tuple[int, ...]] = []
        for first in range(0, rows, own):
            end = min(first + own, rows)
            cuts += [(1, min(most, end - begin), width) for begin in range(first, end, most)]
        return cuts

    def _cut(self, number: int, param: Tensor, group: dict[str, Any]) -> list[Part]:
        parts = super()._cut(number, param, group)
        for part in parts:
            part.key = *part.key, number  # a bucket of its own: only some gradients may be sparse
        return parts

    def _states(self, param: Tensor, group: dict[str, Any]) -> dict[str, State]:
        wide = torch.promote_types(param.dtype, torch.float32)
        average = State((param.shape[0],), (-1, 1), wide)
        return {"step": State((), (1, 1), torch.int64), "row_avg_sq": average}

    def _method(self, bucket: Bucket) -> Method:
        group = bucket.group
        fixed = {"beta2": group["beta2"], "eps": group["eps"], "cautious": self.cautious}
        return row_adam, fixed, {"rate": group["lr"] * group["lr_mul"], "decay": decay_of(group)}

    def launch(self) -> None:
        """As of all optimizers, after each sparse gradient was added up or made dense."""
        for param in self._names:
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.coalesce() if self._by_rows else param.grad.to_dense()
        if self._by_rows and self.ranks.group is not None:
            sum_over_ranks([*self._names], self.ranks.group)
        super().launch()

    def describe(self) -> str:
        """As of all optimizers, or that every rank steps all parameters."""
        if self._process_group is self._everyone:
            return super().describe()
        total = sum(table.numel() for table in params_of(self))
        return f"RowAdam: every rank steps all {total:,} parameters"

    def _step(self, bucket: Bucket, taken: Tensor, divisor: Tensor | float) -> None:
        grad = bucket.param.grad
        if grad is None or not grad.is_sparse:
            super()._step(bucket, taken, divisor)
        elif taken[bucket.numbers[0]]:
            self._step_rows(bucket, grad.indices()[0], grad.values() / divisor)

    def _step_rows(self, bucket: Bucket, rows: Tensor, gradients: Tensor) -> None:
        """Step the rows (n,) of a table by their gradients (n, width)."""
        table, step, row_avg_sq = bucket.param, bucket.state["step"], bucket.state["row_avg_sq"]
        method, fixed, rates = self._method(bucket)
        step += 1
        stacks = [each.to(bucket.wide).unsqueeze(0) for each in (gradients, table[rows])]
        weights, averages = method(*stacks, row_avg_sq[:, rows], t=step, **fixed, **rates)
        row_avg_sq *= fixed["beta2"]  # also of the rows that were not read
        row_avg_sq[:, rows] = averages
        table[rows] = weights[0].to(table.dtype)


def sum_over_ranks(params: list[Tensor], group: Any) -> None:
    """Replace each gradient that any rank has by its sum over the ranks, on CPUs. Collective.

    The sum is sparse unless a rank has a dense gradient; gloo then sends the touched rows alone.
    """
    grads = [param.grad for param in params]
    kinds = torch.tensor([0 if grad is None else 1 + (not grad.is_sparse) for grad in grads])
    dist.all_reduce(kinds, dist.ReduceOp.MAX, group=group)
    for param, grad, kind in zip(params, grads, kinds.tolist(), strict=True):
        if kind == 0:
            continue
        if grad is None:  # no rows
            values = torch.empty(0, param.size(1), dtype=param.grad_dtype)
            rows = torch.empty(1, 0, dtype=torch.int64)
            grad = torch.sparse_coo_tensor(
                rows, values, param.shape, is_coalesced=True, check_invariants=False
            )
        param.grad = grad.to_dense() if kind == 2 else grad
        dist.all_reduce(param.grad, group=group)
