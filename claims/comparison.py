"""Which of two arms is faster, by how much, and why. Differences are B - A."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.ndimage import percentile_filter

from claims.arms import group_runs, leave_out_repeats, list_arms, name_of, read_selected
from claims.runs import Run, Step, Validation
from claims.stats import Difference, equivalence, paired, saving, welch
from runtime.errors import LogError

FINGERPRINT = ("gpu", "gpu_count", "driver", "cuda", "torch", "python", "cpu", "host_hash",
               "threads", "dtype", "compiled")  # fmt: skip
STUTTER_RATIO = 1.5  # a stutter takes so much longer than the steps around it
# The steps around it are 21 steps, by their upper quartile: where a slower stage begins, that is
# already the slower time, so none of the stage's steps counts as a stutter.
NEIGHBOURS, QUARTILE = 21, 75


@dataclass
class Side:
    """One arm of a comparison."""

    path: str  # of its logs, or its command
    runs: list[Run] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [(run.train_time_ms or 0.0) / 1000 for run in self.runs]

    @property
    def losses(self) -> list[float]:
        return [run.final_loss or math.nan for run in self.runs]

    @property
    def by_seed(self) -> dict[int, float]:
        """Losses of the runs whose seed is in the log."""
        pairs = zip(self.runs, self.losses, strict=True)
        return {run.seed: loss for run, loss in pairs if run.seed is not None}

    def add(self, run: Run) -> None:
        """LogError for a run that does not count, or has no times."""
        if run.left_out or run.train_time_ms is None:
            problem = run.left_out or "it has no training times"
            raise LogError(f"{name_of(run)}: {problem}; only complete runs with times are compared")
        self.runs.append(run)


def read_side(path: str) -> Side:
    """Read the runs that count from a log or folder. LogError unless they are exactly one arm."""
    runs, errors = read_selected([path])
    side = Side(path, left_out=list(map(str, errors)))
    side.left_out += [f"{name_of(run)}: {run.left_out}" for run in runs if run.left_out]
    arms = group_runs([run for run in runs if run.counts])
    if len(arms) != 1:
        rule = f"{path} holds {len(arms)} arms where one is needed"
        raise LogError("\n  ".join([f"{rule}: select one", *list_arms(arms), *side.left_out]))
    (members,) = arms.values()
    kept, repeats = leave_out_repeats(members)
    side.left_out += repeats
    for run in kept:
        side.add(run)
    return side


# ---- The training time of one run


class Account(NamedTuple):
    """The training time of one run: steps x step_ms, and the stutters on top."""

    steps: int
    step_ms: float  # mean time of a step, stutters left out
    stutters: dict[int, float]  # step: seconds above the steps around it

    @property
    def lost(self) -> float:
        return sum(self.stutters.values())


def account(run: Run) -> Account:
    """The account of a complete run; without stutters where the log does not time every step."""
    stutters = find_stutters(step_times(run))
    steps, ms = run.total_steps or 0, run.train_time_ms or 0.0
    return Account(steps, (ms - 1000 * sum(stutters.values())) / steps, stutters)


def step_times(run: Run) -> np.ndarray:
    """Milliseconds of each step; empty unless the log times every step on one clock.

    Between a step and the validation after it the clock waits for the device. That time belongs to
    no step.
    """
    if not run.has_every_step:
        return np.array([])
    events: list[Step | Validation] = [*run.steps, *run.validations]
    clock = 0.0
    times = []
    for event in sorted(events, key=lambda event: event.step):
        if event.train_time_ms is None or event.train_time_ms < clock:
            return np.array([])
        if isinstance(event, Step):
            times.append(event.train_time_ms - clock)
        clock = event.train_time_ms
    return np.array(times)


def find_stutters(times: np.ndarray) -> dict[int, float]:
    """Seconds that single slow steps took above the steps around them, by step."""
    found = {}
    for first in (0, 1):  # odd and even steps apart: Adam may step only on odd ones
        ms = times[first::2]
        usual = percentile_filter(ms, QUARTILE, NEIGHBOURS, mode="nearest") if len(ms) else ms
        for place in np.flatnonzero(ms > STUTTER_RATIO * usual):
            found[int(2 * place + first + 1)] = float(ms[place] - usual[place]) / 1000
    return dict(sorted(found.items()))


# ---- Two arms


class Comparison(NamedTuple):
    """`steps`, `step_time` and `stutters` are the parts of `seconds`."""

    seconds: Difference
    steps: float  # seconds by more or fewer steps, at the mean step time of both arms
    step_time: Difference  # seconds by a slower or faster step, at the mean number of steps
    stutters: Difference  # seconds
    stutters_at: list[list[int]]  # the steps, in A and in B
    loss: Difference
    pairs: int  # of runs with one seed, on which the losses are compared; 0: not compared by seed
    pairs_save: float  # times as many runs it would take without pairs; nan: no pairs or no spread
    equal_loss: float | None  # p-value of "the losses differ by less than the margin"
    differs: list[str]  # in machine or software


def compare_sides(a: Side, b: Side, in_turn: bool, margin: float | None = None) -> Comparison:
    """The difference and its parts. LogError for a shared log.

    Runs made in turn are compared as pairs: a drift of the machine falls on both arms alike.
    """
    shared = {run.path.resolve() for run in a.runs} & {run.path.resolve() for run in b.runs}
    if shared:
        raise LogError(f"{min(shared)} is in both arms: a run is not compared with itself")
    test = paired if in_turn else welch
    accounts = [account(run) for run in a.runs], [account(run) for run in b.runs]
    steps, step_time, stutters = explain(*accounts, test)
    stutters_at = [stuttering(accounts[0]), stuttering(accounts[1])]
    seconds = test(b.seconds, a.seconds)
    new, old = b.losses, a.losses
    seeds = sorted(set(a.by_seed) & set(b.by_seed))
    pairs, save = 0, math.nan
    if len(seeds) == len(a.runs) == len(b.runs) > 1:
        test = paired  # two runs from one initialization may have much of their noise in common
        new, old = [b.by_seed[seed] for seed in seeds], [a.by_seed[seed] for seed in seeds]
        pairs, save = len(seeds), saving(new, old)
    equal = None if margin is None else equivalence(test, new, old, margin)
    return Comparison(seconds, steps, step_time, stutters, stutters_at, test(new, old), pairs, save,
                      equal, compare_machines(a, b))


def explain(
    a: Sequence[Account],
    b: Sequence[Account],
    test: Callable[[list[float], list[float]], Difference],
) -> tuple[float, Difference, Difference]:
    """Seconds by steps, step time and stutters; `test` takes (new, old).

    All runs of an arm have the same number of steps.
    """
    count = (a[0].steps + b[0].steps) / 2
    of_a = [run.step_ms / 1000 for run in a]
    of_b = [run.step_ms / 1000 for run in b]
    steps = (b[0].steps - a[0].steps) * (fmean(of_a) + fmean(of_b)) / 2
    step_time = test([count * each for each in of_b], [count * each for each in of_a])
    return steps, step_time, test([run.lost for run in b], [run.lost for run in a])


def stuttering(accounts: Sequence[Account]) -> list[int]:
    return sorted({step for account in accounts for step in account.stutters})


def compare_machines(a: Side, b: Side) -> list[str]:
    """Where the logs differ in hardware or software.

    A field that a log lacks counts as equal. Equal fields do not prove that it was one machine.
    """
    differs = []
    for key in FINGERPRINT:
        in_a = Counter(str(run.env.get(key)) for run in a.runs)
        in_b = Counter(str(run.env.get(key)) for run in b.runs)
        if len({*in_a, *in_b} - {"None"}) > 1:
            differs.append(f"{key}: {dict(in_a)} in A, {dict(in_b)} in B")
    return differs
