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


@dataclass(frozen=True)
class Timed:
    """One run; a command that leaves no log has only its wall time."""

    seconds: float
    started: str | None  # ISO 8601
    log: Run | None = None


@dataclass
class Side:
    """One arm of a comparison."""

    name: str  # A or B
    path: str  # of its logs, or its command
    runs: list[Timed]
    left_out: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [run.seconds for run in self.runs]

    @property
    def logs(self) -> list[Run]:
        return [run.log for run in self.runs if run.log]


@dataclass
class Comparison:
    seconds: Difference
    paired: bool  # runs made in turn are compared as pairs
    consistent: dict[str, str]  # what both arms say of machine and software
    differs: list[str]
    loss: Difference | None = None
    explanation: Explanation | None = None  # where all runs left logs


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
    arms, found = [], []
    for key, members in group_runs([run for run in runs if run.counts]).items():
        hashes = str(key.source), str(key.config_sha256)
        if any(each.startswith(prefix) for each in hashes):
            arms.append(members)
            found.append(f"source {hashes[0]:.12}, configuration {hashes[1]:.12}, {key[2:]}")
    if len(arms) != 1:
        rule = f"{spec} means {len(arms)} arms where one is needed; choose by PATH@HASH"
        raise LogError("\n  ".join([rule, *(found or left_out)]))
    kept, repeats = leave_out_repeats(arms[0])
    return Side(name, spec, [time_run(run, run.started) for run in kept], left_out + repeats)


def time_run(run: Run, started: str | None) -> Timed:
    """Raises LogError for a run that does not count, or has no times."""
    if run.left_out or run.train_time_ms is None or not run.total_steps:
        problem = run.left_out or "it has no training times"
        raise LogError(f"{name_of(run)}: {problem}; only complete runs with times are compared")
    return Timed(run.train_time_ms / 1000, started, run)


def compare_sides(a: Side, b: Side, level: float) -> Comparison:
    """The difference and its parts, with intervals of this level. LogError for a shared log."""
    shared = {run.path.resolve() for run in a.logs} & {run.path.resolve() for run in b.logs}
    if shared:
        raise LogError(f"{min(shared)} is in both arms: a run is not compared with itself")
    pairs = find_pairs(a, b)
    if pairs:
        a.runs, b.runs = [first for first, _ in pairs], [second for _, second in pairs]
    test = partial(paired if pairs else welch, level=level)
    seconds = test(b.seconds, a.seconds)
    found = Comparison(seconds, bool(pairs), *compare_machines(a, b))
    if a.logs and b.logs:
        losses = [[run.final_loss or math.nan for run in side.logs] for side in (a, b)]
        found.loss = test(losses[1], losses[0])
        accounts = [account(run) for run in a.logs], [account(run) for run in b.logs]
        found.explanation = explain(*accounts, test)
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


def find_pairs(a: Side, b: Side) -> list[tuple[Timed, Timed]]:
    """The runs of A and B made in turn, A B or B A; none where two of one arm stand together.

    A drift of the machine then falls on both arms alike.
    """
    order = [(str(run.started), side.name, run) for side in (a, b) for run in side.runs]
    distinct = len({started for started, _, _ in order} - {"None"}) == len(order)
    if not distinct or len(a.runs) != len(b.runs) or len(order) < 4:
        return []
    order.sort(key=lambda item: item[0])
    pairs = []
    for first, second in zip(order[::2], order[1::2], strict=True):
        if first[1] == second[1]:
            return []
        pairs.append((first[2], second[2]) if first[1] == a.name else (second[2], first[2]))
    return pairs
