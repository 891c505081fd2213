"""From a visible table to optimizers: which parameter goes where, complete and unambiguous."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .base import ShardedOptimizer


@dataclass(frozen=True)
class Row:
    """Parameters whose names match `pattern` form one group of the named optimizer.

    "*" and "?" stand for any text and any character. options are keys of the group: lr_mul, split.
    """

    pattern: str
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)


def build_optimizers(
    named_parameters: Iterable[tuple[str, Tensor]],
    rows: Iterable[Row],
    factories: Mapping[str, Callable[[list[dict[str, Any]]], Optimizer]],
) -> dict[str, Optimizer]:
    """One optimizer for each name in the table, built by its factory from param groups, one a row.

    Sets group["initial_lr"], which a schedule multiplies. An optimizer of torch knows no lr_mul and
    wd_mul: they become part of its lr and weight_decay.
    ValueError where a parameter matches no row or several, or a row matches nothing.
    """
    named, table = list(named_parameters), list(rows)
    problems: list[str] = []
    groups: dict[str, list[dict[str, Any]]] = {}
    members: list[list[tuple[str, Tensor]]] = [[] for _ in table]
    for name, param in named:
        found = [i for i, row in enumerate(table) if fnmatchcase(name, row.pattern)]
        if len(found) == 1:
            members[found[0]].append((name, param))
        else:
            patterns = ", ".join(repr(table[i].pattern) for i in found)
            problems.append(f"parameter {name} matches {len(found)} rows: {patterns or 'none'}")
    for row, own in zip(table, members, strict=True):
        if not any(fnmatchcase(name, row.pattern) for name, _ in named):
            problems.append(f"row {row.pattern!r} matches no parameter")
        if row.optimizer not in factories:
            known = ", ".join(factories)
            problems.append(f"row {row.pattern!r} names {row.optimizer!r}, not one of {known}")
        groups.setdefault(row.optimizer, []).append({"params": own, **row.options})
    if problems:
        raise ValueError("each parameter needs exactly one row; " + "; ".join(problems))
    optimizers = {name: factories[name](found) for name, found in groups.items()}
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            if not isinstance(optimizer, ShardedOptimizer):
                _fold(group)
            group["initial_lr"] = group["lr"]
    return optimizers


def _fold(group: dict[str, Any]) -> None:
    lr_mul, wd_mul = group.pop("lr_mul", 1.0), group.pop("wd_mul", 1.0)
    group["lr"] *= lr_mul
    if group.get("weight_decay") and lr_mul:
        # torch decays by lr * weight_decay, in which lr now has the factor lr_mul.
        group["weight_decay"] *= wd_mul / lr_mul
