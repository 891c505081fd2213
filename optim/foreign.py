"""Lets a guard step the optimizers of torch.optim."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import READ_AT_ONCE, Team, launched, local
from .sharded import is_sharded, whole
from .state import names_of, params_of, require_dense


class Foreign:
    """Steps one of torch's optimizers if a flag is true, through the same calls as ours.

    It sums gradients over the ranks and divides them in place; every rank steps all parameters. On
    several ranks a missing gradient counts as zero. On a CPU it reads the flag before the step.
    Elsewhere it copies weights and state, takes the step and selects new or old values: `describe`
    tells the cost. State must then be on the device (capturable=True or fused=True).
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
        mebibytes = sum(param.nbytes for param in self.params) / 2**20
        text = f"{type(self.optimizer).__name__} of torch: every rank steps all parameters"
        if self.team.size > 1:
            text += f", all-reduces {mebibytes:,.1f} MiB of gradients a step"
        if self.params[0].device.type not in READ_AT_ONCE:
            text += f", copies {mebibytes:,.1f} MiB of weights and all its state a step"
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
        """Take the step if `ok` is true."""
        if not isinstance(ok, Tensor) or ok.device.type in READ_AT_ONCE:
            if ok:
                self.optimizer.step()
            return
        stepping = [local(param).detach() for param in self.params if param.grad is not None]
        weights = [(weight, weight.clone()) for weight in stepping]
        before = {key: value.clone() for key, value in self._state().items()}  # step() overwrites
        self.optimizer.step()
        after = self._state()
        for weight, old in weights:
            weight.copy_(torch.where(ok, weight, old))
        for key, old in before.items():
            after[key].copy_(torch.where(ok, after[key], old))
        # A first step creates state, which has no old values. Reading the flag waits, but once.
        created = [key for key in after if key not in before]
        if created and not ok:
            for param, name in created:
                del self.optimizer.state[param][name]
                if not self.optimizer.state[param]:
                    del self.optimizer.state[param]

    def finish(self) -> None:
        """Do nothing: no weights are on their way."""

    def _state(self) -> dict[tuple[Tensor, str], Tensor]:
        """State of the parameters with a gradient. TypeError for state on the host."""
        found = {}
        for name, param in zip(names_of(self.optimizer), self.params, strict=True):
            if param.grad is None:
                continue
            for kind, value in self.optimizer.state.get(param, {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor) or value.device != param.device:
                    optimizer = type(self.optimizer).__name__
                    raise TypeError(
                        f"{kind} of parameter {name} in {optimizer} is kept on the host, so a step "
                        f"could not be undone without waiting; build {optimizer} with "
                        "capturable=True or fused=True"
                    )
                found[param, kind] = local(value)
        return found
