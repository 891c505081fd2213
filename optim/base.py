"""What Muon, NorMuon and Adam share: group checks, buckets, the step, and whole state.

A method is a pure function on stacks of parts. `update` runs it and writes new or old values, as
the guard's flag says. A step is `launch` (send gradients), `measure` (their norms), the guard's
judgement, `commit` (update, send weights) and `finish` (receive weights).
"""

import functools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as run_eagerly

from .buckets import READ_AT_ONCE, Bucket, Message, Part, Team, copy_all, deal, gathered
from .guards import Guard
from .orthogonalize import LARGEST_SINGULAR_VALUE
from .state import StateByName, names_of

# Not on a CPU: compiling takes half a minute there, and a step is bound by matrix products that
# compile to the same calls.
COMPILED_ON = ("cuda",)


def update(
    method: Callable[..., tuple[Tensor, ...]],
    gradients: list[Tensor],
    weights: list[Tensor],
    target: Tensor | None,
    state: list[Tensor],
    taken: Tensor | None,
    divisor: float,
    rates: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Run a method on stacked parts. Writes state in place, and weights to `target` or in place.

    taken: a flag, or one a matrix; where it is false, old values stay. Computes in float32 at
    least. Returns what the method returns after weights and state. This function is compiled.
    """
    wide = torch.promote_types(weights[0].dtype, torch.float32)
    old, sums = stack(weights), stack(gradients).to(wide)
    if divisor != 1:  # once, in float32: dividing each bf16 gradient would lose bits
        sums = sums / divisor
    results = method(sums, old.to(wide), *[tensor.to(wide) for tensor in state], **rates)
    new, *fresh = results[: 1 + len(state)]
    if taken is not None:
        flag = taken.view(-1, *[1] * (old.ndim - 1))
        new = torch.where(flag, new.to(old.dtype), old)
        pairs = zip(fresh, state, strict=True)
        fresh = [torch.where(flag, value.to(kept.dtype), kept) for value, kept in pairs]
    if target is None:
        copy_all(weights, new.split([len(part) for part in weights]))
    else:
        target.copy_(new)
    copy_all(state, fresh)
    return results[1 + len(state) :]


@functools.cache
def compiled_update() -> Callable[..., Any]:
    """`update`, compiled once for each kind of bucket; torch's own limit would be 8 graphs.

    If compiling fails, the compiler logs why and the update stays eager.
    """
    settings = torch._dynamo.config.patch(recompile_limit=256, suppress_errors=True)
    return settings(torch.compile(update, dynamic=False))


def stack(tensors: list[Tensor]) -> Tensor:
    """Join parts (n, ...) along their first dimension. A single part is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def descend(weights: Tensor, step: Tensor, decay: Any, cautious: bool) -> Tensor:
    """The weights after decoupled decay and the step.

    decay: a share of the weights, or None. cautious: no decay where it works against the step
    (Liang et al., arXiv:2411.16085).
    """
    if decay is None:
        return weights - step
    if cautious:
        return weights - torch.where(weights * step >= 0, weights * decay, 0) - step
    return (weights * (1 - decay)).sub_(step)


class ShardedOptimizer(StateByName, torch.optim.Optimizer):
    """Base of Muon, NorMuon and Adam.

    A subclass cuts parameters into parts (`_cuts`), describes their state (`_states`) and names its
    method (`_method`). process_group: None for one process. Gradients are summed over the ranks
    and divided once by grad_divisor. compiled: whether to compile `update`; None: only on CUDA.
    """

    RANGES: ClassVar[dict[str, tuple[float, float, float]]] = {  # least, bound, usual
        "lr": (0, math.inf, 0.02),
        "lr_mul": (0, math.inf, 1.0),
        "weight_decay": (0, math.inf, 0.0),
        "wd_mul": (0, math.inf, 1.0),
    }
    team: Any = None

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        cautious: bool = False,
        process_group: Any = None,
        grad_divisor: float = 1,
        nonfinite_guard: bool = True,
        compiled: bool | None = None,
    ):
        if not 0 < grad_divisor < math.inf:
            raise ValueError(f"grad_divisor must be positive, got {grad_divisor!r}; 1 is a sum")
        self.cautious, self.grad_divisor, self.compiled = cautious, grad_divisor, compiled
        self._constructed: list[dict[str, Any]] = []
        super().__init__(params, {**defaults, "lr_mul": 1.0, "wd_mul": 1.0})
        self.team = Team.of(process_group)
        keep_freed_memory()
        self._build()
        self._inside = False  # whether `step` itself calls the guard
        self._flag: tuple[Tensor | None] | None = None  # `ok` of a guard above this optimizer
        self.guard = Guard([self], nonfinite=nonfinite_guard)

    # ---- what a subclass says

    def _cuts(self, param: Tensor, group: dict[str, Any], ranks: int) -> list[tuple[int, ...]]:
        """Shapes of the parts that a parameter is cut into, in the order of its memory."""
        raise NotImplementedError

    def _method(self, bucket: Bucket) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
        """The method, its fixed options, and its rates, which may change at every step."""
        raise NotImplementedError

    def _limit(self, bucket: Bucket) -> int:
        """How many parts one call of the method takes."""
        raise NotImplementedError

    def _check(self, group: dict[str, Any], names: list[str]) -> None:
        """Raise ValueError or TypeError for a setting or parameter that cannot work."""
        for name, (low, below, usual) in self.RANGES.items():
            if not low <= group[name] < below:
                value = f"{name} must be in [{low}, {below}), got {group[name]!r}"
                raise ValueError(f"{value}; a usual value is {usual}")
        for name, param in zip(names, group["params"], strict=True):
            if any(kind.__name__ == "DTensor" for kind in type(param).__mro__):
                raise TypeError(f"parameter {name} is a DTensor; pass plain tensors")
            if not param.is_floating_point():
                raise ValueError(f"parameter {name} is {param.dtype}; pass floating-point tensors")
            if not param.is_contiguous():
                raise ValueError(f"parameter {name} is not contiguous; build it from .contiguous()")

    # ---- construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters and keep the state of the others. Collective.

        ValueError for an impossible setting or parameter, TypeError for a DTensor.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group, names_of(self)[-len(group["params"]) :])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        own = ("params", "param_names")
        self._constructed.append({key: group[key] for key in group if key not in own})
        if self.team is not None:
            self._rebuild()

    def _rebuild(self) -> None:
        """Cut and deal again, because parameters were added or changed dtype. Keeps the state."""
        kept = dict(self.named_state())
        self._build()
        self._load(kept)

    def _build(self) -> None:
        """Cut the parameters, deal the parts, and allocate the state of those owned here."""
        self._group_of = {p: group for group in self.param_groups for p in group["params"]}
        self._names = dict(zip(self._group_of, names_of(self), strict=True))
        self._device = next(iter(self._names)).device
        self._kinds = {param: (param.dtype, param.device) for param in self._names}
        self._parts = {param: self._cut(number, param) for number, param in enumerate(self._names)}
        self._owner: dict[Part, int] = {}
        self._place: dict[Part, tuple[Bucket, slice]] = {}  # of the parts owned here
        self.messages: list[Message] = []
        self.buckets: list[Bucket] = []
        for kind in dict.fromkeys(self._kinds.values()):
            alike = [parts for param, parts in self._parts.items() if self._kinds[param] == kind]
            parts = [part for each in alike for part in each]
            if self.team.size == 1:
                self._own(parts)
            else:
                self._share(parts)
        numbers = [part.number for bucket in self.buckets for part in bucket.parts]
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self._expose()

    def _cut(self, number: int, param: Tensor) -> list[Part]:
        if param.numel() == 0:  # nothing to step, though it has state
            return []
        group, parts, start = self._group_of[param], [], 0
        for shape in self._cuts(param, group, self.team.size):
            # The rate depends on the stored shape, so a bucket holds parameters of one shape.
            key = (shape, tuple(param.shape), id(group))
            parts.append(Part(param, number, start, shape, key))
            start += math.prod(shape)
        return parts

    def _share(self, parts: list[Part]) -> None:
        """Deal parts of one dtype to the ranks and build the messages that carry them."""
        keys = list(dict.fromkeys(part.key for part in parts))
        for shares in deal(parts, self.team.size):
            for rank, share in enumerate(shares):
                # Parts of one bucket stand together: a bucket is one stretch of the message.
                share.sort(key=lambda part: (keys.index(part.key), part.number, part.start))
                self._owner.update(dict.fromkeys(share, rank))
            self.messages.append(Message(shares, self.team))
            self.messages[-1].buckets = self._own(shares[self.team.rank])

    def _own(self, parts: list[Part]) -> list[Bucket]:
        together: dict[Any, list[Part]] = {}
        for part in parts:
            together.setdefault(part.key, []).append(part)
        buckets = []
        for members in together.values():
            param, (each, *rest) = members[0].param, members[0].shape
            state = {}
            for name, kind in self._states(param, self._group_of[param]).items():
                shape = (each * len(members), *(rest if kind.each is None else kind.each))
                state[name] = torch.zeros(shape, dtype=kind.dtype, device=param.device)
            buckets.append(Bucket(members, self._group_of[param], state))
            for index, part in enumerate(members):
                self._place[part] = buckets[-1], slice(index * each, (index + 1) * each)
        self.buckets += buckets
        return buckets

    def _expose(self) -> None:
        """Fill torch's `self.state` with views of the buckets, if this process owns everything."""
        self.state = defaultdict(dict)
        if self.team.size > 1:
            return
        for param, parts in self._parts.items():
            for name, kind in self._states(param, self._group_of[param]).items():
                for bucket, place in [self._place[part] for part in parts]:
                    self.state[param][name] = bucket.state[name][place].view(kind.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._expose()  # pickling turned the views into copies

    # ---- a step

    @run_eagerly  # in a compiled caller, dicts keyed by parameters would go stale without a word
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient on any rank. Returns the closure's loss.

        Collective. Gradients are not changed. With nonfinite_guard a step is taken whole or not at
        all. A skip gives a warning on a CPU; elsewhere ask `guard.explain(self.verdict)`, which
        waits for the device. TypeError for a sparse gradient.
        """
        if self._flag is not None:
            self.commit(*self._flag)
            return None
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self._inside = True
        try:
            self.verdict = self.guard.step()
        finally:
            self._inside = False
        if self.verdict.device.type in READ_AT_ONCE:
            skip = self.guard.explain(self.verdict)
            if skip is not None:
                warnings.warn(f"step skipped: {skip}", stacklevel=3)
        return loss

    def commit_as_step(self, ok: Tensor | None) -> None:
        """`commit`, called through `step` so that hooks run and torch's lr_scheduler counts it."""
        if self._inside:
            self.commit(ok)
            return
        self._flag = (ok,)
        try:
            self.step()
        finally:
            self._flag = None

    @torch.no_grad()
    def launch(self) -> None:
        """Send all gradients to their owners. Messages are the same if a gradient is missing."""
        if any((param.dtype, param.device) != kind for param, kind in self._kinds.items()):
            self._rebuild()
        for param, name in self._names.items():
            if param.grad is not None and param.grad.layout != torch.strided:
                fix = "build its module with sparse=False or give it to torch.optim.SparseAdam"
                raise TypeError(f"parameter {name} has a sparse gradient; {fix}")
        # Hooks that send each gradient early would gain nothing: a compiled backward pass is one
        # autograd node, which delivers all gradients at its end.
        self._waits = [message.reduce() for message in self.messages]

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Norm of each parameter's mean gradient (parameters,), float32, equal on all ranks."""
        for wait in self._waits:
            wait()
        self._waits = []  # what was sent is no longer needed
        norms = [norm.double() for bucket in self.buckets for norm in bucket.norms()]
        squares = torch.zeros(len(self._names), dtype=torch.float64, device=self._device)
        if norms:
            squares.index_add_(0, self._numbers, torch.stack(norms).square())
        missing = [number for number, p in enumerate(self._names) if p.grad is None]
        totals, present = self._everywhere(squares, missing)
        # Which parameters have a gradient; None: all. Read on the host only where that is free.
        readable = self._device.type in READ_AT_ONCE
        self._present = None if readable and present.all() else present
        if self.team.size == 1 and not missing:
            self._present = None
        return (totals.sqrt() / self.grad_divisor).float()

    def _everywhere(self, squares: Tensor, missing: list[int]) -> tuple[Tensor, Tensor]:
        """Squares summed over the ranks, and whether any rank has a gradient; (parameters,) each.

        Each rank gathers and adds in the same order, so that all ranks judge the same bits.
        """
        flags = torch.ones_like(squares)
        for number in missing:
            flags[number] = 0
        if self.team.size == 1:
            return squares, flags > 0
        totals, counts = gathered(torch.stack([squares, flags]), self.team).sum(0)
        return totals, counts > 0

    @torch.no_grad()
    def commit(self, ok: Tensor | None) -> None:
        """Step all buckets where `ok` is true (None: everywhere) and send the new weights."""
        self._gathers: list[Callable[[], None]] = []
        self.unsound = torch.zeros((), dtype=torch.int64, device=self._device)
        self._guarded = ok is not None
        if ok is not None and ok.device.type in READ_AT_ONCE:
            if not ok:
                return
            ok = None  # a CPU reads the flag for free, and then needs no selection
        if self.team.size == 1:
            for bucket in self.buckets:
                self._step(bucket, ok)
        for message in self.messages:
            segment = message.open()
            for bucket in message.buckets:
                self._step(bucket, ok)
            self._gathers.append(message.gather(segment))

    @torch.no_grad()
    def finish(self) -> None:
        """Receive the weights that other ranks own, and write them into the parameters."""
        for write in self._gathers:
            write()
        self._gathers = []
        for bucket in self.buckets:
            bucket.sums = bucket.fresh = None

    def _step(self, bucket: Bucket, ok: Tensor | None) -> None:
        taken = ok
        if self._present is not None:
            here = self._present[bucket.numbers]
            taken = here if ok is None else here & ok
        method, fixed, rates = self._method(bucket)
        run: Callable[..., Any] = update
        if self.compiled or (self.compiled is None and self._device.type in COMPILED_ON):
            run = compiled_update()
            rates = {name: as_tensor(rate, bucket.param) for name, rate in rates.items()}
        # The method sees the number of this step. The counter itself rises after the last slice.
        state = dict(bucket.state)
        t = state.pop("step") + 1 if "step" in state else None
        for parts, matrices, columns in bucket.slices(self._limit(bucket)):
            given = fixed | rates | ({} if t is None else {"t": t[matrices]})
            flag = taken[matrices] if taken is not None and taken.ndim else taken
            target = None if bucket.fresh is None else bucket.fresh[matrices, columns]
            if bucket.sums is None:
                sums = [tensor[:, columns] for tensor in bucket.gradients(parts)]
            else:
                sums = [bucket.sums[matrices, columns]]
            weights = [tensor[:, columns] for tensor in bucket.weights(parts)]
            kept = [tensor[matrices, columns] for tensor in state.values()]
            divisor = self.grad_divisor
            for largest in run(method, sums, weights, target, kept, flag, divisor, given):
                self.unsound += (~(largest <= LARGEST_SINGULAR_VALUE)).sum()  # NaN counts too
        if t is not None:
            bucket.state["step"] += 1 if taken is None else taken.view(-1, 1)

    def reset(self) -> None:
        """Restore the optimizer as constructed, in place: zero state, original hyperparameters."""
        for group, constructed in zip(self.param_groups, self._constructed, strict=True):
            group.update(constructed)
        for bucket in self.buckets:
            for tensor in bucket.state.values():
                tensor.zero_()
        self.guard.reset()

    # ---- what the optimizer says of itself

    def fall_back(self) -> None:
        """React to an update that failed although its gradient was finite; here: nothing."""

    def describe(self) -> str:
        """One line: what this rank owns and what a step sends."""
        text = f"{type(self).__name__}: {sum(param.numel() for param in self._names):,} parameters"
        if self.team.size == 1:
            return f"{text} in {len(self.buckets)} buckets"
        owned = sum(math.prod(bucket.shape) for bucket in self.buckets)
        padding = sum(message.padding for message in self.messages)
        sent = f"{len(self.messages)} messages with {padding:,} elements of padding"
        return f"{text}, {owned:,} of them owned by this rank, {sent}"


def decay_of(group: dict[str, Any]) -> dict[str, Any]:
    """{"decay": share of the weights that a step takes away, or None}."""
    if not group["weight_decay"]:
        return {"decay": None}
    return {"decay": group["lr"] * group["weight_decay"] * group["wd_mul"]}


def as_tensor(rate: Any, like: Tensor) -> Any:
    """The rate as a tensor on the device: a new value then needs no new compilation."""
    if rate is None:
        return None
    wide = torch.promote_types(like.dtype, torch.float32)
    if isinstance(rate, Tensor):
        return rate.to(like.device, wide)
    return torch.full((), rate, dtype=wide, device=like.device)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory: getting fresh pages costs more than the arithmetic.

    After it has freed one block of 32 MiB, glibc keeps up to 64 MiB, not a few hundred KiB.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
