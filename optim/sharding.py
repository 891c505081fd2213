"""How one optimizer class serves 1..N ranks: who owns which part of a parameter, and how gradients and weights travel.

A step has three phases: gradients are summed onto the rank that owns them, the owner updates, and the new weights
travel to everyone. A layout says what owning means: everything (`Layout`, one rank), whole parameters (`Stack`), a
block of rows of one parameter (`Rows`), or the same update on every rank (`Mirror`).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Newer torch renames these two and warns about the old names; a build without distributed has neither.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))
all_gather: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))

# In a message each gradient is followed by the number of ranks that have one. One element would do; eight keep the
# gradient after it aligned to 16 bytes in bf16.
COUNT = 8

Gradients = list[tuple[Tensor, Tensor]]  # (parameter, sum over ranks of the owned part of its gradient)


class Team(NamedTuple):
    """The ranks that step together."""

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, process_group: Any) -> "Team":
        if process_group is None:
            return cls(None, 0, 1)
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ValueError("this process is not a member of process_group; build the optimizer on its members only")
        return cls(process_group, rank, dist.get_world_size(process_group))


class Layout:
    """Parameters that this rank owns entirely, nothing being sent; the layouts below override what they do otherwise.

    `reduce` and `share` launch their communication and return what waits for it, so that many can be in flight.
    """

    def __init__(self, params: list[Tensor], team: Team):
        self.params, self.team = params, team

    def reduce(self) -> Callable[[], Gradients]:
        """Gradients onto their owners; a parameter without one on any rank is left out."""
        return lambda: [(param, param.grad) for param in self.params if param.grad is not None]

    def share(self) -> Callable[[], None]:
        """Owned parts of the parameters to everyone."""
        return lambda: None

    def part(self, param: Tensor, whole: Tensor) -> Tensor | None:
        """The view of `whole`, shaped like the parameter or its state, that this rank owns."""
        return whole

    def complete(self, param: Tensor, whole: Tensor) -> None:
        """Fill in the parts of `whole` that other ranks own."""


class Stack(Layout):
    """Parameters of one shape, dtype and device in equal runs of consecutive ones: rank r owns the r-th run."""

    def __init__(self, params: list[Tensor], team: Team):
        super().__init__(params, team)
        self.chunk = math.ceil(len(params) / team.size)
        self.owner = {param: index // self.chunk for index, param in enumerate(params)}
        self.owned = [param for param in params if self.owner[param] == team.rank]

    def reduce(self) -> Callable[[], Gradients]:
        like = self.params[0]
        # The rows beyond the last parameter pad the message and are never read.
        message = like.new_empty(self.team.size * self.chunk, like.numel() + COUNT)
        message[:, -COUNT:] = 1
        rows = list(zip(self.params, message, strict=False))
        for param, row in rows:
            if param.grad is None:
                row.zero_()
        copy_all((row[:-COUNT].view(param.shape), param.grad) for param, row in rows if param.grad is not None)
        received = message.new_empty(self.chunk, message.shape[1])
        work = reduce_scatter(received, message, group=self.team.group, async_op=True)

        def wait() -> Gradients:
            work.wait()
            pairs = zip(self.owned, received, strict=False)
            # Reading a count waits for the device, so it is read only where this rank has no gradient itself.
            return [(p, row[:-COUNT].view(p.shape)) for p, row in pairs if p.grad is not None or bool(row[-1] > 0)]

        return wait

    def share(self) -> Callable[[], None]:
        like = self.params[0]
        mine = like.new_empty(self.chunk, *like.shape)
        copy_all(zip(mine, self.owned, strict=False))
        everyone = like.new_empty(self.team.size * self.chunk, *like.shape)
        work = all_gather(everyone, mine, group=self.team.group, async_op=True)

        def finish() -> None:
            work.wait()
            fresh = zip(self.params, everyone, strict=False)
            copy_all((param, new) for param, new in fresh if self.owner[param] != self.team.rank)

        return finish

    def part(self, param: Tensor, whole: Tensor) -> Tensor | None:
        return whole if self.owner[param] == self.team.rank else None

    def complete(self, param: Tensor, whole: Tensor) -> None:
        dist.broadcast(whole, group=self.team.group, group_src=self.owner[param])


class Mirror(Layout):
    """Parameters that every rank updates alike, from one summed message, which also counts gradients for `counted`."""

    def __init__(self, params: list[Tensor], team: Team, counted: list[Tensor]):
        super().__init__(params, team)
        self.counted = counted
        self.counts: dict[Tensor, Tensor] = {}

    def reduce(self) -> Callable[[], Gradients]:
        dtype = torch.float64 if any(param.dtype == torch.float64 for param in self.params) else torch.float32
        sizes = [param.numel() for param in self.params]
        message = torch.zeros(sum(sizes) + len(self.counted), dtype=dtype, device=self.counted[0].device)
        *flat, counts = message.split([*sizes, len(self.counted)])
        sums = [(param, total.view(param.shape)) for param, total in zip(self.params, flat, strict=True)]
        copy_all((total, param.grad) for param, total in sums if param.grad is not None)
        self.counts = dict(zip(self.counted, counts, strict=True))
        counts.fill_(1)
        for param, count in self.counts.items():
            if param.grad is None:
                count.zero_()
        work = dist.all_reduce(message, group=self.team.group, async_op=True)

        def wait() -> Gradients:
            work.wait()
            return [(param, total) for param, total in sums if self.used(param)]

        return wait

    def used(self, param: Tensor) -> bool:
        """Whether any rank has a gradient; waits for the device only where this rank has none."""
        return param.grad is not None or bool(self.counts[param] > 0)


class Rows(Layout):
    """One large parameter whose rows divide evenly: rank r owns the r-th block. `census` counts its gradients."""

    def __init__(self, param: Tensor, team: Team, census: Mirror):
        super().__init__([param], team)
        self.census = census
        self.rows = param.shape[0] // team.size

    def reduce(self) -> Callable[[], Gradients]:
        (param,) = self.params
        grad = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
        received = grad.new_empty(self.rows, *grad.shape[1:])
        work = reduce_scatter(received, grad, group=self.team.group, async_op=True)

        def wait() -> Gradients:
            work.wait()
            return [(param, received)] if self.census.used(param) else []

        return wait

    def share(self) -> Callable[[], None]:
        return self._gather(self.params[0].detach())

    def part(self, param: Tensor, whole: Tensor) -> Tensor:
        # A step count has no rows and is the same on every rank.
        return whole.narrow(0, self.team.rank * self.rows, self.rows) if whole.ndim else whole

    def complete(self, param: Tensor, whole: Tensor) -> None:
        if whole.ndim:
            self._gather(whole)()

    def _gather(self, whole: Tensor) -> Callable[[], None]:
        # Not every backend allows the input to lie inside the output, hence the copy.
        part = whole.narrow(0, self.team.rank * self.rows, self.rows).clone()
        return all_gather(whole, part, group=self.team.group, async_op=True).wait


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first."""
    targets, sources = [], []
    for target, source in pairs:
        targets.append(target)
        sources.append(source)
    if targets:  # the multi-tensor operations refuse empty lists
        torch._foreach_copy_(targets, sources)


