"""The statistics against figures of public records, scipy's tests, whole numbers, simulation."""

import math
import statistics
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_1samp, ttest_ind, ttest_rel

from claims import stats

pytestmark = pytest.mark.core


def numbers(start: str, endings: str) -> list[float]:
    return [float(start + ending) for ending in endings.split()]


# Final losses of public runs of the NanoGPT speedrun.
LOSSES = {name: numbers("3.2", endings) for name, endings in {
    "BosAlign": "784 782 794 788 784 803 792 819 792 801 778 773 791 817 779 804 805 789 770 783",
    "FixMuonLR": "804 754 753 800 780 813 778 771 780 783",
    "MimeticValueOutput": "777 775 778 772 780 805 791",
    "FP8MLPUpProj": "802 800 789 763 792 793 781 785",
}.items()}  # fmt: skip
NORMUON_3250 = numbers("3.2", (
    "7854 7942 8064 8056 7858 7976 7827 7754 7825 7800 "
    "7909 7893 7924 7835 7882 7758 7866 8032 7840 7855"
))  # fmt: skip


@given(st.dictionaries(st.integers(), st.floats(0, 1), max_size=6))
def test_holm_is_the_closed_test_of_bonferroni(p_values):
    closed = dict.fromkeys(p_values, 0.0)
    for size in range(1, 7):
        for family in combinations(p_values, size):
            p = min(1, size * min(p_values[key] for key in family))
            for key in family:
                closed[key] = max(closed[key], p)
    assert stats.holm(p_values) == pytest.approx(closed)


samples = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20)
samples = samples.filter(lambda values: np.std(values) > 1e-6)


@given(samples, samples)
@settings(max_examples=100, deadline=None)
def test_the_t_tests_are_those_of_scipy(a, b):
    def agrees(found, test):
        assert found[1:] == pytest.approx((test.pvalue, *test.confidence_interval(0.95)))

    agrees(stats.welch(a, b), ttest_ind(a, b, equal_var=False))
    c = a[: len(b)] + b[len(a) :]
    if np.std(np.subtract(c, b)) > 1e-6:
        agrees(stats.paired(c, b), ttest_rel(c, b))
    one = ttest_1samp(a, 1.0, alternative="less")
    expected = (one.statistic, one.pvalue, one.confidence_interval(0.99).high)
    moments = (len(a), statistics.fmean(a), statistics.stdev(a))
    assert stats.one_sample(a, 1.0) == pytest.approx((*moments, *expected))


@given(SAMPLE := st.lists(st.floats(), max_size=5), SAMPLE, st.floats(allow_infinity=False))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_sample_raises_and_every_p_is_one_or_nan(a, b, target):
    alone, apart, beside = stats.one_sample(a, target), stats.welch(a, b), stats.paired(a, a)
    ps = [alone.p, apart.p_two_sided, beside.p_two_sided]
    assert all(math.isnan(p) or 0 <= p <= 1 for p in ps)


@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 3, [3.0, math.nan], [math.inf, -math.inf]])
def test_values_without_a_spread_have_no_test(values):
    assert math.isnan(stats.one_sample(values, 3.28).p)
    assert math.isnan(stats.welch(values, values).p_two_sided)
    assert math.isnan(stats.paired(values, values).low)


@pytest.mark.parametrize(("analyses", "level"), [
    ((5, 10), 0.00522), ((5, 10, 15, 20), 0.00320), ((8, 16, 24), 0.00394),
    (tuple(range(3, 21)), 0.00134), ((10,), 0.01),
])  # fmt: skip
def test_planned_analyses_have_the_published_level(analyses, level):
    assert stats.interim_level(analyses) == pytest.approx(level, rel=0.05)


@given(st.lists(st.integers(327_000, 328_999), min_size=1, max_size=30))
def test_the_steps_rule_is_decided_as_in_whole_numbers(losses):
    margin = sum(328_000 - loss for loss in losses)  # n times the mean one, in units of 1e-5
    expected = margin > 0 and margin**2 >= 400**2 * len(losses)
    assert stats.steps_rule([loss / 100_000 for loss in losses], 3.28)[1] is expected


def test_an_outlier_is_the_one_that_grubbs_names():
    cautious = numbers("3.2", "784 775 772 790 781 777 765 787 779 768 783 870")
    assert stats.outlier(cautious) == 11
    assert stats.outlier(LOSSES["FixMuonLR"]) is None
    normal = np.random.default_rng(0).standard_normal((20_000, 10))
    named = sum(stats.outlier(list(sample)) is not None for sample in normal[:4000])
    assert 20 <= named <= 60, "of normal samples one in a hundred has one"
    for values in ([], [1.0, 9.0, 1.0], [2.0] * 9):
        assert stats.outlier(values) is None
