"""Lets a guard step the optimizers of torch.optim."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import READ_AT_ONCE, RankGroup
from .sharded import is_sharded, whole
from .state import params_of


class TorchOptimizer:
    """Steps one of torch's optimizers if a flag is true, through the same calls as ours.

    It sums gradients over the ranks and divides them in place; every rank steps all parameters. On
    several ranks a missing gradient counts as zero. The host reads the flag before each step: on a
    GPU it waits for the device once a step, which optimizers of this folder never do.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, process_group: Any, grad_divisor: float):
        self.optimizer, self.grad_divisor = optimizer, grad_divisor
        self.ranks = RankGroup.of(process_group)
        self.params = params_of(optimizer)
        if self.ranks.size > 1 and any(is_sharded(param) for param in self.params):
            what = f"fully_shard has already reduced the gradients of {type(optimizer).__name__}"
            raise ValueError(f"{what}; leave out the guard's process_group")

    def describe(self) -> str:
        """One line: what a step costs beyond the optimizer's own."""
        text = f"{type(self.optimizer).__name__} of torch: every rank steps all parameters"
        if self.params[0].device.type not in READ_AT_ONCE:
            text += ", waits for the device once a step to read the guard's verdict"
        return text

    def require_ready(self) -> None:
        """Follow the groups, of which one may be new. Their settings are torch's to check."""
        self.params = params_of(self.optimizer)

    def launch(self) -> None:
        """Start to sum the gradients over the ranks."""
        self._sums = []
        for param in self.params if self.ranks.size > 1 else ():
            if not param.requires_grad:
                continue  # frozen: with a gradient it would decay
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            self._sums.append(dist.all_reduce(param.grad, group=self.ranks.group, async_op=True))

    def measure(self) -> Tensor:
        """Norm of each parameter's mean gradient (parameters,), float32."""
        for work in self._sums:
            work.wait()
        norms = torch.zeros(len(self.params), device=self.params[0].device).float()
        self.failed = torch.zeros_like(norms)  # it orthogonalizes nothing that could fail apart
        for norm, param in zip(norms, self.params, strict=True):
            if param.grad is not None:
                param.grad.div_(self.grad_divisor)
                wide = torch.promote_types(param.dtype, torch.float32)
                norm.copy_(whole(torch.linalg.vector_norm(param.grad, dtype=wide), norm.device))
        return norms

    def step(self, *, ok: Tensor, excess: Tensor | float) -> None:
        """Take the step if `ok` is true. Reading a flag on a GPU waits for it.

        excess: also divides the gradients, in place.
        """
        if ok:
            for param in self.params if excess != 1 else ():
                if param.grad is not None:
                    param.grad.div_(excess)
            self.optimizer.step()

    def finish(self) -> None:
        """Do nothing: no weights are on their way."""
