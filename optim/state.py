"""Optimizer state by name, whole at any world size, for our optimizers and torch's own."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import Bucket, Part, Team


class State(NamedTuple):
    """One state tensor of a parameter: its whole shape, and its shape for each stacked matrix."""

    shape: tuple[int, ...]
    each: tuple[int, ...] | None  # None: as the matrix itself
    dtype: torch.dtype


class StateByName:
    """Gives our optimizers methods that save and load their whole state."""

    team: Team
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    _group_of: dict[Tensor, dict[str, Any]]
    _names: dict[Tensor, str]
    _parts: dict[Tensor, list[Part]]
    _owner: dict[Part, int]
    _place: dict[Part, tuple[Bucket, slice]]

    def _states(self, param: Tensor, group: dict[str, Any]) -> dict[str, State]:
        """{name: State} for one parameter. State starts as zeros."""
        raise NotImplementedError

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
        for part, (bucket, place) in self._place.items():
            for name, stacked in bucket.state.items():
                whole = tensors.get(f"{self._names[part.param]}.{name}")
                if whole is not None:
                    stacked[place].copy_(part.cut(whole).view_as(stacked[place]))

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's form, copied and equal on all ranks.

        Collective. It loads at any world size.
        """
        numbers = {name: number for number, name in enumerate(self._names.values())}
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in self.named_state():
            name, _, kind = key.rpartition(".")
            state.setdefault(numbers[name], {})[kind] = tensor
        groups = torch.optim.Optimizer.state_dict(self)["param_groups"]  # type: ignore[arg-type]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`. Muon also loads torch.optim.Muon's, Adam torch.optim.AdamW's.

        State goes to the parameter of the same name, or position if there are no names.
        Hyperparameters are loaded if the groups hold the same parameters, else kept as they are.
        ValueError, with nothing changed, if it does not fit.
        """
        groups, tensors, members = state_dict["param_groups"], {}, []
        for group in groups:
            names = group.get("param_names") or [str(number) for number in group["params"]]
            members.append(list(names))
            for name, number in zip(names, group["params"], strict=True):
                for kind, tensor in state_dict["state"].get(number, {}).items():
                    kind = "momentum" if kind == "momentum_buffer" else kind  # torch.optim.Muon's
                    tensors[f"{name}.{kind}"] = tensor
        own = [[self._names[param] for param in group["params"]] for group in self.param_groups]
        if members != own and "param_names" not in self.param_groups[0]:
            sizes = [len(each) for each in members]
            raise ValueError(f"the state has groups of {sizes}; name parameters to regroup them")
        self.load_named_state(tensors)
        if members == own:
            # The backend depends on the machine, so it is not loaded.
            known = {*self.defaults, "initial_lr"} - {"backend"}
            for group, saved in zip(self.param_groups, groups, strict=True):
                group.update({key: saved[key] for key in known if key in saved})


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters, in the order of the groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of all parameters, or their numbers if they have no names."""
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    return names or [str(number) for number in range(len(params_of(optimizer)))]


def named_state(optimizer: Any, rank: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield ("parameter.state", whole tensor) pairs of any optimizer, only on `rank` if given.

    Collective: all ranks must exhaust it. TypeError for state that is not a tensor.
    """
    if hasattr(optimizer, "named_state"):
        yield from optimizer.named_state(rank)
        return
    if rank is not None and dist.is_initialized() and dist.get_rank() != rank:
        return
    for name, param in zip(names_of(optimizer), params_of(optimizer), strict=True):
        for kind, value in optimizer.state.get(param, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TypeError(f"{kind} of parameter {name} is {value!r}; keep it in a tensor")
            yield f"{name}.{kind}", value.detach().clone()


def load_named_state(optimizer: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load a `named_state`. ValueError for an unknown parameter."""
    if hasattr(optimizer, "load_named_state"):
        optimizer.load_named_state(tensors)
        return
    numbers = {name: number for number, name in enumerate(names_of(optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition(".")
        if name not in numbers:
            raise ValueError(f"the state has an unknown {key}; build the optimizer as it was")
        state.setdefault(numbers[name], {})[kind] = tensor.clone()
    # torch's own loader picks the device and dtype of each tensor.
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def reset(optimizer: Any) -> None:
    """Restore an optimizer as constructed: no state, and its initial learning rate."""
    if hasattr(optimizer, "reset"):
        optimizer.reset()
        return
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])
