"""The statistics against figures of public records, scipy's tests, whole numbers, simulation."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_1samp, ttest_ind, ttest_rel

from claims import stats


def numbers(start: str, endings: str) -> list[float]:
    return [float(start + ending) for ending in endings.split()]


# Final losses of public runs of the NanoGPT speedrun.
LOSSES = {name: numbers("3.2", endings) for name, endings in {
    "BosAlign": "784 782 794 788 784 803 792 819 792 801 778 773 791 817 779 804 805 789 770 783",
    "FixMuonLR": "804 754 753 800 780 813 778 771 780 783",
    "MimeticValueOutput": "777 775 778 772 780 805 791",
    "FP8MLPUpProj": "802 800 789 763 792 793 781 785",
}.items()}  # fmt: skip
VE_TUNED = {f"H{i}": numbers("3.", endings) for i, endings in enumerate([
    "2796 2800 2786 2782 2801", "2774 2790 2777 2764 2813", "2771 2764 2797 2787 2769",
    "2781 2778 2807 2818 2798", "2764 2777 2771 2772 2796", "2790 2779 2782 2775 2764",
    "2979 2976 3029 2954 2992",
])}  # fmt: skip
NORMUON_3250 = numbers("3.2", (
    "7854 7942 8064 8056 7858 7976 7827 7754 7825 7800 "
    "7909 7893 7924 7835 7882 7758 7866 8032 7840 7855"
))  # fmt: skip


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


def test_four_losses_of_3278_lie_on_the_bound_that_doubles_miss():
    assert not (3.28 - 3.278) * 4**0.5 >= 0.004
    assert stats.steps_rule([3.278] * 4, 3.28) == (0.004, True)
    assert not stats.steps_rule([3.278] * 3 + [3.27800000001], 3.28)[1]
    assert not stats.steps_rule([3.2840, 3.2841], 3.28)[1], "above the target"
    for losses in ([], [3.2, math.nan]):
        assert not stats.steps_rule(losses, 3.28)[1]
    published = pytest.approx(0.00503, abs=5.1e-6)
    assert stats.steps_rule(NORMUON_3250, 3.28) == (published, True)


@given(st.lists(st.integers(327_000, 328_999), min_size=1, max_size=30))
def test_the_steps_rule_is_decided_as_in_whole_numbers(losses):
    margin = sum(328_000 - loss for loss in losses)  # n times the mean one, in units of 1e-5
    expected = margin > 0 and margin**2 >= 400**2 * len(losses)
    assert stats.steps_rule([loss / 100_000 for loss in losses], 3.28)[1] is expected
