"""What Muon, NorMuon and Adam share: buckets, the step, and whole state by name.

A method is a pure function on stacks of parts. `update` runs it and writes new or old values, as
the guard's flag says. A step is `launch` (send gradients), `measure` (their norms), `commit`
(update, send weights) and `finish` (receive weights). A guard judges between measure and commit.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo as run_eagerly

from .buckets import READ_AT_ONCE, Bucket, Message, Part, deal, gathered, widest
from .sharded import Exchange, is_sharded, shard_length, shards_of, team_of, whole
from .state import State, names_of, params_of, require_dense, storage_of
from .update import compiled_update, update


class ShardedOptimizer(torch.optim.Optimizer):
    """Base of Muon, NorMuon and Adam.

    A subclass cuts parameters into parts (`_cuts`), describes their state (`_states`) and names its
    method (`_method`). process_group: None for one process. Gradients are summed over the ranks
    and divided once by grad_divisor. Parameters of fully_shard bring their own ranks, and gradients
    that are already reduced: these are only divided. compiled: whether to compile `update`; None:
    only on CUDA.
    State lives in buckets: read it with `named_state` or `state_dict`.
    """

    RANGES: ClassVar[dict[str, tuple[float, float]]] = {  # smallest value, first one too large
        "lr": (0, math.inf),
        "lr_mul": (0, math.inf),
        "weight_decay": (0, math.inf),
        "wd_mul": (0, math.inf),
    }
    elementwise: ClassVar[bool] = False  # a shard can be stepped where it lies
    at_once: int  # elements that a CPU steps in one call; more would not fit its caches

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        cautious: bool = False,
        process_group: Any = None,
        grad_divisor: float = 1,
        compiled: bool | None = None,
    ):
        if not 0 < grad_divisor < math.inf:
            raise ValueError(f"grad_divisor must be positive, got {grad_divisor!r}; 1 is a sum")
        self.cautious, self.grad_divisor, self.compiled = cautious, grad_divisor, compiled
        self._process_group = process_group
        self._settings = [*vars(self), "_settings"]  # also those of a subclass
        super().__init__(params, {**defaults, "lr_mul": 1.0, "wd_mul": 1.0})
        keep_freed_memory()
        self._build()

    # ---- what a subclass says

    def _cuts(self, param: Tensor, group: dict[str, Any], ranks: int) -> list[tuple[int, ...]]:
        """Shapes of the parts that a parameter is cut into, in the order of its memory."""
        raise NotImplementedError

    def _states(self, param: Tensor, group: dict[str, Any]) -> dict[str, State]:
        """{name: State} for one parameter. State starts as zeros."""
        raise NotImplementedError

    def _method(self, bucket: Bucket) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
        """The method, its fixed options, and its rates, which may change at every step."""
        raise NotImplementedError

    def _check(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        """Raise ValueError for a parameter or a setting of its group that cannot work."""
        for setting, (least, bound) in self.RANGES.items():
            given = group[setting]
            values = given if isinstance(given, (tuple, list)) else [given]
            if not all(least <= value < bound for value in values):
                rule = f"{setting} must be in [{least}, {bound})"
                raise ValueError(f"{rule}, got {given!r} for parameter {name}")
        if not param.is_floating_point():
            raise ValueError(f"parameter {name} is {param.dtype}; only real numbers are stepped")
        if getattr(param, "_fsdp_flattened", False):
            fix = "use torch.distributed.fsdp.fully_shard, which keeps its shape"
            raise ValueError(f"parameter {name} was flattened by FullyShardedDataParallel; {fix}")
        if not param.is_contiguous():
            fix = "undo channels_last, or build it from .contiguous()"
            raise ValueError(f"parameter {name} is not contiguous; {fix}")

    def _require_as_built(self) -> None:
        """ValueError if model.double(), .cuda() or .to(memory_format=...) came after this."""
        for (param, name), built in zip(self._names.items(), self._built, strict=True):
            if storage_of(param) != built:
                now = f"parameter {name} is {storage_of(param)} now and was {built}"
                fix = "convert a model first, then build its optimizer"
                raise ValueError(f"{now} when {type(self).__name__} was built; {fix}")

    # ---- construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters and keep the state of the others. Collective."""
        super().add_param_group(param_group)
        if not hasattr(self, "buckets"):  # torch calls this in the constructor too
            return
        try:
            self._build()
        except ValueError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and deepcopy take: settings, groups and whole state."""
        if self.team.group is not None:
            raise TypeError("a process group cannot be copied; copy state_dict() instead")
        settings = {name: vars(self)[name] for name in self._settings}
        return {**super().__getstate__(), **settings, "_kept": dict(self.named_state())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Build a copy that has the state of the original."""
        super().__setstate__(state)
        self._build()
        self._load(vars(self).pop("_kept"))

    def _build(self) -> None:
        """Cut parameters, deal parts, allocate state, and keep what state there was. Collective.

        ValueError, with nothing changed, for what cannot be stepped.
        """
        kept = dict(self.named_state()) if hasattr(self, "buckets") else {}
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        names: dict[Tensor, str] = {}
        for param, name in zip(params_of(self), names_of(self), strict=True):
            if param in names:
                raise ValueError(f"parameters {names[param]} and {name} are one; list it once")
            self._check(name, param, group_of[param])
            names[param] = name
        self.team = team_of(names, self._process_group)
        self._group_of, self._names = group_of, names
        self._device, self._built = next(iter(names)).device, [*map(storage_of, names)]
        self._sharded = is_sharded(next(iter(self._names)))
        # Names alone. torch.distributed.checkpoint would step an optimizer that has no state.
        for param, group in self._group_of.items():
            self.state[param] = dict.fromkeys(self._states(param, group))
        self._parts: dict[Tensor, list[Part]] = {}
        self._owner: dict[Part, int] = {}
        self._place: dict[Part, tuple[Bucket, slice]] = {}  # of the parts owned here
        self.messages: list[Message] = []
        self.buckets: list[Bucket] = []
        self._local: list[Bucket] = []  # whose gradients and weights need no message
        alike: dict[torch.dtype, list[Part]] = {}
        for number, param in enumerate(self._names):
            self._parts[param] = self._cut(number, param)
            alike.setdefault(param.dtype, []).extend(self._parts[param])
        for parts in alike.values():
            if self.team.size == 1:
                self._local += self._own(parts)
            elif self.elementwise and self._sharded:
                self._keep(parts)
            else:
                self._share(parts)
        numbers = [part.number for bucket in self.buckets for part in bucket.parts]
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self._load(kept)

    def _cut(self, number: int, param: Tensor) -> list[Part]:
        if param.numel() == 0:  # nothing to step, though it has state
            return []
        group, parts, start, index = self._group_of[param], [], 0, 0
        first = self.team.rank * shard_length(param, self.team.size) if self._sharded else 0
        for shape in self._cuts(param, group, self.team.size):
            # The rate depends on the stored shape, so a bucket holds parameters of one shape.
            key = (shape, tuple(param.shape), id(group))
            parts.append(Part(param, number, start, index, shape, key, first))
            start += math.prod(shape)
            index += shape[0]
        return parts

    def _keep(self, parts: list[Part]) -> None:
        """Let each rank own the shards that it holds; a part is a shard."""
        for part in parts:
            self._owner[part] = part.start // shard_length(part.param, self.team.size)
        self._local += self._own([part for part in parts if self._owner[part] == self.team.rank])

    def _share(self, parts: list[Part]) -> None:
        """Deal parts of one dtype to the ranks and build the messages that carry them."""
        keys = list(dict.fromkeys(part.key for part in parts))
        for shares in deal(parts, self.team.size):
            for rank, share in enumerate(shares):
                # Parts of one bucket stand together: a bucket is one stretch of the message.
                share.sort(key=lambda part: (keys.index(part.key), part.number, part.start))
                self._owner.update(dict.fromkeys(share, rank))
            kind = Exchange if self._sharded else Message
            self.messages.append(kind(shares, self.team))
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
                sides = zip(kind.each or rest, rest, strict=True)
                shape = (each * len(members), *(side if own < 0 else own for own, side in sides))
                state[name] = torch.zeros(shape, dtype=kind.dtype, device=param.device)
            buckets.append(Bucket(members, self._group_of[param], state))
            for index, part in enumerate(members):
                self._place[part] = buckets[-1], slice(index * each, (index + 1) * each)
        self.buckets += buckets
        return buckets

    # ---- a step

    @run_eagerly  # in a compiled caller, dicts keyed by parameters would go stale without a word
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, ok: Tensor | bool | None = None
    ) -> Any:
        """Update every parameter that has a gradient on any rank. Returns the closure's loss.

        Collective. Gradients are not changed. ok: given by a guard, which calls launch, measure and
        finish itself; this method then only commits, where `ok` is true. The guard calls it instead
        of commit so that hooks run and torch's lr_scheduler counts the step.
        """
        if ok is not None:
            self.commit(ok)
            return None
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self.launch()
        self.measure()
        self.commit(True)
        self.finish()
        return loss

    def launch(self) -> None:
        """Send all gradients to their owners. Messages are the same if a gradient is missing."""
        require_dense(self)
        self._require_as_built()
        # Hooks that send each gradient early would gain nothing: a compiled backward pass is one
        # autograd node, which delivers all gradients at its end.
        self._waits = [message.reduce() for message in self.messages]

    def measure(self) -> Tensor:
        """Norm of each parameter's mean gradient (parameters,), float32, equal on all ranks."""
        for wait in self._waits:
            wait()
        self._waits = []  # what was sent is no longer needed
        dtype = widest(self._device)
        norms = [norm.to(dtype) for bucket in self.buckets for norm in bucket.norms()]
        squares = torch.zeros(len(self._names), dtype=dtype, device=self._device)
        if norms:
            squares.index_add_(0, self._numbers, torch.stack(norms).square())
        # Which parameters have a gradient on any rank; None: all.
        self._present: Tensor | None = None
        missing = [number for number, param in enumerate(self._names) if param.grad is None]
        if missing or self.team.size > 1:
            flags = torch.ones_like(squares)
            for number in missing:
                flags[number] = 0
            if self.team.size > 1:
                # Each rank gathers and adds in the same order, so that all judge the same bits.
                squares, flags = gathered(torch.stack([squares, flags]), self.team).sum(0)
            self._present = flags > 0
            # Read on the host only where that is free.
            if self._device.type in READ_AT_ONCE and self._present.all():
                self._present = None
        return (squares.sqrt() / self.grad_divisor).float()

    def commit(self, ok: Tensor | bool) -> None:
        """Step all buckets where `ok` is true and send the new weights."""
        self._gathers: list[Callable[[], None]] = []
        flag = ok if isinstance(ok, Tensor) else None
        if flag is not None and flag.device.type in READ_AT_ONCE:
            if not flag:
                return
            flag = None  # a CPU reads the flag for free, and then needs no selection
        for bucket in self._local:
            self._step(bucket, flag)
        for message in self.messages:
            segment = message.open()
            for bucket in message.buckets:
                self._step(bucket, flag)
            self._gathers.append(message.gather(segment))

    def finish(self) -> None:
        """Receive the weights that other ranks own, and write them into the parameters."""
        for write in self._gathers:
            write()
        self._gathers = []
        for bucket in self.buckets:
            bucket.sums = bucket.fresh = bucket.old = None

    def _step(self, bucket: Bucket, ok: Tensor | None) -> None:
        taken = ok
        if self._present is not None:
            here = self._present[bucket.numbers]
            taken = here if ok is None else here & ok
        method, fixed, rates = self._method(bucket)
        run: Callable[..., Any] = update
        divisor: Any = self.grad_divisor
        # Not on a CPU: compiling takes half a minute there, and a step is bound by matrix products
        # that compile to the same calls.
        if self.compiled or (self.compiled is None and self._device.type == "cuda"):
            run = compiled_update()
            rates = {name: as_tensor(rate, bucket.param) for name, rate in rates.items()}
            divisor = as_tensor(divisor, bucket.param)  # it may change with the batch
        # The method sees the number of this step. The counter itself rises after the last slice.
        state = dict(bucket.state)
        t = state.pop("step") + 1 if "step" in state else None
        for parts, matrices, columns in bucket.slices(self.at_once):
            given = fixed | rates | ({} if t is None else {"t": t[matrices]})
            flag = taken[matrices] if taken is not None and taken.ndim else taken
            target = None if bucket.fresh is None else bucket.fresh[matrices, columns]
            if bucket.sums is None:
                sums = [tensor[:, columns] for tensor in bucket.gradients(parts)]
            else:
                sums = [bucket.sums[matrices, columns]]
            weights = bucket.weights(parts) if bucket.old is None else [bucket.old[matrices]]
            weights = [tensor[:, columns] for tensor in weights]
            kept = [tensor[matrices, columns] for tensor in state.values()]
            run(method, sums, weights, target, kept, flag, divisor, given)
        if t is not None:
            bucket.state["step"] += 1 if taken is None else taken.view(-1, 1)

    def describe(self) -> str:
        """One line: how many parameters, and on how many ranks."""
        count = sum(param.numel() for param in self._names)
        text = f"{type(self).__name__}: {count:,} parameters on {self.team.size} rank(s)"
        if self._sharded:
            sent = sum(m.bytes_sent() for m in self.messages if isinstance(m, Exchange))
            text += f", in shards, {sent / 2**20:,.1f} MiB leave this rank a step"
        return text

    # ---- state

    def reset(self) -> None:
        """Set all state to zero, in place."""
        for bucket in self.buckets:
            for tensor in bucket.state.values():
                tensor.zero_()

    @torch.no_grad()
    def named_state(self, rank: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield ("parameter.state", whole tensor) pairs, only on `rank` if one is given.

        All values are tensors, ready for safetensors. Collective: all ranks must exhaust it.
        """
        for param, group in self._group_of.items():
            for name, kind in self._states(param, group).items():
                whole = torch.zeros(kind.shape, dtype=kind.dtype, device=param.device)
                for part in self._parts[param]:
                    cut = part.cut(whole)
                    if part in self._place:
                        bucket, place = self._place[part]
                        cut.copy_(bucket.state[name][place].view_as(cut))
                    if part in self._owner:
                        bits, owner = cut.view(-1).view(torch.uint8), self._owner[part]
                        dist.broadcast(bits, group=self.team.group, group_src=owner)
                if rank in (None, self.team.rank):
                    yield f"{self._names[param]}.{name}", whole

    @torch.no_grad()
    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a `named_state` of any world size and grouping, converted to the dtypes here.

        ValueError, with nothing changed, if names or shapes differ.
        """
        shapes = {}
        for param, group in self._group_of.items():
            for name, kind in self._states(param, group).items():
                shapes[f"{self._names[param]}.{name}"] = tuple(kind.shape)
        wrong = [f"lacks {name}" for name in shapes if name not in tensors]
        wrong += [f"has an unknown {name}" for name in tensors if name not in shapes]
        for name, shape in shapes.items():
            if name in tensors and tuple(tensors[name].shape) != shape:
                wrong.append(f"has {name} as {tuple(tensors[name].shape)}, not {shape}")
        if wrong:
            raise ValueError(f"the state {'; '.join(wrong[:5])}; build the optimizer as it was")
        self._load(tensors)

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        for param, group in self._group_of.items():
            for name in self._states(param, group):
                given = tensors.get(f"{self._names[param]}.{name}")
                if given is None:
                    continue
                given = whole(given, self._device)
                for part in self._parts[param]:
                    if part in self._place:
                        bucket, place = self._place[part]
                        stacked = bucket.state[name][place]
                        stacked.copy_(part.cut(given).view_as(stacked))

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's form, copied and equal on all ranks. Collective.

        State shaped as a sharded parameter is a DTensor, sharded alike.
        """
        numbered = {self._names[pair[1]]: pair for pair in enumerate(self._names)}
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in self.named_state():
            name, _, kind = key.rpartition(".")
            number, param = numbered[name]
            if self._sharded and tensor.shape == param.shape:
                tensor = shards_of(tensor, param, self.team)
            state.setdefault(number, {})[kind] = tensor
        return {"state": state, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of any world size: state and hyperparameters, by position.

        Muon also loads that of torch.optim.Muon, Adam that of torch.optim.AdamW. ValueError, with
        nothing changed, if it does not fit.
        """
        groups, names = copy.deepcopy(state_dict["param_groups"]), list(self._names.values())
        sizes = [len(group["params"]) for group in groups]
        own = [len(group["params"]) for group in self.param_groups]
        if sizes != own:
            raise ValueError(f"the state has groups of {sizes} parameters, not {own}; group alike")
        for group, saved in zip(self.param_groups, groups, strict=True):
            for key in {"split", "flatten", "transposed"} & group.keys() & saved.keys():
                if saved[key] != group[key]:
                    what = f"the state has {key} {saved[key]}, not {group[key]}"
                    raise ValueError(f"{what}; build the optimizer as it was")
        keys = [key for group in groups for key in group["params"]]  # numbers, or DCP's names
        named = dict(zip(keys, names, strict=True))
        tensors = {}
        for key, state in state_dict["state"].items():
            for kind, tensor in state.items():
                kind = "momentum" if kind == "momentum_buffer" else kind  # torch.optim.Muon's
                tensors[f"{named[key]}.{kind}"] = tensor
        begun = {key.rpartition(".")[0] for key in tensors}
        for param, group in self._group_of.items():
            if self._names[param] not in begun:  # torch's state begins with the first step
                for kind, made in self._states(param, group).items():
                    tensors[f"{self._names[param]}.{kind}"] = torch.zeros(made.shape)
        self.load_named_state(tensors)
        # The backend depends on the machine, so it is not loaded.
        known = {*self.defaults, "initial_lr"} - {"backend"}
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: saved[key] for key in known if key in saved})


def decay_of(group: dict[str, Any]) -> dict[str, Any]:
    """{"decay": share of the weights that a step takes away, or None}."""
    if not group["weight_decay"]:
        return {"decay": None}
    return {"decay": group["lr"] * group["weight_decay"] * group["wd_mul"]}


def as_tensor(rate: float | None, like: Tensor) -> Tensor | None:
    """The rate as a tensor on the device: a new value then needs no new compilation."""
    if rate is None:
        return None
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.full((), rate, dtype=wide, device=like.device)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory: getting fresh pages costs more than the arithmetic.

    After it has freed one block of 32 MiB, glibc keeps up to 64 MiB, not a few hundred KiB.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