class ShardedOptimizer(torch.optim.Optimizer):
    """What the optimizers here share: checked groups, state complete from construction, checkpoints of whole tensors.

    A subclass lays its parameters out (`_layouts`), describes their state (`_blank`) and updates (`_update`).
    process_group None is one process alone. Gradients are summed over the ranks, then divided once by grad_divisor.
    """

    RANGES: ClassVar[dict[str, tuple[float, float, float]]] = {  # (lowest, below, a usual value)
        "lr": (0, math.inf, 0.02),
        "lr_mul": (0, math.inf, 1.0),
        "weight_decay": (0, math.inf, 0.0),
        "wd_mul": (0, math.inf, 1.0),
    }
    _sealed = False

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], process_group: Any, grad_divisor: float):
        if not 0 < grad_divisor < math.inf:
            raise ValueError(f"grad_divisor must be a positive number, got {grad_divisor!r}; 1 leaves the sum as it is")
        self.team, self.grad_divisor = Team.of(process_group), grad_divisor
        super().__init__(params, {**defaults, "lr_mul": 1.0, "wd_mul": 1.0})
        self._sealed = True
        self._constructed = [{key: group[key] for key in self.defaults} for group in self.param_groups]
        self._group_of = {param: group for group in self.param_groups for param in group["params"]}
        self._all_layouts = self._layouts(list(self._group_of))
        self._layout_of = {param: layout for layout in self._all_layouts for param in layout.params}
        for param in self._group_of:
            for name, whole in self._blank(param, param.device).items():
                part = self._layout_of[param].part(param, whole)
                if part is not None:
                    self.state[param][name] = part.clone()

    def _layouts(self, params: list[Tensor]) -> list[Layout]:
        raise NotImplementedError

    def _blank(self, param: Tensor, device: Any) -> dict[str, Tensor]:
        """The whole state of one parameter before its first step: all zeros."""
        raise NotImplementedError

    def _update(self, layout: Layout, gradients: Gradients) -> None:
        """Step the owned parts; gradients are read only."""
        raise NotImplementedError

    def _check_parameter(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

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
        names = group.get("param_names") or [str(index) for index in range(len(group["params"]))]
        for name, param in zip(names, group["params"], strict=True):
            if any(kind.__name__ == "DTensor" for kind in type(param).__mro__):
                raise TypeError(f"parameter {name} is a DTensor; pass plain tensors, replicated over process_group")
            self._check_parameter(name, param, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient on any rank; the others and their state stay as they are.

        All ranks of the process group must call this. Gradients are only read.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        waits = [layout.reduce() for layout in self._all_layouts]  # all in flight before the first update
        finishes = []
        for layout, wait in zip(self._all_layouts, waits, strict=True):
            self._update(layout, wait())
            finishes.append(layout.share())
        for finish in finishes:
            finish()
        return loss

    def reset(self) -> None:
        """Back to the constructed optimizer, in place: zero state, and the hyperparameters that were given."""
        for group, constructed in zip(self.param_groups, self._constructed, strict=True):
            group.update(constructed)
        for state in self.state.values():
            for tensor in state.values():
                tensor.zero_()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """A snapshot with the whole state of every parameter: equal on all ranks, loadable at any number of them.

        A collective: all ranks of the process group must call it.
        """
        state = {}
        for index, (param, layout) in enumerate(self._layout_pairs()):
            state[index] = self._blank(param, param.device)
            for name, whole in state[index].items():
                part = layout.part(param, whole)
                if part is not None:
                    part.copy_(self.state[param][name])
                layout.complete(param, whole)
        return {"state": state, "param_groups": super().state_dict()["param_groups"]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict()` of any number of ranks; ValueError, and nothing changed, where it does not fit."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        sizes, saved_sizes = ([len(group["params"]) for group in side] for side in (self.param_groups, groups))
        if sizes != saved_sizes:
            raise ValueError(f"the state has groups of {saved_sizes} parameters, this optimizer {sizes}; group alike")
        for index, (param, _) in enumerate(self._layout_pairs()):
            needed = {name: tuple(whole.shape) for name, whole in self._blank(param, "meta").items()}
            found = {name: tuple(whole.shape) for name, whole in state.get(index, {}).items()}
            if needed != found:
                raise ValueError(f"parameter {index} needs state {needed}, got {found}; build the optimizer as it was")
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
        for index, (param, layout) in enumerate(self._layout_pairs()):
            for name, whole in state[index].items():
                part = layout.part(param, whole)
                if part is not None:
                    self.state[param][name].copy_(part)

    def _layout_pairs(self) -> list[tuple[Tensor, Layout]]:
        return [(param, self._layout_of[param]) for param in self._group_of]
