"""A guard lets several optimizers step together or not at all, and never waits for the device.

Its decision is a flag on the device: the optimizers select new or old values by it. It counts on
the device too; `explain` and `report` read what happened.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as run_eagerly

from .foreign import Foreign
from .spikes import SpikeRule, Spikes
from .state import names_of

TAKEN, NONFINITE, SPIKE = range(3)  # first number of a verdict
COUNTERS = ("steps", "nonfinite", "spike", "last_skip", "last_tensor")


class Skip(NamedTuple):
    """Why a step was skipped."""

    guard: str  # nonfinite or spike
    value: float  # the spike (a loss or norm), or the norm of the first bad gradient
    tensor: str | None  # parameter of that gradient


class Judgement(NamedTuple):
    """The guard's decision on a step, as tensors on the device."""

    ok: Tensor
    nonfinite: Tensor
    value: Tensor
    number: Tensor  # of the first bad gradient


class Guard:
    """Steps several optimizers if loss and gradients are sound, on all ranks or on none.

    nonfinite: skip a step if the square of a gradient's norm is not finite in float32. spike: rule
    for the loss and for one gradient norm an optimizer, over all ranks.
    For torch's own optimizers (see `Foreign`) the guard sums gradients over process_group (None:
    one process) and divides them once by grad_divisor. Ours take these two settings themselves.
    ValueError without an optimizer.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        spike: SpikeRule | None = None,
        nonfinite: bool = True,
        process_group: Any = None,
        grad_divisor: float = 1,
    ):
        self.optimizers = list(optimizers)
        if not self.optimizers:
            raise ValueError("a guard needs at least one optimizer, got none")
        self.spike, self.nonfinite = spike, nonfinite
        self._parts: list[Any] = []
        for optimizer in self.optimizers:
            ours = hasattr(optimizer, "commit_as_step")
            foreign = None if ours else Foreign(optimizer, process_group, grad_divisor)
            self._parts.append(foreign or optimizer)
        self._device = self.optimizers[0].param_groups[0]["params"][0].device
        self.reset()

    def reset(self) -> None:
        """Restore the guard as constructed."""
        device, count = self._device, len(self._parts)
        self._counters = {
            name: torch.zeros((), dtype=torch.int64, device=device) for name in COUNTERS
        }
        # For each optimizer: how many of its latest steps were skipped, and whether the gradients
        # it sums over several steps contain those of a skipped step.
        self._in_a_row = torch.zeros(count, dtype=torch.int64, device=device)
        self._spoiled = torch.zeros(count, dtype=torch.bool, device=device)
        self._spikes = None if self.spike is None else Spikes(self.spike, 1 + count, device)

    # ---- a step

    @run_eagerly  # see ShardedOptimizer.step
    @torch.no_grad()
    def step(
        self, loss: Tensor | None = None, only: Iterable[torch.optim.Optimizer] | None = None
    ) -> Tensor:
        """Step all optimizers, or `only` some, if all is sound. Returns a verdict for `explain`.

        loss: a scalar for the spike rule, the same on all ranks. An optimizer that is left out sums
        gradients over several steps; if one of these steps is skipped, it drops the whole sum.
        ValueError for an optimizer that this guard was not built with.
        """
        chosen = self.optimizers if only is None else list(only)
        numbers = []
        for number, optimizer in enumerate(self.optimizers):
            if any(optimizer is other for other in chosen):
                numbers.append(number)
        if len(numbers) != len(chosen):
            told = f"{len(chosen)} optimizers to step, {len(numbers)} of them in this guard"
            raise ValueError(f"{told}; build it with all")
        norms = self.measure(numbers)
        if not self.nonfinite and self.spike is None:
            self.commit(numbers, None)
            return torch.zeros(4, dtype=torch.float64, device=self._device)
        judgement = self.judge(numbers, norms, loss)
        self.commit(numbers, judgement.ok)
        return self.record(numbers, judgement)

    def measure(self, numbers: Sequence[int]) -> list[Tensor]:
        """Gradient norms (parameters,) of each optimizer over all ranks; zeros if left out."""
        for number in numbers:  # all messages leave before the first is waited for
            self._parts[number].launch()
        norms = []
        for number, part in enumerate(self._parts):
            if number in numbers:
                norms.append(part.measure())
            else:
                count = len(names_of(self.optimizers[number]))
                norms.append(torch.zeros(count, device=self._device))
        return norms

    def judge(self, numbers: Sequence[int], norms: list[Tensor], loss: Any) -> Judgement:
        """Whether to take the step."""
        gradients = torch.cat(norms)
        counts = [len(each) for each in norms]
        # A spoiled sum holds gradients of an earlier, skipped step.
        stale = torch.cat([s.expand(n) for s, n in zip(self._spoiled, counts, strict=True)])
        bad = ~gradients.square().isfinite() & ~stale
        first = bad.to(torch.int8).argmax()  # torch has no argmax of bool
        nonfinite = bad.any() & self.nonfinite
        if self._spikes is None:
            return Judgement(~nonfinite, nonfinite, pick(gradients, first), first)
        values, present = self._watched(numbers, norms, loss)
        spikes = self._spikes.judge(values, present, nonfinite)
        value = pick(values, spikes.to(torch.int8).argmax())
        value = torch.where(nonfinite, pick(gradients, first), value)
        return Judgement(~(nonfinite | spikes.any()), nonfinite, value, first)

    def _watched(
        self, numbers: Sequence[int], norms: list[Tensor], loss: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Loss and norms (1 + optimizers,), and which of them to judge at this step."""
        absent = torch.full((), -torch.inf, device=self._device)
        values, present = [absent], [torch.zeros_like(absent, dtype=torch.bool)]
        if loss is not None:
            given = torch.as_tensor(loss).detach().to(self._device, torch.float32).reshape(())
            values[0] = torch.where(given.isfinite(), given, given.abs())  # -inf would pass as low
            present[0] = torch.ones_like(present[0])
        for number, (found, spoiled) in enumerate(zip(norms, self._spoiled, strict=True)):
            stepping = number in numbers
            values.append(torch.where(spoiled, absent, torch.linalg.vector_norm(found)))
            present.append(~spoiled if stepping else torch.zeros_like(spoiled))
        return torch.stack(values), torch.stack(present)

    def commit(self, numbers: Sequence[int], ok: Tensor | None) -> None:
        """Let the optimizers step if `ok` is true; None: always."""
        parts = [self._parts[number] for number in numbers]
        for number, part in zip(numbers, parts, strict=True):
            # Drop a sum that holds gradients of a skipped step.
            part.commit_as_step(None if ok is None else ok & ~self._spoiled[number])
        for part in parts:  # the update of one overlaps the messages of the others
            part.finish()

    def record(self, numbers: Sequence[int], found: Judgement) -> Tensor:
        """Count the step. Returns the verdict (4,): code, value, first bad number, unsound."""
        ok, count = found.ok, self._counters
        count["steps"] += 1
        count["nonfinite"] += found.nonfinite
        count["spike"] += ~ok & ~found.nonfinite
        count["last_skip"].copy_(torch.where(ok, count["last_skip"], count["steps"]))
        last = torch.where(found.nonfinite, found.number, count["last_tensor"])
        count["last_tensor"].copy_(last)
        unsound = torch.zeros_like(count["steps"])
        for number, part in enumerate(self._parts):
            spoiled, in_a_row = self._spoiled[number], self._in_a_row[number]
            if number in numbers:
                moved = ok & ~spoiled
                in_a_row.copy_(torch.where(moved, 0, in_a_row + 1))
                unsound = unsound + torch.where(moved, part.unsound, 0)
                spoiled.zero_()
            else:
                spoiled.logical_or_(~ok)
        code = torch.where(found.nonfinite, NONFINITE, torch.where(ok, TAKEN, SPIKE))
        verdict = [code, found.value, found.number, unsound]
        return torch.stack([each.double() for each in verdict])

    # ---- what is read afterwards

    def explain(self, verdict: Tensor) -> Skip | None:
        """Why a step was skipped; None if it was taken. Waits for the device.

        A failed orthogonalization leaves its matrix unchanged at this step. The optimizers then
        fall back to the plain backend, with a warning.
        """
        code, value, number, unsound = verdict.tolist()
        if unsound:
            for part in self._parts:
                part.fall_back()
        if code == TAKEN:
            return None
        if code == SPIKE:
            return Skip("spike", value, None)
        return Skip("nonfinite", value, self._tensor_names()[int(number)])

    def report(self) -> dict[str, Any]:
        """Steps seen, skips of each kind, last skipped step and last bad tensor. Waits.

        in_a_row: latest steps that an optimizer skipped in a row; the largest number of all.
        """
        found: dict[str, Any] = {name: int(count) for name, count in self._counters.items()}
        found["in_a_row"] = int(self._in_a_row.max())
        names = self._tensor_names()
        found["last_tensor"] = names[found["last_tensor"]] if found["nonfinite"] else None
        return found

    def _tensor_names(self) -> list[str]:
        return [name for optimizer in self.optimizers for name in names_of(optimizer)]

    def describe(self) -> str:
        """What each optimizer owns, sends and costs, and what is guarded."""
        rule = "none" if self.spike is None else str(self.spike)
        lines = [part.describe() for part in self._parts]
        return "\n".join([*lines, f"guards: nonfinite {self.nonfinite}, spikes {rule}"])

    # ---- state

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of windows and counters as tensors, the same on all ranks."""
        return {name: tensor.clone() for name, tensor in self._state().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a `state_dict`. ValueError, with nothing changed, if it does not fit."""
        own = self._state()
        expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
        given = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if expected != given:
            raise ValueError(f"the guard's state is {expected}, got {given}; build the guard alike")
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def _state(self) -> dict[str, Tensor]:
        state = dict(self._counters)
        state |= {"in_a_row": self._in_a_row, "spoiled": self._spoiled}
        if self._spikes is not None:
            state["window"], state["entered"] = self._spikes.window, self._spikes.entered
            state["spikes_in_a_row"] = self._spikes.in_a_row
        return state


def pick(values: Tensor, index: Tensor) -> Tensor:
    """values[index], without reading the index on the host."""
    return values.gather(0, index.unsqueeze(0)).squeeze(0)
