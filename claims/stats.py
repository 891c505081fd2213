"""The statistics of a claim: pure functions on sequences of floats.

What a sample does not determine (too few values, no spread, a value that is not finite) is NaN, never an error; a
setting that makes no sense (a margin of zero, a level outside its range) is a ValueError that names it.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp, nctdtr, stdtr
from scipy.stats import chi2, shapiro, skew
from scipy.stats import t as student

K = TypeVar("K", bound=Hashable)

NAN, INF = math.nan, math.inf
SIGMA_STEPS = 0.0013  # the spread of final losses that the steps rule takes for granted
STEPS_BOUND = Fraction("0.004")  # of the steps rule: (target - mean) * sqrt(n) must reach it
STEPS_SLOPE = Fraction("0.000045")  # the loss that one step is worth in the pairwise steps rule
MOST_RUNS = 10**9  # a plan that needs more holds a slip of the pen
CERTAIN = 1e5  # standard errors of an effect that no test misses: beyond it the noncentral t is noise
PATHS = 10**6  # simulated sequences of runs: a level of 0.01 comes out to about 1 %


def check(low: float, high: float, **settings: float) -> None:
    for name, value in settings.items():
        if not low < value < high:
            raise ValueError(f"{name} is {value}: it must lie between {low:g} and {high:g}")


def check_levels(alpha: float, chance: float = 0.8) -> None:
    check(1e-4, 0.5, alpha=alpha)  # lower ones are beyond the simulation, and at n = 2 beyond the noncentral t
    check(alpha, 1, power=chance)


# ---- One sample


class Result(NamedTuple):
    n: int
    mean: float
    sd: float  # of the sample: n - 1 in the denominator
    t: float
    p: float
    upper99: float  # one-sided 99 % confidence bound of the mean

    @property
    def margin95(self) -> float:
        """Half-width of the two-sided 95 % confidence interval of the mean."""
        return float(student.ppf(0.975, self.n - 1)) * self.sd / math.sqrt(self.n) if self.n else NAN

    @property
    def two_sided_p(self) -> float:
        return 2 * float(student.sf(abs(self.t), self.n - 1))


def moments(values: Sequence[float]) -> tuple[int, float, float]:
    """Number, mean and sample sd; equal values have exactly no spread, where rounding errors would make p vanish."""
    n = len(values)
    with np.errstate(all="ignore"):
        mean = float(np.mean(values)) if n else NAN
        sd = float(np.std(values, ddof=1)) if n > 1 else NAN
    return n, mean, NAN if not math.isfinite(sd) else 0.0 if min(values) == max(values) else sd


def one_sample(losses: Sequence[float], target: float) -> Result:
    """One-sided one-sample t-test of whether the mean loss lies below `target`."""
    n, mean, sd = moments(losses)
    if not sd > 0:
        return Result(n, mean, sd, NAN, NAN, NAN)
    error = sd / math.sqrt(n)
    t = (mean - target) / error
    return Result(n, mean, sd, t, float(student.cdf(t, n - 1)), mean + float(student.ppf(0.99, n - 1)) * error)


def e_value(losses: Sequence[float], target: float, delta: float = -1.0) -> float:
    """Evidence against mean >= target, valid however often one looks: pass at 1 / alpha or more.

    The safe t-test (Perez-Ortiz, Lardy, de Heide, Grunwald, 2024): the density of t under an effect of `delta` sds over
    that under none. It equals exp(-n delta^2 / 2) E[exp(a W)] with W ~ chi(n), which holds where the densities vanish.
    """
    check(-INF, INF, delta=delta)
    n, t = len(losses), one_sample(losses, target).t
    if not math.isfinite(t):
        return NAN
    a = math.sqrt(n) * delta * t / math.hypot(math.sqrt(n - 1), t)
    peak = (a + math.hypot(a, 2 * math.sqrt(n - 1))) / 2
    w, step = np.linspace(max(1e-9, peak - 12), peak + 12, 10_001, retstep=True)  # falls faster than a normal density
    log_area = float(logsumexp((n - 1) * np.log(w) - w**2 / 2 + a * w)) + math.log(step)
    log_e = log_area - (n / 2 - 1) * math.log(2) - float(gammaln(n / 2)) - n * delta**2 / 2
    return math.exp(log_e) if log_e < 700 else INF


@dataclass(frozen=True)
class Outlier:
    index: int
    value: float
    g: float  # distance from the mean in sds
    p: float  # of a value so far out on either side in a normal sample (Grubbs, 1950)
    mad_z: float  # distance from the median in median absolute deviations, scaled to sds


def outlier(values: Sequence[float]) -> Outlier | None:
    """The value farthest from the mean; None for fewer than three values or no spread."""
    n, mean, sd = moments(values)
    if n < 3 or not sd > 0:
        return None
    index = int(np.argmax(np.abs(np.subtract(values, mean))))
    g = abs(values[index] - mean) / sd
    slack = (n - 1) ** 2 - n * g * g  # 0 where all the others are equal
    p = 2 * n * float(student.sf(math.sqrt(n * (n - 2) / slack) * g, n - 2)) if slack > 0 else 0.0
    distances = np.abs(np.subtract(values, np.median(values)))
    mad = 1.4826 * float(np.median(distances))
    return Outlier(index, values[index], g, min(1.0, p), float(distances[index]) / mad if mad else INF)


def skewness(values: Sequence[float]) -> tuple[float, float]:
    """The skewness, and the p-value of such a shape in a normal sample (Shapiro and Wilk, 1965)."""
    n, mean, sd = moments(values)
    if n < 3 or not sd > 0:
        return NAN, NAN
    scaled = np.subtract(values, mean) / sd
    return float(skew(scaled)), float(shapiro(scaled).pvalue)


# ---- Two samples


class Difference(NamedTuple):
    """The mean of the first sample minus that of the second, with a confidence interval from low to high."""

    n_a: int
    n_b: int
    mean: float
    t: float
    df: float
    p_less: float  # that the first mean is the smaller one
    p_two_sided: float
    low: float
    high: float


def difference(n_a: int, n_b: int, mean: float, error: float, df: float, level: float) -> Difference:
    """What a mean difference with this standard error says; NaN where it has none."""
    check(0, 1, level=level)
    if not error > 0:
        return Difference(n_a, n_b, mean, NAN, NAN, NAN, NAN, NAN, NAN)
    t, reach = mean / error, float(student.ppf((1 + level) / 2, df)) * error
    p_less, p_two_sided = float(student.cdf(t, df)), 2 * float(student.sf(abs(t), df))
    return Difference(n_a, n_b, mean, t, df, p_less, p_two_sided, mean - reach, mean + reach)


def welch(new: Sequence[float], old: Sequence[float], level: float = 0.95) -> Difference:
    """mean(new) - mean(old) of independent samples whose spreads may differ (Welch, 1947)."""
    (n_a, mean_a, sd_a), (n_b, mean_b, sd_b) = moments(new), moments(old)
    error = math.hypot(sd_a / math.sqrt(n_a or 1), sd_b / math.sqrt(n_b or 1))
    share = sd_a**2 / n_a / error**2 if error > 0 else NAN  # of the variance that comes from the first sample
    df = 1 / (share**2 / (n_a - 1) + (1 - share) ** 2 / (n_b - 1)) if error > 0 else NAN
    return difference(n_a, n_b, mean_a - mean_b, error, df, level)


def paired(new: Sequence[float], old: Sequence[float], level: float = 0.95) -> Difference:
    """mean(new - old) of runs that belong together, such as those made in turn."""
    if len(new) != len(old):
        raise ValueError(f"{len(new)} and {len(old)} values: pairs need as many of each")
    n, mean, sd = moments([a - b for a, b in zip(new, old, strict=True)])
    return difference(n, n, mean, sd / math.sqrt(n or 1), n - 1, level)


def non_inferiority(new: Sequence[float], old: Sequence[float], margin: float) -> float:
    """p-value of the claim that mean(new) < mean(old) + margin (Welch)."""
    check(0, INF, margin=margin)
    return welch([value - margin for value in new], old).p_less


def equivalence(a: Sequence[float], b: Sequence[float], margin: float) -> float:
    """p-value of the claim that the means differ by less than `margin`: two one-sided tests (Schuirmann, 1987)."""
    return max(non_inferiority(a, b, margin), non_inferiority(b, a, margin))


def holm(p_values: dict[K, float]) -> dict[K, float]:
    """p-values adjusted so that the chance of any false finding in the family keeps its level (Holm, 1979)."""
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    scaled = [min(1.0, (len(ordered) - rank) * p) for rank, (_, p) in enumerate(ordered)]
    return {name: p for (name, _), p in zip(ordered, accumulate(scaled, max), strict=True)}


# ---- Planning


def smallest_n(enough: Callable[[int], bool], start: int = 2) -> int:
    """The smallest n from `start` on that is enough, where all larger ones are too."""
    high = start
    while not enough(high):
        if high >= MOST_RUNS:
            raise ValueError(f"more than {MOST_RUNS:,} runs are needed: the margin is too small for this spread")
        high = min(2 * high, MOST_RUNS)
    return start + bisect_left(range(start, high), True, key=enough)


def power_of_t(df: int, effect: float, alpha: float) -> float:
    """Chance that a one-sided t-test passes, its true effect being so many standard errors (noncentral t)."""
    return float(nctdtr(df, -min(effect, CERTAIN), student.ppf(alpha, df))) if df > 0 else NAN


def power(n: int, sd: float, margin: float, alpha: float = 0.01) -> float:
    """Chance that n runs pass the one-sample test, their true mean lying `margin` below the target."""
    check_levels(alpha)
    check(0, INF, sd=sd, margin=margin)
    return power_of_t(n - 1, margin / sd * math.sqrt(n), alpha)


def runs_needed(sd: float, margin: float, chance: float = 0.8, alpha: float = 0.01) -> int:
    """The fewest runs with this power."""
    check_levels(alpha, chance)
    return smallest_n(lambda n: power(n, sd, margin, alpha) >= chance)


def equivalence_runs(sd: float, margin: float, chance: float = 0.8, alpha: float = 0.05) -> int:
    """Runs in each of two arms of one mean and sd for `equivalence` to pass: the chances that a one-sided test fails
    are added, which is exact where the power is of use."""
    check_levels(alpha, chance)
    check(0, INF, sd=sd, margin=margin)
    return smallest_n(lambda n: 2 * power_of_t(2 * n - 2, margin / sd * math.sqrt(n / 2), alpha) - 1 >= chance)


def detectable_margin(n: int, sd: float, chance: float = 0.8, alpha: float = 0.01) -> float:
    """The true margin that n runs show with this power."""
    check_levels(alpha, chance)
    check(0, INF, sd=sd)
    if n < 2:
        return NAN
    return brentq(lambda effect: power_of_t(n - 1, effect, alpha) - chance, 0, CERTAIN) * sd / math.sqrt(n)


def passing_mean(n: int, sd: float, target: float, alpha: float = 0.01) -> float:
    """The mean of n losses with this sample sd has to lie below it."""
    check_levels(alpha)
    check(0, INF, sd=sd)
    return target + float(student.ppf(alpha, n - 1)) * sd / math.sqrt(n) if n > 1 else NAN


def runs_to_pass(result: Result, target: float, alpha: float = 0.01) -> int | None:
    """How many runs would pass at this mean and sd, never fewer than there are; None where no number would."""
    if not (result.sd > 0 and result.mean < passing_mean(MOST_RUNS, result.sd, target, alpha)):
        return None
    return smallest_n(lambda n: result.mean < passing_mean(n, result.sd, target, alpha), result.n)


# ---- Looking early


@cache
def smallest_p_values(looks: tuple[int, ...], alpha: float) -> np.ndarray:
    """The smallest p over the looks in each of PATHS sequences of runs without an effect; 1 where none is below alpha.

    Runs between two looks enter by what the t-test needs of them, drawn at once: their sum and their sum of squares.
    """
    check_levels(alpha)
    if not looks or any(n - before < 1 for before, n in pairwise((1, *looks))):
        raise ValueError(f"looks are {looks}: they must be rising numbers of runs, the first at least 2")
    rng = np.random.default_rng(0)
    total, squares, smallest = np.zeros(PATHS), np.zeros(PATHS), np.ones(PATHS)
    for before, n in pairwise((0, *looks)):
        normal = rng.standard_normal(PATHS)
        total += math.sqrt(n - before) * normal
        squares += normal**2 + (rng.chisquare(n - before - 1, PATHS) if n - before > 1 else 0)
        t = total / np.sqrt((n * squares - total**2) / (n - 1))
        low = np.flatnonzero(t < student.ppf(alpha, n - 1))
        smallest[low] = np.minimum(smallest[low], stdtr(n - 1, t[low]))
    return smallest


def look_level(looks: Sequence[int], alpha: float = 0.01) -> float:
    """The constant level at these numbers of runs that together makes alpha (Pocock, 1977, for the t-test)."""
    smallest = smallest_p_values(tuple(looks), alpha)
    return min(alpha, float(np.quantile(smallest, alpha))) if len(looks) > 1 else alpha


def true_level(looks: Sequence[int], alpha: float = 0.01) -> float:
    """The chance of passing without an effect when testing at alpha at each of these numbers of runs."""
    smallest = smallest_p_values(tuple(looks), alpha)
    return float(np.mean(smallest < alpha)) if len(looks) > 1 else alpha


# ---- The steps track: decided in fractions, as doubles miss a target of 3.28 with four losses of 3.278, on the bound


def reaches_bound(margin: Fraction, variance: Fraction) -> tuple[float, bool]:
    return float(margin) / math.sqrt(variance), margin > 0 and margin**2 >= STEPS_BOUND**2 * variance


def exact_mean(losses: Sequence[Decimal]) -> Fraction | None:
    finite = losses and all(loss.is_finite() for loss in losses)
    return sum(map(Fraction, losses), Fraction()) / len(losses) if finite else None


def steps_rule(losses: Sequence[Decimal], target: Decimal) -> tuple[float, bool]:
    """(target - mean) * sqrt(n), and whether it reaches 0.004."""
    mean = exact_mean(losses)
    return (NAN, False) if mean is None else reaches_bound(Fraction(target) - mean, Fraction(1, len(losses)))


def steps_pairwise(
    losses_new: Sequence[Decimal], steps_new: int, losses_old: Sequence[Decimal], steps_old: int
) -> tuple[float, bool]:
    """The same for one result against another, each step less being worth 4.5e-5 of loss."""
    new, old = exact_mean(losses_new), exact_mean(losses_old)
    if new is None or old is None:
        return NAN, False
    variance = Fraction(1, len(losses_new)) + Fraction(1, len(losses_old))
    return reaches_bound(old - new + (steps_old - steps_new) * STEPS_SLOPE, variance)


def sigma_p(sd: float, n: int) -> float:
    """p-value of the claim that the true spread is larger than SIGMA_STEPS (chi-squared)."""
    return float(chi2.sf((n - 1) * (sd / SIGMA_STEPS) ** 2, n - 1)) if n > 1 else NAN
