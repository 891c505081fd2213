"""Where the training time of a run goes: its steps, and its stutters."""

from typing import NamedTuple

import numpy as np
from scipy.ndimage import percentile_filter

from claims.runs import Run, Step, Validation

STUTTER_RATIO = 1.5  # a stutter takes so much longer than the steps around it
NEIGHBOURS, QUARTILE = 21, 75  # which their upper quartile stands for: where a slower stage begins,
# that is already its own time, so that none of its steps is taken for a stutter


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

    What the clock gains between a step and the validation after it, a wait for the device, belongs
    to no step.
    """
    if [step.step for step in run.steps] != list(range(1, (run.total_steps or 0) + 1)):
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
