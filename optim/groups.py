"""From a visible table to optimizers: which parameter goes where, checked to be complete and unambiguous."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Row:
    """Parameters whose names match `pattern` ("*" and "?" as in a shell) form one group of the named optimizer."""

    pattern: str
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)  # keys of the param group, e.g. lr_mul, split, betas


def build_optimizers(
    named_parameters: Iterable[tuple[str, Tensor]],
    rows: Iterable[Row],
    factories: Mapping[str, Callable[[list[dict[str, Any]]], Optimizer]],
) -> dict[str, Optimizer]:
    """One optimizer for each name in the table, built by its factory from a list of param groups, one group a row.

    Each parameter must match exactly one row and each row at least one parameter; ValueError lists what does not.
    """
    named, table = list(named_parameters), list(rows)
    matches = {name: [row for row in table if fnmatchcase(name, row.pattern)] for name, _ in named}
    problems = [f"parameter {name} matches no row" for name, found in matches.items() if not found]
    problems += [
        f"parameter {name} matches {len(found)} rows: {', '.join(repr(row.pattern) for row in found)}"
        for name, found in matches.items()
        if len(found) > 1
    ]
    problems += [
        f"row {row.pattern!r} names optimizer {row.optimizer!r}, not one of {', '.join(factories)}"
        for row in table
        if row.optimizer not in factories
    ]
    if problems:
        raise ValueError("each parameter needs exactly one row; correct the table: " + "; ".join(problems))
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in table:
        members = [(name, param) for name, param in named if matches[name] == [row]]
        if not members:
            continue
        groups.setdefault(row.optimizer, []).append({"params": members, **row.options})
    built = {name: factories[name](found) for name, found in groups.items()}
    for optimizer in built.values():
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return built
