"""Steps that are taken whole or not at all: not where a tensor is NaN or infinite, nor where loss or gradients spike.

Nothing here waits for the device. Whether a step counts is a flag on the device, by which new weights and state are
selected from the old ones; what happened is counted there too and read when somebody asks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo as disable_compiler

from .orthogonalize import LARGEST_SINGULAR_VALUE
from .sharding import launched

TAKEN, BAD_GRADIENT, BAD_UPDATE, SPIKE = range(4)  # what a verdict begins with
COUNTERS = ("steps", "nonfinite", "spike", "in_a_row", "last_skip", "last_tensor")


@dataclass(frozen=True)
class SpikeRule:
    """When a value is an outlier: above centre + sigma * spread of its window, or not finite.

    robust: centre and spread are median and 1.4826 MAD of the values accepted last, of norms their logarithms; the
    spread is at least `least_spread` of the centre. Otherwise mean and unbiased deviation of all finite values, as in
    OLMo-core's skip-step optimizers.
    Nothing is judged before `start` values are in a window. After `patience` outliers of a value in a row its window
    starts anew. A norm's row consists of its own optimizer's steps: steps of the others neither add to it nor end it.
    """

    window: int = 128
    sigma: float = 6.0
    robust: bool = True
    start: int = 32
    least_spread: float = 0.01
    patience: int = 10

    def __post_init__(self) -> None:
        rules = {
            "window": (self.window >= 4, "at least 4"),
            "sigma": (self.sigma > 0, "positive"),
            "start": (3 <= self.start <= self.window, f"between 3 and window ({self.window})"),
            "least_spread": (self.least_spread >= 0, "0 or more, a share of the centre"),
            "patience": (self.patience >= 1, "at least 1"),
        }
        for name, (kept, rule) in rules.items():
            if not kept:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")


class Spikes:
    """The windows of several values, and what the rule says of new ones; all of it on the device."""

    def __init__(self, rule: SpikeRule, values: int, device: torch.device):
        self.rule = rule
        self.window = torch.full((values, rule.window), torch.nan, device=device)  # NaN where empty
        self.entered = torch.zeros(values, dtype=torch.int64, device=device)
        self.in_a_row = torch.zeros(values, dtype=torch.int64, device=device)  # outliers

    def limits(self) -> Tensor:
        """Largest values (values,) that are no outliers; infinite as long as nothing is judged."""
        filled = ~self.window.isnan()
        count = filled.sum(dim=1, keepdim=True)
        if self.rule.robust:
            centre = lower_median(self.window, filled, count)
            mad = lower_median((self.window - centre).abs(), filled, count)
            spread = torch.maximum(1.4826 * mad, self.rule.least_spread * centre.abs())
        else:
            centre = self.window.nanmean(dim=1, keepdim=True)
            squares = torch.where(filled, self.window - centre, 0).square().sum(dim=1, keepdim=True)
            spread = (squares / (count - 1)).sqrt()
        limits = centre + self.rule.sigma * spread
        return torch.where(count >= self.rule.start, limits, torch.inf).squeeze(1)

    def judge(self, values: Tensor, present: Tensor, fault: Tensor) -> Tensor:
        """Outliers among the `present` values. Values enter the windows; by the robust rule only those of a sound step.

        fault: the step is skipped in any case.
        """
        finite = values.isfinite()
        unsound = values.isnan() | (values == torch.inf)
        over = present & ~(values <= self.limits())
        restart = over & finite & (self.in_a_row >= self.rule.patience)
        outliers = (present & unsound) | (over & ~restart)
        self.in_a_row.copy_(torch.where(outliers, self.in_a_row + 1, torch.where(present, 0, self.in_a_row)))
        self.enter(values, present & finite & ~(outliers.any() | fault), restart)
        return outliers

    def enter(self, values: Tensor, accepted: Tensor, restart: Tensor) -> None:
        """Add finite values, by the robust rule only accepted ones; first empty the windows that `restart`."""
        self.window.masked_fill_(restart.unsqueeze(-1), torch.nan)
        wanted = values.isfinite() & accepted if self.rule.robust else values.isfinite()
        place = torch.arange(self.rule.window, device=values.device) == (self.entered % self.rule.window).unsqueeze(1)
        torch.where(place & wanted.unsqueeze(1), values.unsqueeze(1), self.window, out=self.window)
        self.entered += wanted


def lower_median(values: Tensor, filled: Tensor, count: Tensor) -> Tensor:
    """Medians (rows, 1) of the filled places of (rows, columns), the lower one of two."""
    ordered = torch.where(filled, values, torch.inf).sort(dim=1).values
    return ordered.gather(1, (count - 1).clamp_min(0) // 2)


def pick(values: Tensor, index: Tensor) -> Tensor:
    """One of several values. Compiled, `take` and indexing would read the index on the host."""
    return values.gather(0, index.unsqueeze(0)).squeeze(0)


class Skip(NamedTuple):
    """Why a step was not taken."""

    guard: str  # nonfinite or spike
    value: float  # the loss or norm that is an outlier, or what was measured of the first bad tensor
    tensor: str | None


class Guard:
    """Takes the step of several optimizers, on all ranks or on none, and only if what it sees is sound.

    Of ours it sees what they measure between the two phases of a step. One of `torch.optim` is stepped and put back,
    for which a copy of it is held and its state must lie on the device (capturable=True or fused=True). nonfinite: skip
    where a gradient's squared norm or an orthogonalized update is not finite in float32. spike: a rule for loss and
    gradient norms, one norm for each optimizer, over all ranks. process_group: one more MAX reduction agrees on the
    verdict, needed only where optimizers of torch see other gradients on other ranks.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        spike: SpikeRule | None = None,
        nonfinite: bool = True,
        process_group: Any = None,
    ):
        self.optimizers = list(optimizers)
        if not self.optimizers:
            raise ValueError("a guard needs at least one optimizer, got none")
        self.spike, self.nonfinite, self.process_group = spike, nonfinite, process_group
        self._parts: list[Any] = [o if hasattr(o, "propose") else Undoable(o) for o in self.optimizers]
        self._device = next(p for o in self.optimizers for group in o.param_groups for p in group["params"]).device
        self.reset()

    def reset(self) -> None:
        """Back to the constructed guard."""
        self._counters = {name: torch.zeros((), dtype=torch.int64, device=self._device) for name in COUNTERS}
        # Whether the gradients that an optimizer is collecting over several steps include those of a skipped one.
        self._spoiled = [torch.zeros((), dtype=torch.bool, device=self._device) for _ in self._parts]
        self._spikes = None if self.spike is None else Spikes(self.spike, 1 + len(self._parts), self._device)
        self._taken = torch.zeros(3, dtype=torch.float64, device=self._device)

    # The compiler sets no guards on state that a dict holds by parameter, and so confused parameters of one shape.
    @disable_compiler
    @torch.no_grad()
    def step(self, loss: Tensor | None = None, only: Iterable[torch.optim.Optimizer] | None = None) -> Tensor:
        """Step all optimizers, or `only` some, unless something is wrong; returns a verdict for `explain`, unread.

        loss: a scalar for the spike rule, the same on all ranks: its caller reduces it. An optimizer that is left out
        because it sums the gradients of several steps loses the whole sum if one of them is skipped. What is not finite
        in that sum is seen when it is stepped. ValueError for an optimizer that is not of this guard.
        """
        only = None if only is None else list(only)
        stepping = [only is None or any(o is chosen for chosen in only) for o in self.optimizers]
        if only is not None and sum(stepping) != len(only):
            raise ValueError(
                f"{len(only)} optimizers to step, {sum(stepping)} of them in this guard; build it with all"
            )
        both = list(zip(self._parts, stepping, strict=True))
        parts = [part for part, steps in both if steps]
        guarded = self.nonfinite or self.spike is not None
        # Each phase is over for all before the next: the updates of one overlap the messages of the others.
        for part in parts:
            part.launch()
        for part in parts:
            part.propose(guarded)
        measures = [part.finish() if steps else self._nothing(part) for part, steps in both]
        if not guarded:
            for part in parts:
                part.commit(None)
            return self._taken

        measures = self._agreed(measures)
        # What is in a spoiled sum says nothing about this step.
        stale = torch.cat([s.expand(len(m)) for s, m in zip(self._spoiled, measures, strict=True)])
        gradients, updates = torch.cat(measures).unbind(1)
        bad_gradients = ~gradients.square().isfinite() & ~stale
        bad_updates = ~(updates <= LARGEST_SINGULAR_VALUE) & ~stale
        faulty = bad_gradients | bad_updates
        nonfinite = faulty.any() & self.nonfinite
        spike, outlier = self._judged(loss, measures, stepping, nonfinite)
        ok = ~(nonfinite | spike)

        for (part, steps), spoiled in zip(both, self._spoiled, strict=True):
            if steps:
                part.commit(ok & ~spoiled)
        for steps, spoiled in zip(stepping, self._spoiled, strict=True):
            spoiled.copy_(torch.zeros_like(ok) if steps else spoiled | ~ok)
        first = faulty.to(torch.int8).argmax()
        of_gradient = pick(bad_gradients, first)
        code = torch.where(nonfinite, torch.where(of_gradient, BAD_GRADIENT, BAD_UPDATE), torch.where(ok, TAKEN, SPIKE))
        value = torch.where(nonfinite, torch.where(of_gradient, pick(gradients, first), pick(updates, first)), outlier)
        self._count(ok, nonfinite, first)
        return torch.stack([code.double(), value.double(), first.double()])

    def _nothing(self, part: Any) -> Tensor:
        return torch.zeros(len(part.tensor_names()), 2, device=self._device)

    def _judged(
        self, loss: Tensor | None, measures: list[Tensor], stepping: list[bool], nonfinite: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Whether a value is an outlier, and the first that is."""
        if self._spikes is None or self.spike is None:
            return torch.zeros_like(nonfinite), torch.zeros((), device=self._device)
        absent = torch.full((), -torch.inf, device=self._device)
        given = absent if loss is None else torch.as_tensor(loss).detach().to(self._device, torch.float32).reshape(())
        values = [given if loss is None else torch.where(given.isfinite(), given, given.abs())]
        present = [torch.full((), loss is not None, device=self._device)]
        for found, steps, spoiled in zip(measures, stepping, self._spoiled, strict=True):
            norm = torch.linalg.vector_norm(found[:, 0])
            present.append(~spoiled if steps else torch.zeros_like(spoiled))
            values.append(torch.where(present[-1], norm, absent))
        row = torch.stack(values)
        # Norms are skewed, their logarithms nearly not.
        judged = torch.cat([row[:1], row[1:].clamp_min(0).log()]) if self.spike.robust else row
        outliers = self._spikes.judge(judged, torch.stack(present), nonfinite)
        return outliers.any(), pick(row, outliers.to(torch.int8).argmax())

    def _agreed(self, measures: list[Tensor]) -> list[Tensor]:
        """The largest of all ranks, so that all of them judge the same numbers; NaN counts as infinite."""
        if self.process_group is None:
            return measures
        found = torch.cat(measures)
        found = torch.where(found.isfinite(), found, torch.inf)
        launched(dist.all_reduce, found, group=self.process_group, op=dist.ReduceOp.MAX)()
        return list(found.split([len(m) for m in measures]))

    def _count(self, ok: Tensor, nonfinite: Tensor, first: Tensor) -> None:
        count = self._counters
        count["steps"] += 1
        count["nonfinite"] += nonfinite
        count["spike"] += ~ok & ~nonfinite
        count["in_a_row"].copy_(torch.where(ok, 0, count["in_a_row"] + 1))
        count["last_skip"].copy_(torch.where(ok, count["last_skip"], count["steps"]))
        count["last_tensor"].copy_(torch.where(nonfinite, first, count["last_tensor"]))

    # ---- what is read afterwards

    def explain(self, verdict: Tensor) -> Skip | None:
        """Read the verdict of a step: None if it was taken. Waits for the device, unless it is on the host already.

        An update that went wrong although its gradient is sound makes its optimizer fall back to the plain backend.
        """
        code, value, index = verdict.tolist()
        if code == TAKEN:
            return None
        if code == SPIKE:
            return Skip("spike", value, None)
        for part in self._parts:
            names = part.tensor_names()
            if index < len(names):
                break
            index -= len(names)
        if code == BAD_UPDATE:
            part.fall_back()
        return Skip("nonfinite", value, names[int(index)])

    def report(self) -> dict[str, Any]:
        """Steps seen, skips of each kind, skips in a row, the last skipped step, the last bad tensor. Waits."""
        found: dict[str, Any] = {name: int(count) for name, count in self._counters.items()}
        names = [name for part in self._parts for name in part.tensor_names()]
        found["last_tensor"] = names[found["last_tensor"]] if found["nonfinite"] else None
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the windows and counters: tensors alone, the same on all ranks."""
        return {name: tensor.clone() for name, tensor in self._state().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a `state_dict`; ValueError, and nothing changed, where names or shapes differ."""
        own = self._state()
        expected, given = ({name: tuple(t.shape) for name, t in side.items()} for side in (own, state))
        if expected != given:
            raise ValueError(f"the guard's state is {expected}, got {given}; build the guard as it was")
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def _state(self) -> dict[str, Tensor]:
        state = dict(self._counters)
        state |= {f"spoiled.{index}": tensor for index, tensor in enumerate(self._spoiled)}
        if self._spikes is not None:
            state |= {"window": self._spikes.window, "entered": self._spikes.entered}
            state["spikes_in_a_row"] = self._spikes.in_a_row
        return state


class Undoable:
    """An optimizer of `torch.optim` with a step in phases: it is taken, and put back where that is wanted."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._measures: Tensor | None = None

    def tensor_names(self) -> list[str]:
        """The parameter of each row of `finish`'s measures."""
        names = [name for group in self.optimizer.param_groups for name in group.get("param_names", ())]
        return names or [str(index) for index in range(len(self._params()))]

    def _params(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _state(self) -> dict[tuple[Tensor, str], Tensor]:
        """State of the parameters with a gradient. TypeError for what cannot be selected on the device."""
        found = {}
        for index, param in enumerate(self._params()):
            for name, value in self.optimizer.state.get(param, {}).items() if param.grad is not None else ():
                if value is None:
                    continue
                if not isinstance(value, Tensor) or value.device != param.device:
                    kind = type(self.optimizer).__name__
                    raise TypeError(
                        f"{name} of parameter {index} in {kind} is kept on the host, so a step could not be undone "
                        f"without waiting; build {kind} with capturable=True or fused=True"
                    )
                found[param, name] = value
        return found

    def launch(self) -> None:
        """Nothing to send: its gradients are the caller's to reduce."""

    def propose(self, guarded: bool = True) -> None:
        """Take the step."""
        params = self._params()
        if not guarded:
            self.optimizer.step()
            return
        self._before = {key: value.clone() for key, value in self._state().items()}
        self._weights = [(p.detach(), p.detach().clone()) for p in params if p.grad is not None]
        zero = torch.zeros((), device=params[0].device)
        norms = [zero if p.grad is None else norm(p.grad) for p in params]
        self.optimizer.step()
        weights = torch.stack([zero if p.grad is None else norm(p.detach()) for p in params])
        self._measures = torch.stack([torch.stack(norms), torch.where(weights.isfinite(), 0, torch.inf)], dim=1)

    def finish(self) -> Tensor | None:
        """If guarded, gradient norms, and 0 or infinity for new weights that are finite or not."""
        return self._measures

    def commit(self, ok: Tensor | None) -> None:
        """Keep the step, or put weights and state back as they were."""
        if ok is None:
            return
        after = self._state()
        for weight, before in self._weights:
            torch.where(ok, weight, before, out=weight)
        for key, before in self._before.items():
            torch.where(ok, after[key], before, out=after[key])
        # State that this step has created can only be thrown away, for which the flag is read: once, at the start.
        created = [key for key in after if key not in self._before]
        if created and not ok:
            for param, name in created:
                del self.optimizer.state[param][name]
                if not self.optimizer.state[param]:
                    del self.optimizer.state[param]
        self._before, self._weights = {}, []

    def fall_back(self) -> None:
        """Nothing to fall back to."""


def norm(tensor: Tensor) -> Tensor:
    """In float32, so that one of float16 does not overflow."""
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)).float()
