"""Which of two arms is faster, by how much, and why. Differences are B - A."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from claims.arms import group_runs, leave_out_repeats, name_of
from claims.runlog import read_all
from claims.runs import LogError, Run
from claims.stats import Difference, paired, welch
from claims.steptimes import Account, Explanation, account, explain

FINGERPRINT = (
    "gpu", "gpu_count", "driver", "bus_ids", "cuda", "torch", "triton", "python", "cpu",
    "host_hash", "threads", "dtype", "compiled",
)  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """One run. Typed times have no log; commands that leave none have only their wall time."""

    seconds: float
    started: str | None = None  # ISO 8601
    log: Run | None = None


@dataclass
class Side:
    """One arm of a comparison."""

    name: str
    path: str
    runs: list[Timed]
    left_out: list[str] = field(default_factory=list)
    measure: str = "training time"

    @property
    def seconds(self) -> list[float]:
        return [run.seconds for run in self.runs]

    @property
    def logs(self) -> list[Run]:
        return [run.log for run in self.runs if run.log]


@dataclass
class Comparison:
    a: Side
    b: Side
    level: float  # of the intervals
    paired: bool  # runs made in turn are compared as pairs
    seconds: Difference
    loss: Difference | None
    consistent: dict[str, str]  # what both arms say of machine and software
    differs: list[str]
    accounts: tuple[list[Account], list[Account]] | None
    explanation: Explanation | None


def read_side(name: str, spec: str) -> Side:
    """The runs that count of the one arm that PATH or PATH@HASH names.

    HASH begins the hash of a source or configuration. Raises LogError for no arm, or several.
    """
    path, mark, prefix = spec.rpartition("@")
    if not mark or Path(spec).exists():
        path, prefix = spec, ""
    runs, errors = read_all([path])
    left_out = [f"{name_of(run)}: {run.left_out}" for run in runs if run.left_out]
    left_out += map(str, errors)
    arms = group_runs([run for run in runs if run.counts])
    chosen = []
    for key in arms:
        if f"{key.source}".startswith(prefix) or f"{key.config_sha256}".startswith(prefix):
            chosen.append(key)
    if len(chosen) != 1:
        found = [
            f"source {str(key.source)[:12]}, configuration {str(key.config_sha256)[:12]}, "
            f"{key.total_steps} steps, {key.gpu_count} GPUs: n = {len(members)}"
            for key, members in arms.items()
        ]
        rule = f"{spec} means {len(chosen)} arms where one is needed; choose by PATH@HASH"
        raise LogError("\n  ".join([rule, *(found or left_out)]))
    kept, repeats = leave_out_repeats(arms[chosen[0]])
    return Side(name, spec, [time_run(run) for run in kept], left_out + repeats)


def time_run(run: Run, started: str | None = None) -> Timed:
    """Raises LogError for a run that does not count, or has no times."""
    if run.left_out or run.train_time_ms is None or not run.total_steps:
        problem = run.left_out or "it has no training times"
        raise LogError(f"{name_of(run)}: {problem}; only complete runs with times are compared")
    return Timed(run.train_time_ms / 1000, started or run.started, run)


def compare_sides(a: Side, b: Side, level: float) -> Comparison:
    """LogError where a log is in both."""
    shared = {run.path.resolve() for run in a.logs} & {run.path.resolve() for run in b.logs}
    if shared:
        raise LogError(f"{min(shared)} is in both arms: a run is not compared with itself")
    pairs = find_pairs(a, b)
    if pairs:
        a.runs, b.runs = [first for first, _ in pairs], [second for _, second in pairs]
    test = partial(paired if pairs else welch, level=level)
    consistent, differs = compare_machines(a, b)
    loss, accounts, explanation = None, None, None
    if a.logs and b.logs:
        losses = [[run.final_loss or math.nan for run in side.logs] for side in (a, b)]
        loss = test(losses[1], losses[0])
        accounts = [account(run) for run in a.logs], [account(run) for run in b.logs]
        explanation = explain(*accounts, test)
    seconds = test(b.seconds, a.seconds)
    return Comparison(
        a, b, level, bool(pairs), seconds, loss, consistent, differs, accounts, explanation
    )


def compare_machines(a: Side, b: Side) -> tuple[dict[str, str], list[str]]:
    """What all logs say alike of hardware and software, and where they differ.

    Equal entries do not prove that the machine is the same.
    """
    consistent, differs = {}, []
    for key in FINGERPRINT:
        sides = [Counter(str(run.env.get(key)) for run in side.logs) for side in (a, b)]
        values = {*sides[0], *sides[1]}
        if len(values - {"None"}) > 1:
            said = [" and ".join(f"{value} ({n} x)" for value, n in side.items()) for side in sides]
            differs.append(f"{key}: {said[0]} in A, {said[1]} in B")
        elif values and "None" not in values:
            consistent[key] = values.pop()
    return consistent, differs


def find_pairs(a: Side, b: Side) -> list[tuple[Timed, Timed]]:
    """The runs of A and B made in turn, A B or B A; none where two of one arm stand together.

    A drift of the machine then falls on both arms alike.
    """
    order = [(run.started, side, run) for side, arm in enumerate((a, b)) for run in arm.runs]
    starts = {started for started, _, _ in order}
    if None in starts or len(starts) < len(order) or len(a.runs) != len(b.runs) or len(order) < 4:
        return []
    order.sort(key=lambda item: str(item[0]))
    pairs = []
    for first, second in zip(order[::2], order[1::2], strict=True):
        if first[1] == second[1]:
            return []
        pairs.append((first[2], second[2]) if first[1] == 0 else (second[2], first[2]))
    return pairs


def as_json(found: Comparison) -> dict[str, Any]:
    """What --json prints."""
    sides = {}
    for name, side in (("a", found.a), ("b", found.b)):
        sides[name] = {
            "path": side.path, "measure": side.measure, "n": len(side.runs), "times": side.seconds,
            "mean": float(np.mean(side.seconds)), "left_out": side.left_out,
            "logs": [str(run.path) for run in side.logs],
        }  # fmt: skip
    why = found.explanation
    return sides | {
        "level": found.level,
        "method": "paired" if found.paired else "Welch",
        "seconds": found.seconds._asdict(),
        "loss": found.loss._asdict() if found.loss else None,
        "machine": {"consistent": found.consistent, "differs": found.differs},
        "explanation": why and {
            "steps": why.steps, "step_time": why.step_time._asdict(),
            "stutters": why.stutters._asdict(),
        },
        "stutters": [[one.stutters for one in side] for side in found.accounts or ()],
    }  # fmt: skip
