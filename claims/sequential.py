"""Does B beat A? Paired differences, tested as the pairs arrive, at a level kept over all looks.

A difference is B's figure minus A's on the same seed; the lower figure is the better one. The plan
is made before the runs. At every look it makes the same two tests, each at the level that, used at
all looks, makes its whole level (Pocock, 1977; for t statistics by simulation, `stats.look_level`):

- Does the interval exclude 0? Then B is better or worse. If there is no difference, one race in
  100 ends so (ALPHA).
- Is the narrower interval within +-margin? Then no difference is larger. If there is one, one
  race in 20 ends so (EQUAL; two one-sided tests).

We report the interval of the deciding test. It may be read after any stop: in 99 of
100 races those of all looks hold the true difference, in 90 the narrower ones (repeated confidence
intervals, Jennison and Turnbull, 1989). The mean is not as honest: of a race that stopped early it
is too far from 0. All this holds for differences without a strong skew: with lognormal ones, 2 to
3 races in 100 end better or worse without a difference.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from claims import stats

FIRST_LOOK = 4  # pairs: fewer may agree by chance
ALPHA = 0.01  # of better and worse together
EQUAL = 0.05  # of "no difference larger than the margin"
MOST_PAIRS = 100
RACES = 10_000  # of a simulation
OUTCOMES = ("undecided", "better", "worse", "no difference")  # larger than the margin
UNDECIDED, BETTER, WORSE, SAME = range(4)


class Plan:
    """When to look, and what to look for. ValueError for a plan that makes no sense.

    pairs: at most; margin: the smallest difference that matters; every: pairs between two looks.
    """

    def __init__(self, pairs: int, margin: float, every: int = 1):
        if not FIRST_LOOK <= pairs <= MOST_PAIRS or every < 1:
            rule = f"it takes {FIRST_LOOK} to {MOST_PAIRS} pairs, and 1 or more between two looks"
            raise ValueError(f"{pairs} pairs, a look after every {every}: {rule}")
        stats.check(0, stats.INF, margin=margin)
        self.margin = margin
        self.looks = (*range(FIRST_LOOK, pairs, every), pairs)

    @cached_property
    def widths(self) -> dict[int, tuple[float, float]]:
        """By look: half of both intervals, in standard errors of the mean."""
        levels = [stats.look_level(self.looks, level) for level in (ALPHA / 2, EQUAL)]
        found = {}
        for n in self.looks:
            wide, narrow = (float(student.isf(level, n - 1)) for level in levels)
            found[n] = wide, narrow
        return found


def follow(differences: np.ndarray, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """The number of each race's outcome, and the pairs it took. differences: (races, pairs)."""
    races, seen = differences.shape
    outcomes, used = np.full(races, UNDECIDED), np.full(races, seen)
    mean, squares = np.zeros(races), np.zeros(races)
    for n in range(1, seen + 1):
        new = differences[:, n - 1]
        before, mean = mean, mean + (new - mean) / n
        squares = squares + (new - before) * (new - mean)
        if n in plan.looks:
            wide, narrow = (width * error_of(mean, squares, n) for width in plan.widths[n])
            shown = [mean + wide < 0, mean - wide > 0, abs(mean) + narrow < plan.margin]
            found = np.select(shown, [BETTER, WORSE, SAME], UNDECIDED)
            now = (outcomes == UNDECIDED) & (found != UNDECIDED)
            outcomes[now], used[now] = found[now], n
    return outcomes, used


def error_of(mean: np.ndarray, squares: np.ndarray, n: int) -> np.ndarray:
    """The standard error of the mean. Equal differences give none, unless all of them are 0."""
    error = np.sqrt(squares / (n - 1) / n)
    return np.where((error == 0) & (mean != 0), np.inf, error)


class Verdict(NamedTuple):
    outcome: str  # one of OUTCOMES
    final: bool  # whether no further pair is needed
    pairs: int
    mean: float  # B - A
    low: float = math.nan  # of the interval
    high: float = math.nan
    sd: float = math.nan  # of the differences
    confidence: float = 1 - ALPHA  # of the interval


def judge(differences: Sequence[float], plan: Plan) -> Verdict:
    """The verdict on the pairs so far. A difference that is not finite ends the race undecided."""
    mean, sd = stats.moments(differences)
    if not all(map(math.isfinite, differences)):
        return Verdict(OUTCOMES[UNDECIDED], True, len(differences), math.nan)
    if len(differences) not in plan.looks:
        return Verdict(OUTCOMES[UNDECIDED], False, len(differences), mean)
    numbers, used = follow(np.array([differences]), plan)
    number, n = int(numbers[0]), int(used[0])
    final = number != UNDECIDED or n == plan.looks[-1]
    wide, narrow = plan.widths[n]
    width, confidence = (narrow, 1 - 2 * EQUAL) if number == SAME else (wide, 1 - ALPHA)
    half = width * float(error_of(np.array(mean), np.array((n - 1) * sd**2), n))
    return Verdict(OUTCOMES[number], final, n, mean, mean - half, mean + half, sd, confidence)


def simulate(plan: Plan, difference: float, sd: float) -> tuple[np.ndarray, np.ndarray]:
    """`follow` for 10,000 races with this true difference."""
    drawn = np.random.default_rng(0).normal(difference, sd, (RACES, plan.looks[-1]))
    return follow(drawn, plan)


def one_look(plan: Plan, sd: float) -> tuple[float, int | None]:
    """The plan's power, and the pairs with which one test at the end has as much.

    Power is the chance to find that B is better, if it is, by the margin. None: it is hopeless, or
    the differences have no spread.
    """
    if not sd > 0:
        return math.nan, None
    outcomes, _ = simulate(plan, -plan.margin, sd)
    power = float((outcomes == BETTER).mean())
    if power <= ALPHA:
        return power, None
    chance = min(power, 1 - 1 / RACES)
    return power, stats.runs_needed(sd, plan.margin, chance, ALPHA / 2)
