"""Which of two arms is faster, by how much, and why. Differences are B - A."""

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from claims.arms import group_runs, leave_out_repeats, name_of
from claims.runlog import read_all
from claims.runs import LogError, Run
from claims.stats import Difference, paired, welch
from claims.steptimes import Explanation, account, explain

FINGERPRINT = (
    "gpu", "gpu_count", "driver", "bus_ids", "cuda", "torch", "triton", "python", "cpu",
    "host_hash", "threads", "dtype", "compiled",
)  # fmt: skip


@dataclass
class Side:
    """One arm of a comparison."""

    path: str  # of its logs, or its command
    seconds: list[float] = field(default_factory=list)  # of its runs
    logs: list[Run] = field(default_factory=list)  # empty for a command that leaves none
    left_out: list[str] = field(default_factory=list)

    def add(self, run: Run) -> None:
        """LogError for a run that does not count, or has no times."""
        if run.left_out or run.train_time_ms is None:
            problem = run.left_out or "it has no training times"
            raise LogError(f"{name_of(run)}: {problem}; only complete runs with times are compared")
        self.seconds.append(run.train_time_ms / 1000)
        self.logs.append(run)


@dataclass
class Comparison:
    seconds: Difference
    consistent: dict[str, str]  # what both arms say of machine and software
    differs: list[str]
    loss: Difference | None = None
    explanation: Explanation | None = None  # where all runs left logs


def read_side(spec: str) -> Side:
    """The runs that count of the one arm that PATH or PATH@HASH names.

    HASH begins the hash of a source or configuration. Raises LogError for no arm, or several.
    """
    path, mark, prefix = spec.rpartition("@")
    if not mark or Path(spec).exists():
        path, prefix = spec, ""
    runs, errors = read_all([path])
    left_out = [f"{name_of(run)}: {run.left_out}" for run in runs if run.left_out]
    left_out += map(str, errors)
    arms, found = [], []
    for key, members in group_runs([run for run in runs if run.counts]).items():
        if f"{key.source}".startswith(prefix) or f"{key.config_sha256}".startswith(prefix):
            arms.append(members)
            found.append(f"source {key.source!s:.12}, configuration {key.config_sha256!s:.12}")
    if len(arms) != 1:
        rule = f"{spec} means {len(arms)} arms where one is needed; choose by PATH@HASH"
        raise LogError("\n  ".join([rule, *(found or left_out)]))
    kept, repeats = leave_out_repeats(arms[0])
    side = Side(spec, left_out=left_out + repeats)
    for run in kept:
        side.add(run)
    return side


def compare_sides(a: Side, b: Side, level: float, in_turn: bool) -> Comparison:
    """The difference and its parts, with intervals of this level. LogError for a shared log.

    Runs made in turn are compared as pairs: a drift of the machine falls on both arms alike.
    """
    shared = {run.path.resolve() for run in a.logs} & {run.path.resolve() for run in b.logs}
    if shared:
        raise LogError(f"{min(shared)} is in both arms: a run is not compared with itself")
    test = partial(paired if in_turn else welch, level=level)
    found = Comparison(test(b.seconds, a.seconds), *compare_machines(a, b))
    if a.logs and b.logs:
        losses = [[run.final_loss or math.nan for run in side.logs] for side in (a, b)]
        found.loss = test(losses[1], losses[0])
        accounts = [[account(run) for run in side.logs] for side in (a, b)]
        found.explanation = explain(accounts[0], accounts[1], test)
    return found


def compare_machines(a: Side, b: Side) -> tuple[dict[str, str], list[str]]:
    """What all logs say alike of hardware and software, and where they differ.

    Equal entries do not prove that the machine is the same.
    """
    consistent, differs = {}, []
    for key in FINGERPRINT:
        sides = [Counter(str(run.env.get(key)) for run in side.logs) for side in (a, b)]
        values = {*sides[0], *sides[1]}
        if len(values - {"None"}) > 1:
            differs.append(f"{key}: {dict(sides[0])} in A, {dict(sides[1])} in B")
        elif values and "None" not in values:
            consistent[key] = values.pop()
    return consistent, differs
