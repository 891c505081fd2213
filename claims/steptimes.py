"""Where the time of a run goes: its steps, its stutters, the stages of its schedule."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.ndimage import percentile_filter

from claims.runs import Run, Step, Validation
from claims.stats import Difference

STUTTER_RATIO = 1.5  # a stutter takes so much longer than the steps around it
NEIGHBOURS, QUARTILE = 21, 75  # which their upper quartile stands for: where a slower stage begins,
# that is already its own time, so that none of its steps is taken for a stutter


class Stage(NamedTuple):
    window: int | None
    steps: int
    ms: float  # mean time of a step, stutters left out


class Account(NamedTuple):
    """The training time of one run: steps x step_ms, and the stutters on top."""

    steps: int
    step_ms: float  # mean time of a step, stutters left out
    stutters: dict[int, float] = {}  # noqa: RUF012 - step: seconds above the steps around it
    stages: dict[int, Stage] = {}  # noqa: RUF012 - as the log names them

    @property
    def lost(self) -> float:
        return sum(self.stutters.values())


def step_times(run: Run) -> np.ndarray | None:
    """Milliseconds of each step; None unless the log times every step on one clock.

    What the clock gains between a step and the validation after it, a wait for the device, belongs
    to no step.
    """
    events: list[Step | Validation] = [*run.steps, *run.validations]
    clock = 0.0
    times = []
    for event in sorted(events, key=lambda event: event.step):
        if event.train_time_ms is None or event.train_time_ms < clock:
            return None
        if isinstance(event, Step):
            times.append(event.train_time_ms - clock)
        clock = event.train_time_ms
    in_order = [step.step for step in run.steps] == list(range(1, (run.total_steps or 0) + 1))
    return np.array(times) if times and in_order else None


def find_stutters(times: np.ndarray) -> dict[int, float]:
    """Seconds that single slow steps took above the steps around them, by step."""
    found = {}
    for first in (0, 1):  # odd and even steps apart: Adam may step only on odd ones
        ms = times[first::2]
        usual = percentile_filter(ms, QUARTILE, NEIGHBOURS, mode="nearest")
        for place in np.flatnonzero(ms > STUTTER_RATIO * usual):
            found[int(2 * place + first + 1)] = float(ms[place] - usual[place]) / 1000
    return dict(sorted(found.items()))


def account(run: Run) -> Account:
    """The account of a complete run; without stutters and stages where steps are not timed."""
    total_ms, count = run.train_time_ms or 0.0, run.total_steps or 0
    times = step_times(run)
    if times is None:
        return Account(count, total_ms / count)
    stutters = find_stutters(times)
    for step, seconds in stutters.items():
        times[step - 1] -= 1000 * seconds
    stages = {}
    for stage in sorted({step.stage for step in run.steps if step.stage is not None}):
        chosen = [step for step in run.steps if step.stage == stage]
        ms = fmean(float(times[step.step - 1]) for step in chosen)
        stages[stage] = Stage(chosen[0].window, len(chosen), ms)
    lost_ms = 1000 * sum(stutters.values())
    return Account(count, (total_ms - lost_ms) / count, stutters, stages)


class Explanation(NamedTuple):
    """The first three are the parts of mean time of B - mean time of A, in seconds."""

    steps: float  # more or fewer steps, at the mean step time of both arms
    step_time: Difference  # a slower or faster step, at the mean number of steps
    stutters: Difference
    stutters_at: list[list[int]]  # the steps, in A and in B
    stages: dict[int, tuple[Stage, Stage]]  # in A and in B


def explain(
    a: Sequence[Account], b: Sequence[Account],
    compare: Callable[[list[float], list[float]], Difference],
) -> Explanation:  # fmt: skip
    """Each arm has one number of steps; `compare` is a test of (new, old)."""
    more, count = b[0].steps - a[0].steps, (a[0].steps + b[0].steps) / 2
    seconds = [[one.step_ms / 1000 for one in side] for side in (a, b)]
    in_steps = [[count * each for each in side] for side in seconds]
    lost = [[one.lost for one in side] for side in (a, b)]
    shared = sorted(a[0].stages.keys() & b[0].stages.keys())
    return Explanation(
        steps=more * (fmean(seconds[0]) + fmean(seconds[1])) / 2,
        step_time=compare(in_steps[1], in_steps[0]),
        stutters=compare(lost[1], lost[0]),
        stutters_at=[sorted({step for one in side for step in one.stutters}) for side in (a, b)],
        stages={stage: (mean_stage(a, stage), mean_stage(b, stage)) for stage in shared},
    )


def mean_stage(accounts: Sequence[Account], stage: int) -> Stage:
    ms = fmean(one.stages[stage].ms for one in accounts if stage in one.stages)
    return accounts[0].stages[stage]._replace(ms=ms)
