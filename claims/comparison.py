"""Which of two arms is faster, by how much, and why. Differences are B - A."""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from claims.arms import group_runs, leave_out_repeats, name_of
from claims.runlog import read_all
from claims.runs import LogError, Run
from claims.stats import Difference, paired, welch
from claims.steptimes import Account, account

FINGERPRINT = ("gpu", "gpu_count", "driver", "cuda", "torch", "python", "cpu", "host_hash",
               "threads", "dtype", "compiled")  # fmt: skip


@dataclass
class Side:
    """One arm of a comparison."""

    path: str  # of its logs, or its command
    runs: list[Run] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)  # of the runs
    left_out: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [(run.train_time_ms or 0.0) / 1000 for run in self.runs]

    def add(self, run: Run) -> None:
        """LogError for a run that does not count, or has no times."""
        if run.left_out or run.train_time_ms is None:
            problem = run.left_out or "it has no training times"
            raise LogError(f"{name_of(run)}: {problem}; only complete runs with times are compared")
        self.runs.append(run)
        self.accounts.append(account(run))


class Comparison(NamedTuple):
    """`steps`, `step_time` and `stutters` are the parts of `seconds`."""

    seconds: Difference
    steps: float  # seconds by more or fewer steps, at the mean step time of both arms
    step_time: Difference  # seconds by a slower or faster step, at the mean number of steps
    stutters: Difference  # seconds
    stutters_at: list[list[int]]  # the steps, in A and in B
    loss: Difference
    differs: list[str]  # of machine and software, in words


def read_side(spec: str) -> Side:
    """The runs that count of the one arm that PATH or PATH@HASH names.

    HASH begins the hash of a source or configuration. Raises LogError for no arm, or several.
    """
    path, prefix = spec, ""
    if not Path(spec).exists() and "@" in spec:
        path, _, prefix = spec.rpartition("@")
    runs, errors = read_all([path])
    side = Side(spec, left_out=list(map(str, errors)))
    side.left_out += [f"{name_of(run)}: {run.left_out}" for run in runs if run.left_out]
    arms, found = [], []
    for key, members in group_runs([run for run in runs if run.counts]).items():
        hashes = str(key.source), str(key.config_sha256)
        if any(text.startswith(prefix) for text in hashes):
            arms.append(members)
            found.append(f"source {hashes[0]:.12}, configuration {hashes[1]:.12}")
    if len(arms) != 1:
        rule = f"{spec} means {len(arms)} arms where one is needed; choose by PATH@HASH"
        raise LogError("\n  ".join([rule, *found, *side.left_out]))
    kept, repeats = leave_out_repeats(arms[0])
    side.left_out += repeats
    for run in kept:
        side.add(run)
    return side


def compare_sides(a: Side, b: Side, in_turn: bool) -> Comparison:
    """The difference and its parts. LogError for a shared log.

    Runs made in turn are compared as pairs: a drift of the machine falls on both arms alike.
    """
    shared = {run.path.resolve() for run in a.runs} & {run.path.resolve() for run in b.runs}
    if shared:
        raise LogError(f"{min(shared)} is in both arms: a run is not compared with itself")
    test = paired if in_turn else welch
    steps_a, steps_b = a.accounts[0].steps, b.accounts[0].steps  # of all runs of an arm
    step_a = [one.step_ms / 1000 for one in a.accounts]
    step_b = [one.step_ms / 1000 for one in b.accounts]
    steps = (steps_a + steps_b) / 2
    return Comparison(
        seconds=test(b.seconds, a.seconds),
        steps=(steps_b - steps_a) * (fmean(step_a) + fmean(step_b)) / 2,
        step_time=test([steps * each for each in step_b], [steps * each for each in step_a]),
        stutters=test([one.lost for one in b.accounts], [one.lost for one in a.accounts]),
        stutters_at=[stuttering(a), stuttering(b)],
        loss=test(final_losses(b), final_losses(a)),
        differs=differences(a.runs, b.runs),
    )


def stuttering(side: Side) -> list[int]:
    return sorted({step for one in side.accounts for step in one.stutters})


def final_losses(side: Side) -> list[float]:
    return [run.final_loss or math.nan for run in side.runs]


def differences(a: list[Run], b: list[Run]) -> list[str]:
    """Where the logs differ in hardware or software. None does not prove one machine."""
    differs = []
    for key in FINGERPRINT:
        in_a = Counter(str(run.env.get(key)) for run in a)
        in_b = Counter(str(run.env.get(key)) for run in b)
        if len({*in_a, *in_b} - {"None"}) > 1:
            differs.append(f"{key}: {dict(in_a)} in A, {dict(in_b)} in B")
    return differs
