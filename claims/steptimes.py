"""Where the time of runs goes: typical steps by phase, stutters, and the parts of the difference of two arms.

A phase is the odd or the even steps (an optimizer may move only on every second) of one stage: the log's own stage,
or else a stretch of steps of one speed, found in the times themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.ndimage import median_filter

from claims.runlog import Run, Step, Validation
from claims.stats import Difference

STRETCH_STEPS = 20  # on each side of a change of speed
STRETCH_RATIO = 1.1  # that the mean step time must change by
STUTTER_RATIO = 1.5  # a stutter takes so much longer than the median of its phase,
STUTTER_SPREADS = 6  # and lies so many scaled median absolute deviations above it

Phase = tuple[int, int]  # stage from 0, step modulo 2


class Timeline(NamedTuple):
    """The timed steps of one run, in order."""

    steps: list[Step]
    own_ms: np.ndarray  # by the clock at each step
    ms: np.ndarray  # with what the next validation still waited for: sums to the training time


class Typical(NamedTuple):
    steps: float
    ms: float  # mean time of a step, stutters left out
    window: int | None = None


class Stutter(NamedTuple):
    step: int
    seconds: float  # beyond the median of its phase


@dataclass(frozen=True)
class Account:
    """The training time of one run: the sum over its phases of steps x typical time, and its stutters."""

    phases: dict[Phase, Typical]
    stutters: list[Stutter]

    @property
    def lost(self) -> float:
        return sum(stutter.seconds for stutter in self.stutters)

    def whole(self) -> "Account":
        """All steps as one phase."""
        steps = sum(typical.steps for typical in self.phases.values())
        ms = sum(typical.steps * typical.ms for typical in self.phases.values())
        return Account({(0, 0): Typical(steps, ms / steps)}, self.stutters)


# ---- From a log to an account


def read_timeline(run: Run) -> Timeline | None:
    """The steps that the clock ran for; None unless the log times every one of them.

    A clock that starts again, as after untimed first steps, starts the timeline again.
    """
    events: list[Step | Validation] = sorted([*run.steps, *run.validations], key=lambda event: event.step)
    steps: list[Step] = []
    reached: list[float] = []  # by the clock at each step
    begun = [0.0]  # the clock where each step begins, and at last where the last one has ended
    for event in events:
        now = event.train_time_ms
        if now is None:
            return None
        if now < begun[-1] / 2:
            steps, reached, begun = [], [], [0.0]
        if isinstance(event, Step):
            steps.append(event)
            reached.append(now)
            begun.append(now)
        elif steps:
            begun[-1] = now
    whole = steps and steps[-1].step == run.total_steps and all(b.step == a.step + 1 for a, b in pairwise(steps))
    return Timeline(steps, np.subtract(reached, begun[:-1]), np.diff(begun)) if whole else None


def find_stages(timelines: Sequence[Timeline]) -> np.ndarray:
    """The stage of each step of an arm: as logged, or else by the changes of speed in the median over its runs."""
    logged = [step.stage for step in timelines[0].steps]
    if None not in logged:
        return np.array(logged)
    starts = change_points(np.median([timeline.own_ms for timeline in timelines], axis=0))
    return np.searchsorted(starts, np.arange(len(logged)), side="right")


def change_points(ms: np.ndarray) -> list[int]:
    """Indices from which on steps take another time than before, by STRETCH_RATIO or more.

    Compares mean logarithms over STRETCH_STEPS before and after, as many odd as even steps; a median filter on each of
    these takes out single slow steps and keeps the edges.
    """
    width, level = STRETCH_STEPS, np.log(np.maximum(ms, 1e-6))
    if len(ms) < 2 * width:
        return []
    for parity in (0, 1):
        level[parity::2] = median_filter(level[parity::2], 5, mode="nearest")
    means = np.convolve(level, np.full(width, 1 / width), "valid")
    jumps, found = np.abs(means[width:] - means[:-width]), []
    while jumps.max(initial=0) >= np.log(STRETCH_RATIO):
        place = int(jumps.argmax())
        found.append(place + width)
        jumps[max(0, place - width) : place + width] = 0
    return sorted(found)


def account(timeline: Timeline, stages: np.ndarray) -> Account:
    numbers, phases, stutters = np.array([step.step for step in timeline.steps]), {}, []
    for stage, parity in dict.fromkeys(zip(stages.tolist(), (numbers % 2).tolist(), strict=True)):
        chosen = np.flatnonzero((stages == stage) & (numbers % 2 == parity))
        own = timeline.own_ms[chosen]
        median = np.median(own)
        spread = 1.4826 * np.median(np.abs(own - median))
        slow = own > max(STUTTER_RATIO * median, median + STUTTER_SPREADS * spread)
        lost = np.where(slow, own - median, 0)
        ms = float(np.mean(timeline.ms[chosen] - lost))
        phases[stage, parity] = Typical(len(chosen), ms, timeline.steps[chosen[0]].window)
        stutters += [Stutter(int(numbers[chosen[i]]), float(lost[i]) / 1000) for i in np.flatnonzero(slow)]
    return Account(phases, sorted(stutters))


def account_arms(*arms: Sequence[Run]) -> tuple[list[list[Account]], bool]:
    """The accounts of each arm's runs, and whether they are by step: only where all logs time every step.

    Without, a run is its total number of steps of one time. The runs must be complete, with times.
    """
    timelines = [[timeline for run in runs if (timeline := read_timeline(run))] for runs in arms]
    lengths = [len({len(timeline.steps) for timeline in side}) for side in timelines]
    if list(map(len, timelines)) == list(map(len, arms)) and set(lengths) == {1}:
        stages = [find_stages(side) for side in timelines]
        return [[account(one, found) for one in side] for side, found in zip(timelines, stages, strict=True)], True
    totals = [[(run.total_steps or 0, run.train_time_ms or 0) for run in runs] for runs in arms]
    return [[Account({(0, 0): Typical(n, ms / n)}, []) for n, ms in side] for side in totals], False


# ---- The difference of two arms


class Row(NamedTuple):
    """One phase in both arms; seconds is what it adds to the difference, stutters left out."""

    phase: Phase
    a: Typical
    b: Typical
    seconds: float


class Explanation(NamedTuple):
    """The parts of mean time of B - mean time of A, in seconds. They sum to it.

    With n steps of typical time c in each phase: `step_time` is the change of c x the mean n of the two arms, `steps`
    the change of all n x the mean time of a step, `schedule` what phases grown longer or shorter add beyond that.
    """

    steps: float
    schedule: float
    step_time: Difference
    stutters: Difference
    rows: list[Row]

    @property
    def total(self) -> float:
        return self.steps + self.schedule + self.step_time.mean + self.stutters.mean


def explain(
    a: Sequence[Account], b: Sequence[Account], compare: Callable[[list[float], list[float]], Difference]
) -> Explanation:
    """Phase by phase where all runs have the same ones, else with all steps as one; `compare` is given (new, old)."""
    if len({frozenset(one.phases) for one in [*a, *b]}) > 1:
        a, b = [one.whole() for one in a], [one.whole() for one in b]
    rows = []
    for phase in sorted(a[0].phases, key=lambda phase: (phase[0], -phase[1])):
        means = [np.mean([one.phases[phase][:2] for one in side], axis=0).tolist() for side in (a, b)]
        old, new = (Typical(n, ms, side[0].phases[phase].window) for (n, ms), side in zip(means, (a, b), strict=True))
        rows.append(Row(phase, old, new, (new.steps * new.ms - old.steps * old.ms) / 1000))
    n_a, n_b = sum(row.a.steps for row in rows), sum(row.b.steps for row in rows)
    mean_step = sum(row.a.steps * row.a.ms / n_a + row.b.steps * row.b.ms / n_b for row in rows) / 2000
    moved = sum((row.b.steps - row.a.steps) * (row.a.ms + row.b.ms) / 2000 for row in rows)
    steps = (n_b - n_a) * mean_step

    def at_mean_steps(one: Account) -> float:
        return sum(one.phases[row.phase].ms * (row.a.steps + row.b.steps) / 2000 for row in rows)

    step_time = compare([at_mean_steps(one) for one in b], [at_mean_steps(one) for one in a])
    return Explanation(steps, moved - steps, step_time, compare([one.lost for one in b], [one.lost for one in a]), rows)
