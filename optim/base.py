"""What the optimizers here share: checked groups, a step in phases, and state that belongs to no number of ranks.

`launch` sends gradients to their owners; `propose` computes new weights from gradients and state, changes neither, and
sends the weights; `finish` waits for those of others; `commit` writes weights and state, where a flag on the device
says so. Before the last, whoever guards the step looks at what was measured: see guards.py.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as disable_compiler

from .guards import Guard
from .sharding import Gradients, Layout, Pairs, Parcel, Team, Unit, copy_all

# Elements that go through all passes of an update together on a CPU: a handful of float32 each stay in its cache.
CPU_PIECE = 2**18

# Where a flag is there as soon as it is computed, and reading it is cheaper than a selection.
READ_AT_ONCE = ("cpu",)

Lists = list[list[Tensor]]


@dataclass
class Update:
    """Units of one param group with what their step needs; lists run over the units."""

    units: list[Unit]
    grads: list[Tensor]
    group: dict[str, Any]
    rates: list[Any]  # step sizes, numbers or tensors
    directions: list[Tensor] = field(default_factory=list)
    changes: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # further state and its new values
    measures: list[Tensor] = field(default_factory=list)


@dataclass
class Step:
    """What an optimizer holds between the phases of a step: apart, as a compiled step may not assign its attributes."""

    reductions: list[Callable[[], Gradients]] = field(default_factory=list)
    proposed: list[Update] = field(default_factory=list)
    gathers: list[Callable[[], Pairs]] = field(default_factory=list)
    arrived: Pairs = field(default_factory=list)
    measuring: bool = False
    holding: bool = False  # directions, until the commit


class ShardedOptimizer(torch.optim.Optimizer):
    """Base of Muon, NorMuon and Adam.

    A subclass lays its parameters out (`_layouts`), describes their state (`_blank`), does what must be done to whole
    units (`_updates`), and the rest element by element (`_advance`, `_steps`). process_group None is one process alone.
    Gradients are summed over the ranks, then divided once by grad_divisor.
    """

    RANGES: ClassVar[dict[str, tuple[float, float, float]]] = {  # (lowest, below, a usual value)
        "lr": (0, math.inf, 0.02),
        "lr_mul": (0, math.inf, 1.0),
        "weight_decay": (0, math.inf, 0.0),
        "wd_mul": (0, math.inf, 1.0),
    }
    ELEMENTWISE: ClassVar[tuple[str, ...]] = ()  # names of the state that is shaped as the parameter
    _sealed = False

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        cautious: bool = False,
        exact_accumulation: bool = False,
        process_group: Any = None,
        grad_divisor: float = 1,
        nonfinite_guard: bool = True,
    ):
        if not 0 < grad_divisor < math.inf:
            raise ValueError(f"grad_divisor must be a positive number, got {grad_divisor!r}; 1 leaves the sum as it is")
        self.team, self.grad_divisor = Team.of(process_group), grad_divisor
        self.cautious, self.exact_accumulation = cautious, exact_accumulation
        super().__init__(params, {**defaults, "lr_mul": 1.0, "wd_mul": 1.0})
        self._sealed = True
        self._constructed = [{key: group[key] for key in self.defaults} for group in self.param_groups]
        self._group_of = {param: group for group in self.param_groups for param in group["params"]}
        self._names = dict(zip(self._group_of, self._parameter_names(), strict=True))
        self.layouts = self._layouts(self.team)
        keep_freed_memory()
        self._allocate()
        self._memory: dict[Unit, Tensor] = {}
        self._step = Step()
        self.guard = Guard([self], nonfinite=nonfinite_guard)

    def _layouts(self, team: Team) -> list[Layout]:
        """Who owns what in such a team, the same on every rank."""
        raise NotImplementedError

    def _blank(self, param: Tensor, device: Any) -> dict[str, Tensor]:
        """The whole state of one parameter before its first step: all zeros."""
        raise NotImplementedError

    def _updates(self, gradients: Gradients) -> Iterator[Update]:
        """What can be stepped together. Gradients are read only, state too."""
        raise NotImplementedError

    def _advance(self, grads: list[Tensor], state: Lists, group: dict[str, Any]) -> None:
        """The elementwise state after this gradient, in place, for flat tensors of one wide dtype."""
        raise NotImplementedError

    def _steps(self, state: Lists, directions: list[Tensor], rates: list[Any], group: dict[str, Any]) -> list[Tensor]:
        """What is subtracted from weights, from the state after this gradient and the directions."""
        raise NotImplementedError

    def _check_parameter(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        """ValueError for a parameter that this optimizer is not for."""

    def _check_group(self, group: dict[str, Any]) -> None:
        for name, (low, below, usual) in self.RANGES.items():
            if not low <= group[name] < below:
                raise ValueError(f"{name} must be in [{low}, {below}), got {group[name]!r}; a usual value is {usual}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the constructor: who owns what is fixed there."""
        if self._sealed:
            raise RuntimeError("ownership is fixed at construction; build a new optimizer with the extra param group")
        unknown = set(param_group) - set(self.defaults) - {"params", "param_names"}
        if unknown:
            raise ValueError(f"unknown param group key {min(unknown)!r}; known: {', '.join(sorted(self.defaults))}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._check_group(group)
        before = sum(len(other["params"]) for other in self.param_groups[:-1])
        names = group.get("param_names") or [str(before + index) for index in range(len(group["params"]))]
        for name, param in zip(names, group["params"], strict=True):
            if any(kind.__name__ == "DTensor" for kind in type(param).__mro__):
                raise TypeError(f"parameter {name} is a DTensor; pass plain tensors, replicated over process_group")
            if not param.is_floating_point():
                raise ValueError(f"parameter {name} is {param.dtype}; only floating-point parameters can be stepped")
            if not param.is_contiguous():
                raise ValueError(f"parameter {name} is not contiguous in memory; create it from tensor.contiguous()")
            self._check_parameter(name, param, group)

    def _parameter_names(self) -> list[str]:
        named = [name for group in self.param_groups for name in group.get("param_names", ())]
        return named or [str(index) for index in range(len(self._group_of))]

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self.exact_accumulation and param.dtype == torch.bfloat16 else param.dtype

    def _whole_state(self, param: Tensor, device: Any) -> dict[str, Tensor]:
        state = self._blank(param, device)
        if self.exact_accumulation and param.dtype == torch.bfloat16:
            state["remainder"] = torch.zeros(param.shape, dtype=torch.int16, device=device)
        return state

    def _allocate(self) -> None:
        """State of the owned units, and of parameters that are owned whole as views of it."""
        self._layout_of = {unit: layout for layout in self.layouts for unit in layout.units}
        self._slots: dict[Unit, dict[str, Tensor]] = {unit: {} for layout in self.layouts for unit in layout.owned}
        for unit, slots in self._slots.items():
            for name, blank in self._whole_state(unit.param, "meta").items():
                part = unit.cut(blank)
                slots[name] = torch.zeros(part.shape, dtype=part.dtype, device=unit.param.device)
                whole = part.numel() == blank.numel()
                key, value = (name, slots[name].view(blank.shape)) if whole else (f"{name}.{unit.start}", slots[name])
                self.state[unit.param][key] = value

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()  # torch's own leaves out what it does not know

    # ---- a step

    @disable_compiler
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient on any rank; the others and their state stay as they are.

        All ranks of the process group must call this. Gradients are only read. With nonfinite_guard the step is taken
        whole or not at all: on a CPU a skip is warned of, elsewhere `guard.explain(verdict)` reads it when asked.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self.verdict = self.guard.step()
        if self.verdict.device.type in READ_AT_ONCE and (skip := self.guard.explain(self.verdict)) is not None:
            warnings.warn(f"step skipped: {skip}", stacklevel=3)
        return loss

    @torch.no_grad()
    def launch(self) -> None:
        """Send all gradients to their owners; collectives, in an order that no missing gradient changes."""
        # Nothing is gained by hooks that send each as it becomes ready: a compiled backward is one node of autograd,
        # after which all gradients come at once.
        self._step.reductions = [layout.reduce() for layout in self.layouts]
        self._step.proposed, self._step.gathers, self._step.arrived = [], [], []

    @torch.no_grad()
    def propose(self, guarded: bool = True) -> None:
        """Compute the step from what `launch` has sent, and send the new weights.

        Unguarded, nothing is measured, and what this rank alone decides is written at once.
        """
        step = self._step
        step.measuring = guarded
        for layout, reduction in zip(self.layouts, step.reductions, strict=True):
            found: dict[Unit, Tensor] = {}
            places = layout.open() if isinstance(layout, Parcel) else None
            step.holding = guarded and places is None
            for update in self._updates(reduction()):
                found |= zip(update.units, update.measures, strict=True) if guarded else {}
                if places is not None:
                    self._sweep(update, None, [places[unit] for unit in update.units], state=False)
                    update.directions = []
                elif not guarded:
                    self._write(update, None)
                    continue
                step.proposed.append(update)
            layout.measure(found)
            if isinstance(layout, Parcel):
                step.gathers.append(layout.share())

    @torch.no_grad()
    def finish(self) -> Tensor | None:
        """Wait for others' weights; guarded, returns gradient and spectral norms (units, 2) float32 of all ranks."""
        self._step.arrived = [pair for wait in self._step.gathers for pair in wait()]
        return torch.cat([layout.measures for layout in self.layouts]) if self._step.measuring else None

    def _kept(self, unit: Unit, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Memory for directions that wait for the commit; the same in every step, as fresh pages cost more than it."""
        if not self._step.holding:
            return None
        if unit not in self._memory or self._memory[unit].shape != shape:
            self._memory[unit] = torch.empty(shape, dtype=dtype, device=unit.param.device)
        return self._memory[unit]

    @torch.no_grad()
    def commit(self, ok: Tensor | None) -> None:
        """Write what was proposed, weights and state; with a flag on the device, only if that is true."""
        if ok is not None and ok.device.type in READ_AT_ONCE:
            taken, ok = bool(ok), None
        else:
            taken = True
        if taken:
            for update in self._step.proposed:
                self._write(update, ok)
            select(ok, self._step.arrived)
        self._step.proposed, self._step.gathers, self._step.arrived = [], [], []

    def _write(self, update: Update, ok: Tensor | None) -> None:
        travelled = isinstance(self._layout_of[update.units[0]], Parcel)
        weights = [] if travelled else [unit.cut(unit.param.detach()) for unit in update.units]
        self._sweep(update, ok, weights, state=True)
        select(ok, update.changes)

    def _sweep(self, update: Update, ok: Tensor | None, weights: list[Tensor], state: bool) -> None:
        """Step `weights`, if there are any, and with `state` what is shaped like them; in place where that is safe.

        Weights that travel are computed before the commit and the state, once more, at it: it may not change earlier.
        Remainders of exact weights become changes, written at the commit.
        """
        slots = [self._slots[unit] for unit in update.units]
        names = [*self.ELEMENTWISE, *(["remainder"] if "remainder" in slots[0] else [])]
        columns = [update.grads, *([slot[name] for slot in slots] for name in names), update.directions, weights]
        for rates, (grads, *kept, directions, targets) in pieces(columns, update.rates):
            low = kept.pop() if "remainder" in names else []
            wide = torch.promote_types(grads[0].dtype, torch.float32)
            grads, directions = ([tensor.to(wide) for tensor in column] for column in (grads, directions))
            if self.grad_divisor != 1:
                grads = list(torch._foreach_div(grads, self.grad_divisor))
            fresh = [[tensor.to(wide, copy=ok is not None or not state) for tensor in column] for column in kept]
            self._advance(grads, fresh, update.group)
            if targets:
                stepped = join(targets, low) if low else [tensor.to(wide, copy=ok is not None) for tensor in targets]
                self._decay_and_step(stepped, self._steps(fresh, directions, rates, update.group), update.group)
                if low:
                    stepped, remainders = divide(stepped)
                    update.changes += zip(low, remainders, strict=True)
                select(ok, changed(targets, stepped))
            if state:
                select(ok, [pair for old, new in zip(kept, fresh, strict=True) for pair in changed(old, new)])

    def _decay_and_step(self, weights: list[Tensor], steps: list[Tensor], group: dict[str, Any]) -> None:
        """In place. Decay is decoupled and, if cautious, left out where it works against the step."""
        decay = group["lr"] * group["weight_decay"] * group["wd_mul"]
        if self.cautious:  # Liang et al., arXiv:2411.16085
            for weight, step in zip(weights, steps, strict=True):
                weight.sub_(torch.where(weight * step >= 0, weight * decay, 0))
        elif group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - decay)
        torch._foreach_sub_(weights, steps)

    def reset(self) -> None:
        """Back to the constructed optimizer, in place: zero state, and the hyperparameters that were given."""
        for group, constructed in zip(self.param_groups, self._constructed, strict=True):
            group.update(constructed)
        for slots in self._slots.values():
            for tensor in slots.values():
                tensor.zero_()
        self._step = Step()
        self.guard.reset()

    # ---- checkpoints

    @torch.no_grad()
    def named_state(self, rank: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """("parameter.state", whole tensor), one after the other, on that rank of the group (None: on every rank).

        Tensors alone, ready to be written as safetensors. A collective: all ranks must exhaust it.
        """
        for param, units in self._units_of().items():
            for name, whole in self._whole_state(param, param.device).items():
                for unit in units:
                    part = unit.cut(whole)
                    if unit in self._slots:
                        part.copy_(self._slots[unit][name])
                    if whole.ndim or unit is units[0]:
                        self._layout_of[unit].complete(unit, part)
                if rank in (None, self.team.rank):
                    yield f"{self._names[param]}.{name}", whole

    @torch.no_grad()
    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over `named_state` of any number of ranks and grouping; ValueError, nothing changed, where it differs.

        Names must be those of this optimizer's parameters, shapes and dtypes those of their state.
        """
        needed = {
            f"{self._names[param]}.{name}": blank
            for param in self._group_of
            for name, blank in self._whole_state(param, "meta").items()
        }
        wrong = [f"lacks {name}" for name in needed if name not in tensors]
        wrong += [f"has an unknown {name}" for name in tensors if name not in needed]
        wrong += [
            f"has {name} as {tuple(tensors[name].shape)} {tensors[name].dtype}, not {tuple(blank.shape)} {blank.dtype}"
            for name, blank in needed.items()
            if name in tensors and (tensors[name].shape, tensors[name].dtype) != (blank.shape, blank.dtype)
        ]
        if wrong:
            raise ValueError(f"the state {'; '.join(wrong[:5])}; build the optimizer as it was for the state")
        for unit, slots in self._slots.items():
            for name, slot in slots.items():
                slot.copy_(unit.cut(tensors[f"{self._names[unit.param]}.{name}"]))

    def state_dict(self) -> dict[str, Any]:
        """A snapshot in torch's form with the whole state of every parameter: the same on all ranks, and a collective.

        Loads at any number of ranks. With named parameters, `param_groups` may differ on loading.
        """
        state: dict[int, dict[str, Tensor]] = {}
        index = {name: number for number, name in enumerate(self._names.values())}
        for key, tensor in self.named_state():
            name, _, kind = key.rpartition(".")
            state.setdefault(index[name], {})[kind] = tensor
        return {"state": state, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`; ValueError, and nothing changed, where it does not fit.

        State goes by parameter name, or by position where no names were given. Hyperparameters are taken over if the
        groups hold the same parameters; else this optimizer keeps its own.
        """
        groups, state = state_dict["param_groups"], state_dict["state"]
        sizes, saved_sizes = ([len(group["params"]) for group in side] for side in (self.param_groups, groups))
        if sizes != saved_sizes and not all("param_names" in group for group in (*groups, *self.param_groups)):
            raise ValueError(f"the state has groups of {saved_sizes} parameters, this {sizes}; name them to regroup")
        names = [name for group in groups for name in group.get("param_names", map(str, group["params"]))]
        indices = [index for group in groups for index in group["params"]]
        tensors = {
            f"{name}.{kind}": tensor
            for name, index in zip(names, indices, strict=True)
            for kind, tensor in state.get(index, {}).items()
        }
        for group, saved in zip(self.param_groups, groups, strict=False):
            if sizes == saved_sizes and saved.get("split") != group.get("split"):
                raise ValueError(
                    f"the state is of split {saved.get('split')}, this of {group.get('split')}; build alike"
                )
        self.load_named_state(tensors)
        members = [[self._names[param] for param in group["params"]] for group in self.param_groups]
        saved_members = [list(group.get("param_names", map(str, group["params"]))) for group in groups]
        if members == saved_members:
            for group, saved in zip(self.param_groups, groups, strict=True):
                own = ("params", "param_names", "backend")  # a backend is the machine's, not the state's
                group.update({key: value for key, value in saved.items() if key not in own})

    def _units_of(self) -> dict[Tensor, list[Unit]]:
        found: dict[Tensor, list[Unit]] = {param: [] for param in self._group_of}
        for unit in self._layout_of:
            found[unit.param].append(unit)
        return found

    # ---- what the optimizer says of itself

    def tensor_names(self) -> list[str]:
        """The parameter that each row of `finish`'s measures belongs to."""
        return [self._names[unit.param] for layout in self.layouts for unit in layout.units]

    def fall_back(self) -> None:
        """Called when an update went wrong although its gradient is sound."""

    def describe(self, world_size: int | None = None) -> str:
        """The owner table at this number of ranks (None: the present one): what each holds and sends in a step."""
        team = self.team if world_size is None else Team(None, 0, world_size)
        lines = []
        for layout in self._layouts(team):
            loads = [sum(unit.numel for unit in share) for share in layout.shares]
            sent, extra = layout.sent()
            lines.append(
                f"{type(layout).__name__.lower()} of {len(layout.units)} units, {sum(loads):,} elements: "
                f"{min(loads):,} to {max(loads):,} a rank, {sent:,} bytes sent by each, {extra:,} of them padding"
            )
        return "\n".join(lines)


def keep_freed_memory() -> None:
    """Let the C library keep what this process frees, where it is glibc: fresh pages cost more than the arithmetic.

    Freeing one block of 32 MiB makes it keep up to twice that much, in place of a few hundred KiB.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


def pieces(columns: Lists, rates: list[Any]) -> Iterator[tuple[list[Any], Lists]]:
    """(rates, flat columns) to compute together: everything, or on a CPU what fits its cache; empty columns stay so."""
    if columns[0][0].device.type != "cpu":
        yield rates, [[tensor.view(-1) for tensor in column] for column in columns]
        return
    for index, rate in enumerate(rates):
        row = [column[index].view(-1).split(CPU_PIECE) if column else () for column in columns]
        for piece in zip_longest(*row):
            yield [rate], [[] if tensor is None else [tensor] for tensor in piece]


def changed(old: list[Tensor], new: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs that are not one tensor, computed in place."""
    return [pair for pair in zip(old, new, strict=True) if pair[0] is not pair[1]]


def select(ok: Tensor | None, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first, or only where `ok`: chosen on the device, nothing is multiplied."""
    if ok is None:
        copy_all(pairs)
        return
    for target, value in pairs:
        torch.where(ok, value.to(target.dtype), target, out=target)


def join(high: list[Tensor], low: list[Tensor]) -> list[Tensor]:
    """float32 weights from their bf16 rounding and the int16 remainder of the bits."""
    bits = [(h.view(torch.int16).int() << 16) + rest.int() for h, rest in zip(high, low, strict=True)]
    return [b.view(torch.float32) for b in bits]


def divide(weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The bf16 nearest to each float32 weight, halves away from zero, and what is left of its bits in an int16."""
    bits = [weight.view(torch.int32) for weight in weights]
    # A NaN keeps its upper half, made quiet: rounded, it might become infinite or a zero.
    high = [torch.where(w.isnan(), b >> 16 | 0x40, (b + 0x8000) >> 16) for w, b in zip(weights, bits, strict=True)]
    low = [(b - (h << 16)).to(torch.int16) for b, h in zip(bits, high, strict=True)]
    return [h.to(torch.int16).view(torch.bfloat16) for h in high], low
