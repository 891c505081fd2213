"""Lets a guard step the optimizers of torch.optim."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import READ_AT_ONCE, Team, launched
from .state import names_of, params_of


class Foreign:
    """Steps one of torch's optimizers if a flag is true, through the same calls as ours.

    It sums gradients over the ranks and divides them in place; every rank steps all parameters. On
    a CPU it reads the flag before the step. Elsewhere it copies weights and state, takes the step
    and selects new or old values: `describe` tells the cost. State must then be on the device
    (capturable=True or fused=True).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, process_group: Any, grad_divisor: float):
        self.optimizer, self.grad_divisor = optimizer, grad_divisor
        self.team = Team.of(process_group)
        self.params = params_of(optimizer)
        self.unsound = torch.zeros((), dtype=torch.int64, device=self.params[0].device)

    def fall_back(self) -> None:
        """Do nothing: there is no other backend."""

    def describe(self) -> str:
        """One line: what a step costs beyond the optimizer's own."""
        mebibytes = sum(param.numel() * param.element_size() for param in self.params) / 2**20
        text = f"{type(self.optimizer).__name__} of torch: every rank steps all parameters"
        if self.team.size > 1:
            text += f", all-reduces {mebibytes:,.1f} MiB of gradients a step"
        if self.params[0].device.type not in READ_AT_ONCE:
            text += f", copies {mebibytes:,.1f} MiB of weights and all its state a step"
        return text

    def launch(self) -> None:
        """Send the gradients, and one flag a parameter that says whether this rank has one."""
        if self.team.size == 1:
            return
        self._messages: list[tuple[Tensor, list[Tensor], Callable[[], None]]] = []
        for dtype in dict.fromkeys(param.dtype for param in self.params):
            members = [param for param in self.params if param.dtype == dtype]
            blanks = [torch.zeros_like(param) for param in members]
            sums = [b if p.grad is None else p.grad for p, b in zip(members, blanks, strict=True)]
            flags = torch.ones(len(members), dtype=dtype, device=self.params[0].device)
            for flag, param in zip(flags, members, strict=True):
                if param.grad is None:
                    flag.zero_()
            message = torch.cat([*[grad.reshape(-1) for grad in sums], flags])
            wait = launched(dist.all_reduce, message, group=self.team.group)
            self._messages.append((message, members, wait))

    def measure(self) -> Tensor:
        """Norm of each parameter's mean gradient (parameters,), float32."""
        if self.team.size > 1:
            for message, members, wait in self._messages:
                wait()
                self._receive(message, members)
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
            norms.append(torch.linalg.vector_norm(param.grad, dtype=wide).float())
        return torch.stack(norms)

    def _receive(self, message: Tensor, members: list[Tensor]) -> None:
        *sums, counts = message.split([*[param.numel() for param in members], len(members)])
        for param, total, count in zip(members, sums, counts, strict=True):
            if param.grad is not None:
                param.grad.copy_(total.view_as(param))
            elif count > 0:  # read only where this rank lacks a gradient
                param.grad = total.view_as(param).clone()

    def commit_as_step(self, ok: Tensor | None) -> None:
        """Take the step if `ok` is true or None."""
        if ok is None or ok.device.type in READ_AT_ONCE:
            if ok is None or ok:
                self.optimizer.step()
            return
        weights = [(p.detach(), p.detach().clone()) for p in self.params if p.grad is not None]
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
                found[param, kind] = value
        return found
