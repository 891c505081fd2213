"""Lets a guard step the optimizers of torch.optim."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import READ_AT_ONCE, Team, launched
from .sharded import is_sharded, whole
from .state import params_of, require_dense


class TorchOptimizer:
    """Steps one of torch's optimizers if a flag is true, through the same calls as ours.

    It sums gradients over the ranks and divides them in place; every rank steps all parameters. On
    several ranks a missing gradient counts as zero. The host reads the flag before each step: on a
    GPU it waits for the device once a step, which optimizers of this folder never do.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, process_group: Any, grad_divisor: float):
        self.optimizer, self.grad_divisor = optimizer, grad_divisor
        self.team = Team.of(process_group)
        self.params = params_of(optimizer)
        if self.team.size > 1 and any(is_sharded(param) for param in self.params):
            what = f"fully_shard has already reduced the gradients of {type(optimizer).__name__}"
            raise ValueError(f"{what}; leave out the guard's process_group")

    def describe(self) -> str:
        """One line: what a step costs beyond the optimizer's own."""
        text = f"{type(self.optimizer).__name__} of torch: every rank steps all parameters"
        if self.team.size > 1:
            mebibytes = sum(param.nbytes for param in self.params) / 2**20
            text += f", all-reduces {mebibytes:,.1f} MiB of gradients a step"
        if self.params[0].device.type not in READ_AT_ONCE:
            text += ", waits for the device once a step to read the guard's verdict"
        return text

    def launch(self) -> None:
        """Send the gradients, one message a dtype."""
        require_dense(self.optimizer)
        self.params = params_of(self.optimizer)  # a group may be new
        self._messages = []
        if self.team.size == 1:
            return
        for dtype in dict.fromkeys(param.dtype for param in self.params):
            members = [param for param in self.params if param.dtype == dtype]
            grads = []
            for param in members:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                grads.append(param.grad)
            message = torch.cat([grad.reshape(-1) for grad in grads])
            wait = launched(dist.all_reduce, message, group=self.team.group)
            self._messages.append((message, grads, wait))

    def measure(self) -> Tensor:
        """Norm of each parameter's mean gradient (parameters,), float32."""
        for message, grads, wait in self._messages:
            wait()
            sums = message.split([grad.numel() for grad in grads])
            for grad, total in zip(grads, sums, strict=True):
                grad.copy_(total.view_as(grad))
        self._messages = []
        zero = torch.zeros((), device=self.params[0].device)
        norms = []
        for param in self.params:
            if param.grad is None:
                norms.append(zero)
                continue
            if self.grad_divisor != 1:
                param.grad.div_(self.grad_divisor)
            wide = torch.promote_types(param.dtype, torch.float32)
            norm = torch.linalg.vector_norm(param.grad, dtype=wide)
            norms.append(whole(norm, zero.device).float())
        return torch.stack(norms)

    def step(self, *, ok: Tensor | bool) -> None:
        """Take the step if `ok` is true. Reading a flag on a GPU waits for it."""
        if ok:
            self.optimizer.step()

    def finish(self) -> None:
        """Do nothing: no weights are on their way."""
