"""The statistics of a claim."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student
from scipy.stats import ttest_1samp


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
        return float(student.ppf(0.975, self.n - 1)) * self.sd / math.sqrt(self.n) if self.n else math.nan

    @property
    def two_sided_p(self) -> float:
        return 2 * float(student.sf(abs(self.t), self.n - 1))


def one_sample(losses: Sequence[float], target: float) -> Result:
    """One-sided one-sample t-test of whether the mean loss lies below `target`.

    NaN stands for what the losses do not determine: the spread of fewer than two, and the test where all are equal.
    """
    n, nan = len(losses), math.nan
    mean = float(np.mean(losses)) if n else nan
    if n < 2 or not math.isfinite(mean):
        return Result(n, mean, nan, nan, nan, nan)
    if min(losses) == max(losses):  # exactly: a spread of rounding errors would make p vanish
        return Result(n, mean, 0.0, nan, nan, nan)
    test = ttest_1samp(losses, target, alternative="less")
    upper99 = test.confidence_interval(0.99).high
    return Result(n, mean, float(np.std(losses, ddof=1)), float(test.statistic), float(test.pvalue), float(upper99))
