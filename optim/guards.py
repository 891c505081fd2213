"""A guard lets several optimizers step together or not at all, without waiting for the device.

Its decision is a flag on the device: the optimizers select new or old values by it. `explain` reads
later what happened. Only torch's own optimizers wait for the flag.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as run_eagerly

from .base import ShardedOptimizer
from .buckets import READ_AT_ONCE, widest
from .state import names_of, params_of
from .torch_optimizer import TorchOptimizer
from .update import compiled

TAKEN, NONFINITE, SPIKE = range(3)  # first number of a verdict


class Skip(NamedTuple):
    """Why a step was skipped."""

    guard: str  # nonfinite or spike
    value: float  # the spike (a loss or norm), or the norm of the first bad gradient
    tensor: str | None  # parameter of that gradient


class Held(NamedTuple):
    """Matrices that kept their weights in a step that was taken."""

    matrices: int
    tensor: str  # the first parameter with such a matrix


@dataclass(frozen=True)
class SpikeRule:
    """A value is a spike if it is above centre + sigma * spread of its window, or not finite.

    Centre and spread are the median and 1.4826 MAD of the latest accepted values. Norms are judged
    by their logarithms. Mean and deviation would not do: one spike hides the next. The spread is at
    least `least_spread` times the centre, or `least_log_spread` for norms.
    A window with fewer than `start` values judges nothing. After `patience` spikes in a row it
    starts anew; for a norm, only the steps of its own optimizer count.
    """

    window: int = 128
    sigma: float = 6.0
    start: int = 32
    least_spread: float = 0.01
    least_log_spread: float = 0.05
    patience: int = 10

    def __post_init__(self) -> None:
        if not (self.sigma > 0 and 3 <= self.start <= self.window and self.patience >= 1):
            rule = "sigma > 0, 3 <= start <= window and patience >= 1"
            raise ValueError(f"a spike rule needs {rule}, got {self}")


class Guard:
    """Steps several optimizers if loss and gradients are sound, on all ranks or on none.

    A matrix whose orthogonalization fails keeps its weights, and the others step: see `held`.
    nonfinite: skip a step if the square of a gradient's norm is not finite in float32. spike: rule
    for the loss and for each optimizer's gradient norm, over all ranks. clip: scale the gradients
    of a step so that the norm of all of them together is at most this, as clip_grad_norm_ does. The
    guard judges and reports norms before it clips; clipped elsewhere, it would see no spike.
    For torch's own optimizers (see `TorchOptimizer`) the guard sums gradients over process_group
    (None: one process) and divides them once by grad_divisor. The optimizers of this folder take
    both settings themselves.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        spike: SpikeRule | None = None,
        nonfinite: bool = True,
        clip: float | None = None,
        process_group: Any = None,
        grad_divisor: float = 1,
    ):
        self.optimizers = list(optimizers)
        if clip is not None and not (isinstance(clip, Real) and clip > 0):
            raise ValueError(f"clip must be a norm above 0, got {clip!r}; None does not clip")
        self.spike, self.nonfinite, self.clip = spike, nonfinite, clip
        self._parts: list[Any] = list(self.optimizers)
        for number, optimizer in enumerate(self.optimizers):
            if not isinstance(optimizer, ShardedOptimizer):
                self._parts[number] = TorchOptimizer(optimizer, process_group, grad_divisor)
            elif process_group is not None and optimizer.ranks.group is None:
                what = f"{type(optimizer).__name__} has no process_group, so it would sum nothing"
                raise ValueError(f"{what}; give it the guard's, or leave that out")
        self.reset()

    def reset(self) -> None:
        """Restore the guard as constructed."""
        count = len(self._parts)
        self._device = params_of(self.optimizers[0])[0].device
        # Whether the gradients that an optimizer sums over several steps contain those of a
        # skipped step.
        self._spoiled = torch.zeros(count, dtype=torch.bool, device=self._device)
        values = (1 + count, 0 if self.spike is None else self.spike.window)
        self._windows = None if self.spike is None else Windows(
            torch.full(values, torch.nan, dtype=torch.float32, device=self._device),
            *torch.zeros(2, 1 + count, dtype=torch.int64, device=self._device),
        )  # fmt: skip

    def forget(self) -> None:
        """Judge no spikes until the windows are filled anew: what is normal changes with a step."""
        if self._windows is not None:
            self._windows.values.fill_(torch.nan)

    def divide_by(self, grad_divisor: float) -> None:
        """From the next step on, divide summed gradients by this number."""
        for part in self._parts:
            part.grad_divisor = grad_divisor

    def _follow(self) -> None:
        """Move the windows to the device of the parameters, which a model may have left."""
        if params_of(self.optimizers[0])[0].device != self._device:
            state = self.state_dict()
            self.reset()
            self.load_state_dict(state)

    # ---- a step

    @run_eagerly  # see ShardedOptimizer.step
    @torch.no_grad()
    def step(
        self, loss: Tensor | None = None, only: Iterable[torch.optim.Optimizer] | None = None
    ) -> Tensor:
        """Step all optimizers, or `only` some, if all is sound.

        Returns a verdict for `explain`, `gradient_norms` and `held`.

        loss: a scalar for the spike rule, the same on all ranks. An optimizer that is left out sums
        gradients over several steps; if one of these steps is skipped, it drops the whole sum.
        ValueError, with nothing sent or changed, for an optimizer that this guard was not built
        with, for a loss of several numbers, or for a setting that is out of its range.
        """
        chosen = self.optimizers if only is None else only
        numbers = sorted({self.optimizers.index(optimizer) for optimizer in chosen})
        if loss is not None:
            loss = one_number(loss)
        for number in numbers:
            self._parts[number].require_ready()
        self._follow()
        norms = self.measure(numbers)
        # Summed here: compiled sums may take another order on each rank.
        totals = torch.stack(torch._foreach_norm(norms))
        if loss is not None:
            loss = loss.to(self._device, torch.float32)
        excess = self._excess(totals)
        compiles = any(getattr(part, "compiles", False) for part in self._parts)
        ok, verdict, self._spoiled, self._windows = (compiled(judge) if compiles else judge)(
            numbers, norms, totals, loss, self._spoiled, self._windows,
            rule=self.spike, nonfinite=self.nonfinite,
        )  # fmt: skip
        self.commit(numbers, ok, excess)
        return torch.cat([verdict, *self._of_each(numbers, lambda part: part.failed)])

    def _of_each(self, numbers: Sequence[int], find: Callable[[Any], Tensor]) -> list[Tensor]:
        """Numbers (parameters,) of each optimizer; zeros if it is left out."""
        return [
            find(part) if number in numbers else torch.zeros(
                len(params_of(self.optimizers[number])), dtype=torch.float32, device=self._device
            )
            for number, part in enumerate(self._parts)
        ]  # fmt: skip

    def measure(self, numbers: Sequence[int]) -> list[Tensor]:
        """Gradient norms (parameters,) of each optimizer over all ranks; zeros if left out."""
        for number in numbers:  # all messages leave before the first is waited for
            self._parts[number].launch()
        return self._of_each(numbers, lambda part: part.measure())

    def _excess(self, totals: Tensor) -> Tensor | float:
        """How many times the norm of all gradients of this step exceeds `clip`, at least 1."""
        if self.clip is None:
            return 1.0
        # A spoiled sum, which is dropped, may hold a NaN.
        norm = torch.linalg.vector_norm(totals.masked_fill(self._spoiled, 0))
        excess = ((norm.to(widest(self._device)) + 1e-6) / self.clip).clamp_min(1)
        return excess.item() if self._device.type in READ_AT_ONCE else excess

    def commit(self, numbers: Sequence[int], ok: Tensor, excess: Tensor | float) -> None:
        """Let the optimizers step where `ok` (optimizers,) is true."""
        for number in numbers:
            self._parts[number].step(ok=ok[number], excess=excess)
        for number in numbers:  # the update of one overlaps the messages of the others
            self._parts[number].finish()

    # ---- read afterwards

    def taken(self) -> Tensor:
        """The verdict of a step that was taken and had no gradients."""
        size = 3 + len(self._parts) + sum(map(len, map(params_of, self.optimizers)))
        return torch.zeros(size, dtype=widest(self._device), device=self._device)

    def explain(self, verdict: Tensor) -> Skip | None:
        """Why a step was skipped; None if it was taken. Waits for the device."""
        code, value, number = verdict[:3].tolist()
        if code == TAKEN:
            return None
        if code == SPIKE:
            return Skip("spike", value, None)
        return Skip("nonfinite", value, self._name(int(number)))

    def _name(self, number: int) -> str:
        return [name for each in self.optimizers for name in names_of(each)][number]

    def gradient_norms(self, verdict: Tensor) -> list[float]:
        """Norm of each optimizer's gradient; 0 if it was left out. Waits for the device."""
        return verdict[3 : 3 + len(self._parts)].tolist()

    def held(self, verdict: Tensor) -> Held | None:
        """Matrices whose orthogonalization was not finite, or None. Waits for the device.

        Their weights and NorMuon's variance keep every bit; the momentum has the gradient.
        """
        failed = verdict[3 + len(self._parts) :].tolist()  # matrices of each parameter
        first = next((number for number, count in enumerate(failed) if count), None)
        return None if first is None else Held(int(sum(failed)), self._name(first))

    def describe(self) -> str:
        """What each optimizer steps and costs, and what is guarded."""
        lines = [part.describe() for part in self._parts]
        guards = f"guards: nonfinite {self.nonfinite}, spikes {self.spike}, clip {self.clip}"
        return "\n".join([*lines, guards])

    # ---- state

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the guard's windows as tensors, the same on all ranks."""
        return {name: tensor.clone() for name, tensor in self._state().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a `state_dict`. ValueError, with nothing changed, if it does not fit."""
        own = self._state()
        expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
        given = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if expected != given:
            fix = "build the guard alike, or del state['guard'], and its windows start empty"
            raise ValueError(f"the guard's state is {expected}, got {given}; {fix}")
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def _state(self) -> dict[str, Tensor]:
        state = {"spoiled": self._spoiled}
        if self._windows is not None:
            names = "window", "entered", "spikes_in_a_row"
            state |= zip(names, self._windows, strict=True)
        return state


def pick(values: Tensor, index: Tensor) -> Tensor:
    """values[index], without reading the index on the host."""
    return values.gather(0, index.unsqueeze(0)).squeeze(0)


def one_number(loss: Tensor | float) -> Tensor:
    """A loss as a tensor (), without its graph. ValueError if it has several elements."""
    given = torch.as_tensor(loss).detach()
    if given.numel() != 1:
        what = f"a step's loss must be one number, got the shape {tuple(given.shape)}"
        raise ValueError(f"{what}; give its mean")
    return given.reshape(())


# ---- The judge. A GPU runs it compiled, so it writes to no input: see `new_values`.


class Windows(NamedTuple):
    """The latest accepted values of a loss (row 0) and of norms (the other rows)."""

    values: Tensor  # (rows, window) float32; NaN: an empty place
    entered: Tensor  # (rows,) int64: how many values came in so far
    in_a_row: Tensor  # (rows,) int64: the latest values that were spikes


def judge(
    numbers: Sequence[int], norms: list[Tensor], totals: Tensor, loss: Tensor | None,
    spoiled: Tensor, windows: Windows | None, *, rule: SpikeRule | None, nonfinite: bool,
) -> tuple[Tensor, Tensor, Tensor, Windows | None]:  # fmt: skip
    """Whether each optimizer may step (optimizers,), the verdict, and `spoiled` and windows then.

    numbers: of the optimizers that are to step. norms: gradient norms (parameters,) of each,
    totals (optimizers,): of all its parameters. The verdict (3 + optimizers,) is code, value, first
    bad gradient, and totals; `Guard.step` adds how many matrices of each parameter failed to step.
    """
    gradients = torch.cat(norms)
    # A spoiled sum holds gradients of an earlier, skipped step. It is dropped.
    stale = torch.cat([s.expand_as(n) for s, n in zip(spoiled, norms, strict=True)])
    bad = ~gradients.square().isfinite() & ~stale
    first = bad.to(torch.int8).argmax()  # torch has no argmax of bool
    fault = bad.any() & nonfinite
    ok, value = ~fault, pick(gradients, first)
    if windows is not None and rule is not None:
        values, present = watched(numbers, totals, loss, spoiled)
        spikes, windows = find_spikes(rule, windows, values, present, fault)
        ok = ~(fault | spikes.any())
        value = torch.where(fault, value, pick(values, spikes.to(torch.int8).argmax()))
    code = torch.where(fault, NONFINITE, torch.where(ok, TAKEN, SPIKE))
    verdict = torch.stack([each.to(widest(ok.device)) for each in (code, value, first, *totals)])
    spoils = [(each | ~ok) & (number not in numbers) for number, each in enumerate(spoiled)]
    return ok & ~spoiled, verdict, torch.stack(spoils), windows


def watched(
    numbers: Sequence[int], totals: Tensor, loss: Tensor | None, spoiled: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss and norms (1 + optimizers,), and which of them to judge at this step."""
    low = torch.full_like(totals[0], -torch.inf)  # is no spike
    values, judged = [low], [torch.full_like(low, loss is not None, dtype=torch.bool)]
    if loss is not None:
        values[0] = torch.where(loss.isfinite(), loss, loss.abs())  # -inf would pass as low
    for number, (total, stale) in enumerate(zip(totals, spoiled, strict=True)):
        values.append(torch.where(stale, low, total))
        judged.append(~stale & (number in numbers))
    return torch.stack(values), torch.stack(judged)


def find_spikes(
    rule: SpikeRule, windows: Windows, values: Tensor, present: Tensor, fault: Tensor
) -> tuple[Tensor, Windows]:
    """Which of the `present` values are spikes (values,), and the windows with the sound values.

    fault: whether the step is skipped anyway.
    """
    # Norms have a long upper tail; their logarithms hardly have one.
    values = torch.cat([values[:1], values[1:].clamp_min(0).log()])
    finite = values.isfinite()
    unsound = values.isnan() | (values == torch.inf)
    over = present & ~(values <= limits(rule, windows.values))
    restart = over & finite & (windows.in_a_row >= rule.patience)
    spikes = (present & unsound) | (over & ~restart)
    ended = torch.where(present, 0, windows.in_a_row)
    in_a_row = torch.where(spikes, windows.in_a_row + 1, ended)
    # Spikes would widen the window, so values of skipped steps do not enter it.
    wanted = present & finite & ~(spikes.any() | fault)
    emptied = windows.values.masked_fill(restart.unsqueeze(1), torch.nan)
    place = torch.arange(rule.window, device=values.device)
    here = (place == (windows.entered % rule.window).unsqueeze(1)) & wanted.unsqueeze(1)
    entered = torch.where(here, values.unsqueeze(1), emptied)
    return spikes, Windows(entered, windows.entered + wanted, in_a_row)


def limits(rule: SpikeRule, window: Tensor) -> Tensor:
    """The largest values (values,) that are not spikes; infinite while nothing is judged."""
    filled = ~window.isnan()
    count = filled.sum(dim=1, keepdim=True)
    centre = lower_median(window, filled, count)
    mad = lower_median((window - centre).abs(), filled, count)
    low = rule.least_spread * centre[:1].abs()
    least = torch.cat([low, torch.full_like(centre[1:], rule.least_log_spread)])
    limits = centre + rule.sigma * torch.maximum(1.4826 * mad, least)
    return torch.where(count >= rule.start, limits, torch.inf).squeeze(1)


def lower_median(values: Tensor, filled: Tensor, count: Tensor) -> Tensor:
    """Median of the filled places of each row, (rows, 1): of two middle values the lower."""
    ordered = torch.where(filled, values, torch.inf).sort(dim=1).values
    return ordered.gather(1, (count - 1).clamp_min(0) // 2)
