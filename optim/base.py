"""What Muon, NorMuon and AdamW share: the step, buckets of parts, and whole state by name.

A method is a function on stacks of parts: it returns new weights and updates state in place.
`new_values` runs it and selects new or old values, as the guard's flag says. A step is
`require_ready`, `launch` (send gradients), `measure` (their norms), `commit` (update, send weights)
and `finish` (receive weights). A guard judges between measure and commit.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count, groupby
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo as run_eagerly
from torch.optim.optimizer import _global_optimizer_post_hooks

from .buckets import READ_AT_ONCE, Bucket, Message, Part, all_gather, in_calls, partition, widest
from .notice import Notice
from .options import ANY, require_no_capture, require_ranges, require_same, require_steppable
from .sharded import Exchange, is_sharded, ranks_of, shard_length, shards_of, whole
from .state import State, names_of, params_of, require_entries
from .update import Method, compiled_values, new_values, on_device, sent, update


class ShardedOptimizer(torch.optim.Optimizer):
    """Base of Muon, NorMuon and AdamW.

    A subclass cuts parameters into parts (`_cuts`), describes their state (`_states`) and names its
    method (`_method`). process_group: None for one process. Gradients are summed over the ranks
    and divided once by grad_divisor. Parameters of fully_shard bring their own ranks, and gradients
    that are already reduced: these are only divided. compiled: whether to compile `new_values`;
    None: only on CUDA. others: options of torch's optimizers, see `_means_the_same`. State is kept
    in buckets: read it with `named_state` or `state_dict`. Groups and parameters may change until
    the first step, see `_follow`.
    `failed` (parameters,) counts the matrices that the last step left as they were, see
    `new_values`; the first one of all steps is a warning on rank 0.
    """

    RANGES: ClassVar[dict[str, tuple[float, float]]] = dict.fromkeys(
        ("lr", "lr_mul", "weight_decay", "wd_mul"), (0, math.inf)
    )  # smallest value, first one too large
    RENAMED: ClassVar[dict[str, str]] = {}  # state of other optimizers: their names and ours
    elementwise: ClassVar[bool] = False  # a shard can be stepped in place
    at_once: int  # elements that a CPU steps in one call; more would not fit its caches
    elsewhere: ClassVar[int] = 2**24  # on other devices; a step needs up to 12 times their bytes

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        cautious: bool = False,
        process_group: Any = None,
        grad_divisor: float = 1,
        compiled: bool | None = None,
        **others: Any,
    ):
        name = type(self).__name__
        if unknown := others.keys() - self._means_the_same(defaults).keys():
            raise TypeError(f"{name} has no option {min(unknown)}; help({name}) lists its options")
        self._others = others
        self.cautious, self.grad_divisor, self.compiled = cautious, grad_divisor, compiled
        self._process_group = process_group
        super().__init__(params, {**defaults, "lr_mul": 1.0, "wd_mul": 1.0})
        self._build()

    # ---- for subclasses

    def _cuts(self, param: Tensor, group: dict[str, Any], ranks: int) -> list[tuple[int, ...]]:
        """Shapes of the parts that a parameter is cut into, in the order of its memory."""
        raise NotImplementedError

    def _states(self, param: Tensor, group: dict[str, Any]) -> dict[str, State]:
        """{name: State} for one parameter. State starts as zeros."""
        raise NotImplementedError

    def _method(self, bucket: Bucket) -> Method:
        """The method, its fixed options, and its rates, which may change at every step."""
        raise NotImplementedError

    def _means_the_same(self, group: Mapping[str, Any]) -> dict[str, tuple[Any, ...] | None]:
        """Options of other optimizers, with the values under which these step as this one."""
        ignored = dict.fromkeys(("fused", "foreach", "capturable"), ANY)  # ways to one result
        only_false = dict.fromkeys(("maximize", "amsgrad", "differentiable"), (False,))
        return {**ignored, **only_false, "use_muon": (not self.elementwise,)}

    def _check(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        """Raise ValueError for a parameter or a setting of its group that cannot work."""
        where = f"for parameter {name}"
        require_ranges(group, self.RANGES, where)
        given = {**self._others, **group}
        require_same(given, self._means_the_same(group), type(self).__name__, where)
        if common := {"cautious", "dtype", "grad_divisor", "nesterov", "scale"} & group.keys():
            fix = f"give it to {type(self).__name__} itself, if it has it"
            raise ValueError(f"{min(common)} of parameter {name} is not set by group; {fix}")
        require_steppable(name, param)

    # ---- construction

    def __getstate__(self) -> dict[str, Any]:
        """Refuse pickle and deepcopy: state is in buckets, not in optimizer.state."""
        raise TypeError(f"{type(self).__name__} cannot be copied; copy its state_dict() instead")

    def _build(self) -> None:
        """Cut parameters, give parts to ranks, allocate state. All ranks must do the same.

        ValueError, with nothing changed, for what cannot be stepped.
        """
        members = self._members()
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        if not group_of:
            raise ValueError(f"{type(self).__name__} got groups without parameters; leave it out")
        names: dict[Tensor, str] = {}
        for param, name in zip(params_of(self), names_of(self), strict=True):
            if param in names:
                raise ValueError(f"parameters {names[param]} and {name} are one; list it once")
            self._check(name, param, group_of[param])
            names[param] = name
        if len({*names.values()}) < len(names):
            raise ValueError("two parameters have one name; state is kept by name: rename one")
        self.ranks = ranks_of(names, self._process_group)
        self._group_of, self._names = group_of, names
        self._built, self.stepped = members, False
        first = next(iter(names))
        self._device, self._sharded = first.device, is_sharded(first)
        self.messages: list[Message] = []
        self.buckets: list[Bucket] = []
        self._local: list[Bucket] = []  # whose gradients and weights need no message
        self._parts: dict[Tensor, list[Part]] = {}
        alike: dict[torch.dtype, list[Part]] = {}
        self.state.clear()
        for number, (param, group) in enumerate(group_of.items()):
            # Names alone. torch.distributed.checkpoint would step an optimizer that has no state.
            self.state[param] = dict.fromkeys(self._states(param, group))
            self._parts[param] = self._cut(number, param, group)
            alike.setdefault(param.dtype, []).extend(self._parts[param])
        for parts in alike.values():
            self._share(parts)
        self.failed = torch.zeros(len(names), dtype=torch.float32, device=first.device)
        self._notice = Notice(self.failed)
        self._given: tuple[list[bool], Tensor] = [], self.failed  # which have gradients
        numbers = [part.number for bucket in self.buckets for part in bucket.parts]
        self._numbers = torch.tensor(numbers, device=first.device)  # parameter of each norm

    def _cut(self, number: int, param: Tensor, group: dict[str, Any]) -> list[Part]:
        if param.numel() == 0:  # nothing to step, though it has state
            return []
        parts, start, index, size = [], 0, 0, self.ranks.size
        first = self.ranks.rank * shard_length(param, size) if self._sharded else 0
        for shape in self._cuts(param, group, size):
            parts.append(Part(param, group, number, start, index, shape, first))
            start += math.prod(shape)
            index += shape[0]
        return parts

    def _share(self, parts: list[Part]) -> None:
        """Give parts of one dtype to the ranks, with the messages that carry them."""
        ranks = self.ranks
        if ranks.size == 1:
            self._local += self._own(parts)
        elif self.elementwise and self._sharded:  # each rank owns its shard
            for part in parts:
                part.owner = part.start // shard_length(part.param, ranks.size)
            self._local += self._own([part for part in parts if part.owner == ranks.rank])
        else:
            kind = Exchange if self._sharded else Message
            for shares in partition(parts, ranks.size):
                self.messages.append(kind(shares, ranks, self._own(shares[ranks.rank])))

    def _limit(self, param: Tensor) -> int:  # elements that one call steps at most
        return self.at_once if param.device.type == "cpu" else self.elsewhere

    def _own(self, parts: list[Part]) -> list[Bucket]:
        together: dict[Any, list[Part]] = {}
        for part in parts:
            together.setdefault(part.key, []).append(part)
        buckets = []
        for members in together.values():
            first = members[0]
            states, limit = self._states(first.param, first.group), self._limit(first.param)
            buckets += [Bucket(some, states) for some in in_calls(members, limit)]
        self.buckets += buckets
        return buckets

    # ---- groups and parameters that change

    def _members(self) -> list[tuple[Any, ...]]:
        """What parts are cut by: shapes first, the groups, and how parameters are stored."""
        return [
            (p.shape, own, id(p), p.dtype, p.device, p.is_contiguous())
            for group, own in zip(self.param_groups, map(id, self.param_groups), strict=True)
            for p in group["params"]
        ]

    def _follow(self, *, loading: bool = False) -> bool:
        """Build again if groups or parameters changed before the first step; whether all is built.

        `add_param_group` and `model.to` change them, and accelerate, which exchanges parameters for
        those of fully_shard. loading: all state will be replaced, so steps do not matter.
        ValueError if state belongs to a parameter that is no longer where it was.
        """
        if self._members() == self._built:
            return True
        if loading or not self.stepped:
            self._build()
            return True
        now, shapes = params_of(self), [shape for shape, *_ in self._built]
        if len(now) < len(shapes) or any(
            new.shape != shape or (new is not old and new in self._names)
            for new, old, shape in zip(now, self._names, shapes, strict=False)  # more are late ones
        ):
            what = f"parameters of {type(self).__name__} were removed, moved or reshaped"
            fix = "put them back (without a gradient they are not stepped), or reset() it"
            raise ValueError(f"{what} after a step; {fix}, which forgets all state")
        return False

    # ---- a step

    @run_eagerly  # in a compiled caller, dicts keyed by parameters would go stale without a word
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        ok: Tensor | None = None,
        excess: Tensor | float = 1.0,
    ) -> Any:
        """Update every parameter that has a gradient on any rank. Returns the closure's loss.

        Collective. Gradients are not changed. ok and excess: given by a guard, which makes the
        other calls itself; this method then only commits. The guard calls it instead of commit so
        that hooks run and torch's lr_scheduler counts the step.
        """
        if ok is not None:
            self.commit(ok, excess)
            if self._optimizer_step_post_hooks or _global_optimizer_post_hooks:
                self.finish()  # they must see the new weights
            return None
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self.require_ready()
        self.launch()
        self.measure()
        self.commit(True)
        self.finish()
        return loss

    def require_ready(self) -> None:
        """ValueError if groups changed after a step, or a setting left its range since the last.

        RuntimeError while a CUDA graph is captured.
        """
        require_no_capture(type(self).__name__, self._device)
        if not self._follow():
            what = f"groups or parameters of {type(self).__name__} changed after a step"
            fix = "optimizer.load_state_dict(optimizer.state_dict()) takes its state along"
            raise ValueError(f"{what}; {fix}")
        for group in self.param_groups:
            for param in group["params"][:1]:
                require_ranges(group, self.RANGES, f"for parameter {self._names[param]}")

    def launch(self) -> None:
        """Send all gradients to their owners. Messages are the same if a gradient is missing."""
        # Hooks that send each gradient early would gain nothing: a compiled backward pass is one
        # autograd node, which delivers all gradients at its end.
        self._waits = [message.reduce() for message in self.messages]

    def measure(self) -> Tensor:
        """Norm of each parameter's mean gradient (parameters,), float32, equal on all ranks."""
        for wait in self._waits:
            wait()
        self._waits = []  # what was sent is no longer needed
        squares = torch.zeros(len(self._names), dtype=widest(self._device), device=self._device)
        norms: list[Tensor] = []
        for wide, alike in groupby(self.buckets, lambda bucket: bucket.wide):
            found = [gradient for bucket in alike for gradient in bucket.each_gradient()]
            norms += torch._foreach_norm(found, dtype=wide)
        if norms:  # a rank may own no part
            squares.index_add_(0, self._numbers, torch.stack(norms).to(squares.dtype).square())
        given = [param.grad is not None for param in self._names]
        if given != self._given[0]:
            self._given = given, sent(torch.tensor(given), self._device)
        self._present = self._given[1]  # which parameters have a gradient on any rank
        if self.ranks.size > 1:
            mine = torch.stack([squares, self._present.to(squares.dtype)])
            everyone = mine.new_empty(self.ranks.size, *mine.shape)
            all_gather(everyone.view(-1), mine.view(-1), group=self.ranks.group)
            # Each rank adds in the same order, so that all judge the same bits.
            squares, present = everyone.sum(0)
            self._present = present > 0
        return (squares.sqrt() / self.grad_divisor).float()

    def commit(self, ok: Tensor | bool, excess: Tensor | float = 1.0) -> None:
        """Step all buckets where `ok` is true and send the new weights.

        excess: also divides the gradients, so that their norm does not exceed a guard's `clip`.
        """
        self._gathers: list[Callable[[], Any]] = []
        self._faults: list[tuple[Tensor, Tensor]] = []  # by matrix: its parameter, 1 if it failed
        self.failed = torch.zeros_like(self.failed)
        if self._device.type in READ_AT_ONCE and not ok:
            return
        self.stepped = True
        taken = self._present & ok  # which parameters to step
        divisor = self.grad_divisor * excess
        self._methods = {bucket: self._method(bucket) for bucket in self.buckets}
        if self.compiles:
            self._methods = on_device(self._methods, divisor)
        for bucket in self._local:
            self._step(bucket, taken, divisor)
        for message in self.messages:
            segment = message.segment("fresh")
            for bucket in message.buckets:
                self._step(bucket, taken, divisor)
            self._gathers.append(message.gather(segment))
        if self._faults:
            self.failed.index_add_(0, *map(torch.cat, zip(*self._faults, strict=True)))
        if self.ranks.size > 1 and not self.elementwise:
            work = dist.all_reduce(self.failed, group=self.ranks.group, async_op=True)
            self._gathers.append(work.wait)

    def finish(self) -> None:
        """Receive the weights that other ranks own, and write them into the parameters."""
        for write in self._gathers:
            write()
        self._gathers = []
        for bucket in self.buckets:
            bucket.sums = bucket.fresh = bucket.old = None
        if not self.elementwise:
            self._notice.hear(self.failed, self.ranks, self._describe_failure)

    def _describe_failure(self, failed: Tensor) -> str:
        name = [*self._names.values()][int(failed.argmax())]
        what = f"{type(self).__name__} orthogonalized parameter {name} to values not finite"
        fix = "if that happens often, give it dtype=torch.float32 or backend='plain'"
        return f"{what}, so its weights stay; {fix}. Said once."

    @property
    def compiles(self) -> bool:
        """Whether steps are compiled: as told, else on GPUs. A CPU's would gain little."""
        return self._device.type == "cuda" if self.compiled is None else self.compiled

    def _step(self, bucket: Bucket, taken: Tensor, divisor: Tensor | float) -> None:
        flagged = taken[bucket.numbers]  # of each matrix
        flags: Tensor | None = flagged
        method, fixed, rates = self._methods[bucket]
        values = new_values
        if self.compiles:
            values, divisor = compiled_values(), rates.pop("divisor")
        elif self._device.type in READ_AT_ONCE and flagged.all():
            flags = None  # all matrices: nothing has to be copied
        failed = update(bucket, partial(values, method), fixed | rates, flags, divisor)
        self._faults += [(bucket.numbers, each) for each in failed]

    def describe(self) -> str:
        """One line: how many parameters, and on how many ranks."""
        self._follow()
        total = sum(param.numel() for param in self._names)
        return f"{type(self).__name__}: {total:,} parameters on {self.ranks.size} rank(s)"

    # ---- state

    def reset(self) -> None:
        """Set all state to zero, in place."""
        self.stepped = False
        for bucket in self.buckets:
            for tensor in bucket.state.values():
                tensor.zero_()

    def _shapes(self) -> Iterator[tuple[Tensor, str, State]]:
        """Yield (parameter, name of a state tensor, State), in the order of `named_state`."""
        for param, group in self._group_of.items():
            for kind, state in self._states(param, group).items():
                yield param, kind, state

    @torch.no_grad()
    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ("parameter.state", whole tensor) pairs, ready for safetensors.

        Collective: all ranks must exhaust it.
        """
        self._follow()
        for param, kind, state in self._shapes():
            whole = torch.zeros(state.shape, dtype=state.dtype, device=param.device)
            for part in self._parts[param]:
                cut = part.cut(whole)
                if part.bucket is not None:
                    cut.copy_(part.bucket.state[kind][part.place].view_as(cut))
                if self.ranks.size > 1:
                    bits = cut.view(-1).view(torch.uint8)
                    dist.broadcast(bits, group=self.ranks.group, group_src=part.owner)
            yield f"{self._names[param]}.{kind}", whole

    @torch.no_grad()
    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a `named_state` of any world size and grouping, converted to the dtypes here.

        ValueError, with nothing loaded, if names or shapes differ.
        """
        self._follow(loading=True)
        self.require_state(tensors)
        self.load_some(tensors)

    def require_state(self, tensors: Mapping[str, Tensor]) -> None:
        """ValueError unless names and shapes are those of `named_state`."""
        shapes = {f"{self._names[p]}.{kind}": tuple(s.shape) for p, kind, s in self._shapes()}
        wrong = [f"lacks {name}" for name in shapes if name not in tensors]
        wrong += [f"has an unknown {name}" for name in tensors if name not in shapes]
        for name, shape in shapes.items():
            if name in tensors and tuple(tensors[name].shape) != shape:
                wrong.append(f"has {name} as {tuple(tensors[name].shape)}, not {shape}")
        if wrong:
            raise ValueError(f"the state {'; '.join(wrong[:5])}; build the optimizer as it was")

    def load_some(self, tensors: Mapping[str, Tensor]) -> None:
        """Load those of a `named_state` that are given, unchecked."""
        for param, kind, _ in self._shapes():
            given = tensors.get(f"{self._names[param]}.{kind}")
            if given is None:
                continue
            given = whole(given, self._device)
            self.stepped = self.stepped or bool(given.any())
            for part in self._parts[param]:
                if part.bucket is not None:
                    stacked = part.bucket.state[kind][part.place]
                    stacked.copy_(part.cut(given).view_as(stacked))

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's form, copied and equal on all ranks. Collective.

        State shaped as a sharded parameter is a DTensor, sharded alike.
        """
        self._follow()
        numbers = {param: number for number, param in enumerate(self._names)}
        state: dict[int, dict[str, Tensor]] = {}
        for (param, kind, _), (_, tensor) in zip(self._shapes(), self.named_state(), strict=True):
            if self._sharded and tensor.shape == param.shape:
                tensor = shards_of(tensor, param)
            state.setdefault(numbers[param], {})[kind] = tensor
        following, groups = count(), []
        for group in self.param_groups:  # as torch packs them
            settings = {key: value for key, value in group.items() if key != "params"}
            places = [next(following) for _ in group["params"]]
            groups.append({**copy.deepcopy(settings), "params": places})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of any world size: state and group keys, by position.

        Those of torch's AdamW or Muon load too. A parameter without state starts at zero, as there.
        backend, split and flatten stay as built, and so does what is no group key, such as scale.
        ValueError, with nothing loaded, if it does not fit, or if a saved setting means another
        step.
        """
        self.take(*self.read(state_dict))

    def read(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """What `load_state_dict` gives to `take`: a `named_state`, and groups without foreign keys.

        ValueError as there.
        """
        require_entries(state_dict)
        groups = copy.deepcopy(state_dict["param_groups"])
        sizes, own = ([len(each["params"]) for each in of] for of in (groups, self.param_groups))
        if sizes != own:
            raise ValueError(f"the state has groups of {sizes} parameters, not {own}; group alike")
        for group, now in zip(groups, self.param_groups, strict=True):
            require_ranges({**now, **group}, self.RANGES, "of the state")
            same = self._means_the_same(group)
            require_same(group, same, type(self).__name__, "of the state")
            for key in same.keys() & group.keys():
                del group[key]
        self._follow(loading=True)
        # Keys of parameters are numbers, or DCP's names.
        keys = [key for group in groups for key in group["params"]]
        names = dict(zip(keys, self._names.values(), strict=True))
        tensors: dict[str, Tensor] = {}
        for key, kinds in state_dict["state"].items():
            for kind, value in kinds.items():
                name = f"{names.get(key, key)}.{self.RENAMED.get(kind, kind)}"
                tensors[name] = value if isinstance(value, Tensor) else torch.tensor(value)
        stepped = {names.get(key) for key, kinds in state_dict["state"].items() if kinds}
        for param, kind, state in self._shapes():
            if (name := self._names[param]) not in stepped:
                tensors[f"{name}.{kind}"] = torch.zeros(state.shape, dtype=state.dtype)
        self.require_state(tensors)
        return tensors, groups

    def take(self, tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> None:
        """Load what `read` returned."""
        self.load_some(tensors)
        built = {"params", "param_names", "backend", "split", "flatten"}
        for group, given in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in given.items() if key not in built})
