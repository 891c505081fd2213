"""Builds optimizers from a table that sends each parameter to exactly one of them."""

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

    "*" matches any text, "?" any character. options: keys of the group, such as lr_mul and split.
    """

    pattern: str
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)


def build_optimizers(
    named_parameters: Iterable[tuple[str, Tensor]],
    rows: Iterable[Row],
    factories: Mapping[str, Callable[[list[dict[str, Any]]], Optimizer]],
) -> dict[str, Optimizer]:
    """Return {name: optimizer} for the names in the table. A factory gets one group for each row.

    Sets group["initial_lr"], which a schedule multiplies. torch's own optimizers do not know lr_mul
    and wd_mul, so these are multiplied into lr and weight_decay.
    A row may match nothing. ValueError if a parameter matches no row or several.
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
    if problems:
        raise ValueError("each parameter needs exactly one row; " + "; ".join(problems))
    for row, own in zip(table, members, strict=True):
        if own:
            groups.setdefault(row.optimizer, []).append({"params": own, **row.options})
    optimizers = {name: factories[name](found) for name, found in groups.items()}
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            if not isinstance(optimizer, ShardedOptimizer):
                _fold(group)
            group["initial_lr"] = group["lr"]
    return optimizers


def _fold(group: dict[str, Any]) -> None:
    """Multiply lr_mul and wd_mul into lr and weight_decay, for an optimizer of torch."""
    lr_mul, wd_mul = group.pop("lr_mul", 1.0), group.pop("wd_mul", 1.0)
    group["lr"] *= lr_mul
    if group.get("weight_decay") and lr_mul:
        # torch decays by lr * weight_decay, and lr now contains lr_mul.
        group["weight_decay"] *= wd_mul / lr_mul
