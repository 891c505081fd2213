"""State by name for any optimizer: ours, whole at any world size, and torch's own."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class State(NamedTuple):
    """One state tensor of a parameter: its whole shape, and its shape for each stacked matrix."""

    shape: tuple[int, ...]
    each: tuple[int, ...]  # -1: as this side of the matrix
    dtype: torch.dtype


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters, in the order of the groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of all parameters, or their numbers if they have no names."""
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    return names or [str(number) for number in range(len(params_of(optimizer)))]


def require_entries(state_dict: Mapping[str, Any]) -> None:
    """ValueError unless a state_dict has both entries of torch's form."""
    for entry in ("state", "param_groups"):
        if entry not in state_dict:
            fix = "give what optimizer.state_dict() returned"
            raise ValueError(f"the state_dict has no {entry!r}, only {[*state_dict]}; {fix}")


def named_state(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield ("parameter.state", whole tensor) pairs of any optimizer.

    Collective: all ranks must exhaust it. TypeError for state that is not a tensor.
    """
    if hasattr(optimizer, "named_state"):
        yield from optimizer.named_state()
        return
    for name, param in zip(names_of(optimizer), params_of(optimizer), strict=True):
        for kind, value in optimizer.state.get(param, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TypeError(f"{kind} of parameter {name} is {value!r}; keep it in a tensor")
            found = value.full_tensor() if hasattr(value, "full_tensor") else value
            yield f"{name}.{kind}", found.detach().clone()


def load_named_state(optimizer: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load a `named_state`. Collective. ValueError for an unknown parameter."""
    if hasattr(optimizer, "load_named_state"):
        optimizer.load_named_state(tensors)
        return
    numbers = {name: number for number, name in enumerate(names_of(optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition(".")
        if name not in numbers:
            raise ValueError(f"the state has an unknown {key}; build the optimizer as it was")
        param: Any = params_of(optimizer)[numbers[name]]
        if hasattr(param, "device_mesh") and tensor.shape == param.shape:
            tensor = dist.tensor.distribute_tensor(tensor, param.device_mesh, param.placements)
        state.setdefault(numbers[name], {})[kind] = tensor.clone()
    # torch's own loader picks the device and dtype of each tensor.
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def reset(optimizer: Any) -> None:
    """Forget all steps: state as before the first one, and the initial learning rate."""
    getattr(optimizer, "reset", optimizer.state.clear)()
    for group in optimizer.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"]) * 1.0  # a tensor of its own


def copy_state(optimizer: Any, source: str, target: str) -> None:
    """Give the parameter named `target` a copy of the state of the one named `source`. Collective.

    ValueError for an unknown name or unequal shapes.
    """
    params = dict(zip(names_of(optimizer), params_of(optimizer), strict=True))
    if {source, target} - {*params} or params[source].shape != params[target].shape:
        raise ValueError(f"{source} and {target} must be two known parameters of one shape")
    if not hasattr(optimizer, "load_some"):
        optimizer.state[params[target]] = copy.deepcopy(optimizer.state.get(params[source], {}))
        return
    # One tensor at a time: all of them would double the memory.
    pairs = ((key.rpartition("."), tensor) for key, tensor in named_state(optimizer))
    state = {f"{target}.{kind}": tensor for (name, _, kind), tensor in pairs if name == source}
    optimizer.load_some(state)


def gather_state(optimizers: Mapping[str, Any], guard: Any) -> dict[str, Tensor]:
    """The state of all optimizers and their guard, on the host of rank 0. Collective."""
    state = {f"guard.{name}": tensor.cpu() for name, tensor in guard.state_dict().items()}
    several = dist.is_available() and dist.is_initialized()
    for kind, optimizer in optimizers.items():
        for name, tensor in named_state(optimizer):
            if not several or dist.get_rank() == 0:
                state[f"{kind}.{name}"] = tensor.cpu()
    return state


def spread_state(optimizers: Mapping[str, Any], guard: Any, state: Mapping[str, Tensor]) -> None:
    """Load a `gather_state` of any number of ranks. ValueError for an unknown name."""
    parts: dict[str, dict[str, Tensor]] = {kind: {} for kind in (*optimizers, "guard")}
    for name, tensor in state.items():
        kind, _, rest = name.partition(".")
        if kind not in parts:
            raise ValueError(f"the state has an unknown {name}; build the optimizers as they were")
        parts[kind][rest] = tensor
    for kind, optimizer in optimizers.items():
        load_named_state(optimizer, parts[kind])
    guard.load_state_dict(parts["guard"])
