"""The statistics of a claim: functions on sequences of floats.

What a sample does not determine (too few values, no spread, a value that is not finite) is NaN.
tests/test_stats.py has figures of public runs.
"""

import math
import warnings
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtr
from scipy.stats import t as student
from scipy.stats import ttest_1samp, ttest_ind, ttest_rel

NAN, INF = math.nan, math.inf
STEPS_BOUND = Fraction("0.004")  # of track 3: (target - mean) * sqrt(n) must reach it
SEQUENCES = 10**6  # simulated for interim analyses: a level of 0.01 comes out to about 1 %


# ---- Tests


class Result(NamedTuple):
    n: int
    mean: float
    sd: float  # of the sample, with n - 1
    t: float
    p: float
    upper99: float  # one-sided 99 % confidence bound of the mean


class Difference(NamedTuple):
    """The mean of the first sample minus that of the second, with its 95 % interval."""

    mean: float
    p_two_sided: float = NAN
    low: float = NAN
    high: float = NAN


def in_words(found: Any, form: str) -> str:
    """The mean and its interval, none for single runs: fields mean, low and high."""
    interval = f"{found.low:{form}} to {found.high:{form}}"
    return f"{found.mean:{form}} ({'no interval' if math.isnan(found.low) else interval})"


def moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample sd.

    Values that are equal to rounding have exactly no spread: else p would vanish.
    """
    with np.errstate(all="ignore"):
        mean = float(np.mean(values)) if values else NAN
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else NAN
    if not math.isfinite(sd):
        return mean, NAN
    return mean, 0.0 if max(values) - min(values) <= 1e-12 * abs(mean) else sd


def one_sample(losses: Sequence[float], target: float) -> Result:
    """One-sided one-sample t-test of whether the mean loss is below `target`."""
    mean, sd = moments(losses)
    if not sd > 0:
        return Result(len(losses), mean, sd, NAN, NAN, NAN)
    test = ttest_1samp(losses, target, alternative="less")
    upper99 = float(test.confidence_interval(0.99).high)
    return Result(len(losses), mean, sd, float(test.statistic), float(test.pvalue), upper99)


def welch(new: Sequence[float], old: Sequence[float]) -> Difference:
    """mean(new) - mean(old) of independent samples; their spreads may differ (Welch, 1947)."""
    (mean_new, sd_new), (mean_old, sd_old) = moments(new), moments(old)
    if not sd_new + sd_old > 0:
        return Difference(mean_new - mean_old)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of scipy, if one sample has no spread
        return difference(mean_new - mean_old, ttest_ind(new, old, equal_var=False))


def paired(new: Sequence[float], old: Sequence[float]) -> Difference:
    """mean(new - old) of paired runs: with the same seed, or made in turn."""
    mean, sd = moments([a - b for a, b in zip(new, old, strict=True)])
    if not sd > 0:
        return Difference(mean)
    return difference(mean, ttest_rel(new, old))


def difference(mean: float, test: Any) -> Difference:
    """`test` is a two-sided one by scipy."""
    low, high = test.confidence_interval(0.95)
    return Difference(mean, float(test.pvalue), float(low), float(high))


def less_above(margin: float, new: Sequence[float], old: Sequence[float]) -> float:
    """p-value of "the mean of new is less than margin above that of old" (one-sided Welch test)."""
    found = welch([value - margin for value in new], old)
    half = found.p_two_sided / 2
    return half if found.mean < 0 else 1 - half


def steps_rule(losses: Sequence[float], target: float) -> tuple[float, bool]:
    """The rule of track 3: (target - mean) * sqrt(n), and whether it reaches 0.004.

    Decided in fractions of the printed decimals: in doubles four losses of 3.278, exactly on the
    bound, would fail.
    """
    n = len(losses)
    if not n or not all(map(math.isfinite, [*losses, target])):
        return NAN, False
    mean = sum((Fraction(repr(loss)) for loss in losses), Fraction()) / n
    margin = Fraction(repr(target)) - mean
    return float(margin) * math.sqrt(n), margin > 0 and margin**2 * n >= STEPS_BOUND**2


# ---- Planning


@cache
def interim_level(analyses: tuple[int, ...], alpha: float = 0.01) -> float:
    """The level that, used at each of these numbers of runs, makes alpha in all (Pocock, 1977).

    The runs are simulated without an effect. Those between two analyses are drawn at once, as their
    sum and their sum of squares: a t-test needs no more. Levels below 1e-4 are not resolved.
    """
    if len(analyses) == 1:
        return alpha
    rng = np.random.default_rng(0)
    total, squares = np.zeros(SEQUENCES), np.zeros(SEQUENCES)
    smallest = np.ones(SEQUENCES)  # p of each sequence, over the analyses so far
    for before, n in pairwise((0, *analyses)):
        normal = rng.standard_normal(SEQUENCES)
        total += math.sqrt(n - before) * normal
        squares += normal**2
        if n - before > 1:
            squares += rng.chisquare(n - before - 1, SEQUENCES)
        t = total / np.sqrt((n * squares - total**2) / (n - 1))
        low = np.flatnonzero(t < student.ppf(alpha, n - 1))  # the others cannot pass
        smallest[low] = np.minimum(smallest[low], stdtr(n - 1, t[low]))
    return min(alpha, float(np.quantile(smallest, alpha)))
