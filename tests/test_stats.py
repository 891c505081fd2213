"""The statistics against figures of public records, scipy's own tests, whole numbers and simulation."""

import math
from decimal import Decimal
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import nct, ttest_1samp, ttest_ind, ttest_rel
from scipy.stats import t as student

from claims import stats

TARGET = 3.28


def numbers(start: str, endings: str) -> list[float]:
    return [float(start + ending) for ending in endings.split()]


# ---- Final losses and times (ms) of public runs of the NanoGPT speedrun

LOSSES = {name: numbers("3.2", endings) for name, endings in {
    "BosAlign": "784 782 794 788 784 803 792 819 792 801 778 773 791 817 779 804 805 789 770 783",
    "Smear": "796 803 787 801 786 798 765 787 781 792",
    "VectSigmoid": "767 802 772 778 783 805 770 774 781 769 767 797",
    "FixMuonLR": "804 754 753 800 780 813 778 771 780 783",
    "CautiousWDAdam": "746 769 760 776 771 722 740 779 765 870 773 754",
    "MimeticValueOutput": "777 775 778 772 780 805 791",
    "FlattenForward": "789 783 795 786",
    "FlattenForward baseline": "799 764 773 793",
    "FlattenForward prior": "798 770 807 803 803 767 796 801",
    "FP8MLPUpProj": "802 800 789 763 792 793 781 785",
    "FP8DownProjection": "775 779 793 791 769 781 772 775 783 775 806 816 773",
    "FP8DownProjection baseline": "821 802 758 769 775 768 780 778 817 767 796 775 766",
    "FuseCE": "800 795 785 794 795",
    "WindowWarmup": "745 733 810 833 759 735 773",
    "Transpose": "781 784 795 789 793 793",
    "Transpose baseline": "799 789 783 787 798 791",
    "Unified": "794 799 767 781 803 780 767 767",
    "Unified baseline": "784 790 777 788 785 785 791 766",
    "SparseBigram": "789 772 804 770 792",
    "SparseBigram baseline": "766 768 777",
    "ImprovedLMHead": "776 792 785",
    "ImprovedLMHead baseline": "769 784 769",
    "NorMuon": "783 786 775 769 786 785 780 788 793 795 770 786 825 794 789 759 797 764 791 764",
    "MFUTweaks":
        "756 753 758 794 772 824 758 789 785 759 792 808 740 797 764 793 752 792 771 810 765 760 767 777 828 777 790 "
        "773 798 819 812 756 813 796 776 807 798 810 831 781",
    "ValueEmbed":
        "751 796 804 751 898 749 781 756 758 723 793 763 851 744 750 791 750 783 778 838 725 779 759 736 766 810 764 "
        "718 842 745 803 790 710 735 845 794 791 771",
    "UNetValueEmbeds":
        "773 766 774 768 778 771 779 773 791 810 796 789 809 792 764 759 775 797 776 787 757 786 793 767 822 731 815 "
        "786 805 822 773 773 782 779 791 764 799 782 814 791 755 820 797 835 764 777 835 783 762 783 775 759 810 839 "
        "808 772 798 745 766 789 778 814 785 788 788 776 782 807 773 762 786 760 782 788 747",
}.items()}  # fmt: skip
VE_TUNED = {f"H{i}": numbers("3.", endings) for i, endings in enumerate([
    "2796 2800 2786 2782 2801", "2774 2790 2777 2764 2813", "2771 2764 2797 2787 2769", "2781 2778 2807 2818 2798",
    "2764 2777 2771 2772 2796", "2790 2779 2782 2775 2764", "2979 2976 3029 2954 2992",
])}  # fmt: skip
TIMES = {name: numbers("", endings) for name, endings in {
    "FixMuonLR": "139441 139780 139889 139464 139761 139411 139555 139570 139804 139847",
    "FixMuonLR prior": "143018 142641 142789 143072 143241",
    "XSA": "85188 85258 85313 85251 85299 85198 85206 85260 85213 85123 85081",
    "XSA prior": "85993 85850 85967 85919 85890 85905 85788",
    "FP8DownProjection": "79532 79682 80231 79536 79641 79593 79653 79658 79814 79629 79539 79656 79740",
    "FP8DownProjection prior": "80694 80720 80659 80818 80747 80795 80763 80678 80610 80693 80710 80840 80745",
    "FP8MLPUpProj": "83855 83750 83871 83900 83852 83901 83937 83763",
    "FP8MLPUpProj prior": "84604 84677 84776 84513 84576 84684 84631 84618",
    "muon-beta2": "86774 86759 86815 86755",
    "muon-beta2 prior": "86694 86743 86702 86821 86697 86796 86701 86766",
    "PairedHead": "92710 92235 92554 92872 92475 92557 92834 92770",
    "PairedHead at 1480": "92611 92412 92575 92550 92568 92555 92550 92572",
    "PairedHead at 1490": "92928 92871 93043 93240",
}.items()}  # fmt: skip
STEPS = {row: [Decimal(f"3.2{ending}") for ending in endings.split()] for row, endings in {  # by row of its table
    6: "7924 7941 7694 8106 7843 7995 7806 8161 7765 7945 7936 8124 7804 7859 7754 7728 7802 7877 8010 7784",
    8: "7840 7714 7855 7941 7780 7778 7839 7732 7830 7668",
    10: "7854 7942 8064 8056 7858 7976 7827 7754 7825 7800 7909 7893 7924 7835 7882 7758 7866 8032 7840 7855",
    11: "7807 8000 7906 7791 7626 7906 7989 7967 7912 7832 7851 7733 7867 7846 7752 7880",
    12: "7931 7699 7821 8056 7824 7939 7919 7948 7899 7932 7920 7905 7945 7845 7842 7922 7754 7938 8157 7898",
    13: "7767 7795 7944 7844 7853 7828 7890 8029 7654 7866",
    21: "7717 7792 7503 8025",
    22: "7744 7832 7819 7553",
    25: "7865 7937 7805 7673 7793",
    36: "7722 7941 7699 8091 7822 8034 7873 7932 7720 7825",
}.items()}  # fmt: skip


def rounded(expected: float | str) -> object:
    """A figure as it is published: equal up to half a unit of its last digit (or a little more, if that was cut)."""
    text = str(expected)
    exponent = Decimal(text).as_tuple().exponent
    return pytest.approx(float(text), abs=0.51 * 10.0 ** int(exponent), rel=0)


# ---- One sample


@pytest.mark.parametrize(("name", "n", "mean", "sd", "t", "p", "upper99"), [
    ("BosAlign", 20, "3.279140", "0.001340", "-2.8705", "0.00489597", "3.27990"),
    ("Smear", 10, "3.278960", "0.001122", "-2.9319", "0.00835215", "3.27996"),
    ("FixMuonLR", 10, "3.278160", "0.001983", "-2.9345", "0.00831728", "3.27993"),
    ("MimeticValueOutput", 7, "3.278257", "0.001156", "-3.9891", "0.00360393", "3.27963"),
    ("FlattenForward", 4, "3.278825", "0.000512", "-4.5867", "0.00973181", "3.27999"),
    ("FP8DownProjection", 13, "3.278369", "0.001416", "-4.1535", "0.00066906", "3.27942"),
    ("FP8MLPUpProj", 8, "3.278812", "0.001233", "-2.7232", "0.0148143", "3.28012"),
    ("FuseCE", 5, "3.279380", "0.000545", "-2.5439", "0.0318586", "3.28029"),
])  # fmt: skip
def test_the_public_records_get_their_figures(name, n, mean, sd, t, p, upper99):
    found = stats.one_sample(LOSSES[name], TARGET)
    assert (found.n, found.sd, found.t) == (n, rounded(sd), rounded(t))
    assert (found.mean, found.p, found.upper99) == (rounded(mean), rounded(p), rounded(upper99))


def test_the_running_p_of_fix_muon_lr_falls_below_the_level_at_its_last_run_only():
    running = [stats.one_sample(LOSSES["FixMuonLR"][:n], TARGET).p for n in range(2, 11)]
    assert running == list(map(rounded, [".278", ".110", ".105", ".058", ".096", ".055", ".027", ".015", ".0083"]))


def test_two_losses_one_rounding_step_apart_pass_by_luck():
    assert stats.one_sample([2.9165, 2.9166], 2.92).p == rounded("0.0046")
    assert stats.one_sample(LOSSES["FlattenForward prior"], TARGET).p == rounded(".126")


@pytest.mark.parametrize(("name", "e"), [
    ("FixMuonLR", "23.5"), ("FP8DownProjection", "225.6"), ("FP8MLPUpProj", "14.6"), ("VectSigmoid", "434.6"),
])  # fmt: skip
def test_the_public_records_get_their_e_value(name, e):
    assert stats.e_value(LOSSES[name], TARGET) == rounded(e)


def test_running_e_values_agree_with_the_published_ones():
    running = [stats.e_value(LOSSES["FixMuonLR"][:n], TARGET) for n in range(2, 11)]
    assert running == list(map(rounded, ["1.41", "3.10", "2.77", "4.65", "2.04", "3.63", "7.68", "13.8", "23.5"]))
    down = LOSSES["FP8DownProjection"]
    assert next(n for n in range(2, 14) if stats.e_value(down[:n], TARGET) >= 100) == 8


@given(st.lists(st.floats(3, 4), min_size=2, max_size=40), st.floats(-2, 2))
@settings(max_examples=100, deadline=None)
def test_an_e_value_is_the_ratio_of_two_densities_of_t(losses, delta):
    n, t = len(losses), stats.one_sample(losses, 3.5).t
    if not abs(t) < 100:  # beyond, the densities of scipy lose their digits
        return
    ratio = nct.pdf(t, n - 1, math.sqrt(n) * delta) / student.pdf(t, n - 1)
    assert stats.e_value(losses, 3.5, delta) == pytest.approx(ratio, rel=1e-5)


def test_e_values_of_many_runs_do_not_overflow():
    losses = np.random.default_rng(0).normal(3.2, 0.1, 2000)
    assert stats.e_value(losses, 3.28) > 1e100
    assert stats.e_value(losses, 3.12) < 1e-100
    assert stats.e_value(losses, 100.0) == math.inf


# ---- Two samples


@pytest.mark.parametrize(("new", "old", "mean", "t", "df", "p", "level", "interval"), [
    ("XSA", "XSA prior", "-0.6844", "-20.359", "13.09", "1.36e-11", 0.95, ("-0.757", "-0.612")),
    ("FP8DownProjection", "FP8DownProjection prior", "-1.0437", "-19.394", "15.00", "2.46e-12", 0.99,
     ("-1.202", "-0.885")),
    ("FP8MLPUpProj", "FP8MLPUpProj prior", "-0.78125", "-21.451", "13.58", "3.61e-12", 0.95, ("-0.860", "-0.703")),
    ("FixMuonLR", "FixMuonLR prior", "-3.300", "-27.304", "6.46", "3.22e-8", 0.95, ("-3.591", "-3.009")),
    ("muon-beta2", "muon-beta2 prior", "0.036", "1.604", "9.72", "0.930", 0.95, ("-0.014", "0.086")),
    ("PairedHead", "PairedHead at 1490", "-0.395", "-3.559", "7.86", "0.00382", 0.95, ("-0.651", "-0.138")),
    ("PairedHead", "PairedHead at 1480", "0.077", "0.983", "8.06", "0.823", 0.95, ("-0.103", "0.257")),
])  # fmt: skip
def test_the_public_times_get_their_welch_test(new, old, mean, t, df, p, level, interval):
    found = stats.welch([ms / 1000 for ms in TIMES[new]], [ms / 1000 for ms in TIMES[old]], level)
    assert (found.n_a, found.n_b) == (len(TIMES[new]), len(TIMES[old]))
    assert (found.mean, found.t, found.df, found.p_less) == (rounded(mean), rounded(t), rounded(df), rounded(p))
    assert (found.low, found.high) == tuple(map(rounded, interval))


def test_spreads_that_differ_are_not_pooled():
    assert stats.welch(TIMES["PairedHead at 1480"], TIMES["PairedHead at 1490"]).p_two_sided == rounded("0.0080")


@pytest.mark.parametrize(("name", "mean", "margin", "p"), [
    ("FP8DownProjection", ".00012", 0.001, ".107"), ("FP8DownProjection", ".00012", 0.002, ".0060"),
    ("Transpose", "-.00020", 0.001, ".021"), ("Unified", "-.00010", 0.001, ".081"),
    ("FlattenForward", ".00060", 0.001, ".335"), ("FlattenForward", ".00060", 0.002, ".094"),
    ("SparseBigram", ".00151", 0.001, ".744"), ("SparseBigram", ".00151", 0.002, ".261"),
    ("ImprovedLMHead", ".00103", 0.001, ".518"),
])  # fmt: skip
def test_systems_changes_get_their_equivalence_test(name, mean, margin, p):
    new, old = LOSSES[name], LOSSES[f"{name} baseline"]
    assert stats.welch(new, old).mean == rounded(mean)
    assert stats.equivalence(new, old, margin) == stats.equivalence(old, new, margin) == rounded(p)


def test_a_loss_that_is_no_worse_is_shown_more_easily_than_an_equal_one():
    assert stats.equivalence(LOSSES["Transpose"], LOSSES["Transpose baseline"], 0.001)[0] == rounded(".0029")


def test_holm_leaves_no_arm_of_ve_tuned_significant():
    alone = {arm: stats.one_sample(losses, TARGET).p for arm, losses in VE_TUNED.items()}
    against = {arm: stats.welch(VE_TUNED[arm], VE_TUNED["H0"]).p_less for arm in list(VE_TUNED)[1:]}
    for found, expected in (
        (alone, ".07045 .06199 .01121 .33034 .00569 .00339 .99994"),
        (stats.holm(alone), ".24796 .24796 .05606 .66069 .03416 .02372 .99994"),
        (against, ".17618 .03707 .64818 .01820 .01561 .99998"),
        (stats.holm(against), ".52855 .14828 1.00000 .09364 .09364 1.00000"),
    ):
        assert [found[arm] for arm in sorted(found)] == list(map(rounded, expected.split()))
    sweep = {1555: 0.0705, 1550: 0.0045, 1547: 0.0021, 1545: 0.0302, 1540: 0.0988, 1535: 0.9121}
    assert stats.holm(sweep)[1547] == pytest.approx(0.0126)


@given(st.dictionaries(st.integers(), st.floats(0, 1), max_size=6))
def test_holm_is_the_closed_test_of_bonferroni(p_values):
    families = [set(family) for size in range(1, 7) for family in combinations(p_values, size)]
    closed = {key: max(min(1, len(family) * min(p_values[other] for other in family))
                       for family in families if key in family) for key in p_values}
    assert stats.holm(p_values) == pytest.approx(closed)


samples = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20).filter(lambda values: np.std(values) > 1e-6)


@given(samples, samples, st.floats(0.5, 0.999))
@settings(max_examples=100, deadline=None)
def test_the_t_tests_are_those_of_scipy(a, b, level):
    def agrees(found, test):
        low, high = test.confidence_interval(level)
        expected = pytest.approx((test.statistic, test.df, test.pvalue, low, high), rel=1e-6, abs=1e-9)
        assert (found.t, found.df, found.p_two_sided, found.low, found.high) == expected
        assert found.p_less == pytest.approx(student.cdf(test.statistic, test.df), rel=1e-6, abs=1e-12)

    agrees(stats.welch(a, b, level), ttest_ind(a, b, equal_var=False))
    c = a[: len(b)] + b[len(a) :]
    if np.std(np.subtract(c, b)) > 1e-6:
        agrees(stats.paired(c, b, level), ttest_rel(c, b))
    one = ttest_1samp(a, 1.0, alternative="less")
    expected = (one.statistic, one.pvalue, one.confidence_interval(0.99).high)
    assert stats.one_sample(a, 1.0)[3:] == pytest.approx(expected, rel=1e-6)


# ---- Samples that determine little, settings that make no sense


@given(st.lists(st.floats(), max_size=5), st.lists(st.floats(), max_size=5), st.floats(allow_infinity=False))
@settings(max_examples=200, deadline=None)
def test_no_sample_raises_and_every_p_is_one_or_nan(a, b, target):
    alone, apart = stats.one_sample(a, target), stats.welch(a, b)
    shape, beside = stats.outlier(a), stats.paired(a, a)
    ps = [alone.p, apart.p_less, apart.p_two_sided, beside.p_less, stats.equivalence(a, b, 1.0),
          stats.skewness(a)[1], stats.sigma_p(alone.sd, alone.n), shape.p if shape else 0.5]
    assert all(math.isnan(p) or 0 <= p <= 1 for p in ps)
    e = stats.e_value(a, target)
    assert math.isnan(e) or e >= 0


@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 3, [3.0, math.nan], [3.0, math.inf], [math.inf, -math.inf]])
def test_values_without_a_spread_have_no_test(values):
    assert math.isnan(stats.one_sample(values, 3.28).p)
    assert math.isnan(stats.e_value(values, 3.28))
    assert math.isnan(stats.welch(values, values).p_less)
    assert math.isnan(stats.paired(values, values).low)
    assert math.isnan(stats.skewness(values)[0])
    assert stats.outlier(values) is None
    assert stats.runs_to_pass(stats.one_sample(values, 3.28), 3.28) is None


def test_one_arm_without_a_spread_is_compared_by_the_spread_of_the_other():
    found = stats.welch([1.0, 2.0, 3.0], [5.0, 5.0])
    assert (found.mean, found.df, found.t) == pytest.approx((-3.0, 2.0, -3.0 * math.sqrt(3)))


@pytest.mark.parametrize(("call", "rule"), [
    (lambda: stats.power(10, 0.0, 0.001), "sd is 0.0: it must lie between 0 and inf"),
    (lambda: stats.power(10, 0.001, math.nan), "margin is nan"),
    (lambda: stats.runs_needed(0.001, -0.001), "margin is -0.001"),
    (lambda: stats.runs_needed(0.001, 0.001, 1.0), "power is 1.0: it must lie between 0.01 and 1"),
    (lambda: stats.runs_needed(1.0, 1e-6), "more than 1,000,000,000 runs"),
    (lambda: stats.detectable_margin(10, 0.001, alpha=0.7), "alpha is 0.7: it must lie between 0.0001 and 0.5"),
    (lambda: stats.passing_mean(10, math.inf, 3.28), "sd is inf"),
    (lambda: stats.equivalence([1, 2], [1, 2], 0), "margin is 0"),
    (lambda: stats.welch([1, 2], [1, 2], 95), "level is 95: it must lie between 0 and 1"),
    (lambda: stats.paired([1, 2], [1]), "2 and 1 values: pairs need as many of each"),
    (lambda: stats.e_value([1, 2], 3, math.nan), "delta is nan"),
    (lambda: stats.look_level([]), "looks are (): they must be rising numbers of runs, the first at least 2"),
    (lambda: stats.look_level([1, 5]), "looks are (1, 5)"),
    (lambda: stats.true_level([5, 5]), "looks are (5, 5)"),
    (lambda: stats.true_level([5, 10], 1e-6), "alpha is 1e-06"),
])  # fmt: skip
def test_a_setting_that_makes_no_sense_is_named(call, rule):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call()
    assert rule in str(error.value)


# ---- Shape


def test_the_outliers_of_the_public_runs_are_found():
    found = stats.outlier(LOSSES["CautiousWDAdam"])
    assert (found.index, found.value, found.g, found.p, found.mad_z) == (
        9, 3.2870, rounded("2.811"), rounded(".00155"), rounded("6.6"))
    rest = [loss for loss in LOSSES["CautiousWDAdam"] if loss != found.value]
    assert stats.one_sample(LOSSES["CautiousWDAdam"], TARGET).p == rounded(".00598")
    assert stats.one_sample(rest, TARGET).p == rounded("8.8e-6")
    slow = stats.outlier(TIMES["FP8DownProjection"])
    assert (slow.value, slow.p) == (80231, rounded(".00041"))
    alone = stats.outlier([1.0, 1.0, 1.0, 2.0])
    assert (alone.index, alone.p, alone.mad_z) == (3, 0.0, math.inf)


@pytest.mark.parametrize(("name", "skew", "p"), [
    ("UNetValueEmbeds", ".388", ".24"), ("MFUTweaks", ".131", ".35"), ("ValueEmbed", ".865", ".066"),
    ("NorMuon", ".605", ".12"),
])  # fmt: skip
def test_the_skew_of_the_public_runs_is_as_published(name, skew, p):
    assert stats.skewness(LOSSES[name]) == (rounded(skew), rounded(p))


# ---- Planning


@pytest.mark.parametrize(("sd", "row"), [
    (0.0010, "43/55 13/16 8/9 6/7 5/6"), (0.0013, "71/91 20/25 11/13 8/9 6/7"),
    (0.0016, "106/137 29/37 15/18 10/12 8/9"), (0.0020, "164/211 43/55 21/26 13/16 10/12"),
])  # fmt: skip
def test_the_runs_needed_are_those_of_the_published_table(sd, row):
    for margin, cell in zip((0.0005, 0.0010, 0.0015, 0.0020, 0.0025), row.split(), strict=True):
        assert f"{stats.runs_needed(sd, margin)}/{stats.runs_needed(sd, margin, 0.9)}" == cell


def test_the_smallest_margin_and_the_largest_passing_mean_are_as_published():
    for n, margin in {5: "0.00283", 8: "0.00182", 10: "0.00154", 13: "0.00129", 20: "0.00099", 40: "0.00067"}.items():
        assert stats.detectable_margin(n, 0.0013) == rounded(margin)
    for n, mean in {5: "3.27782", 8: "3.27862", 10: "3.27884", 20: "3.27926"}.items():
        assert stats.passing_mean(n, 0.0013, TARGET) == rounded(mean)


@given(st.integers(2, 200), st.floats(1e-4, 10), st.floats(0.3, 0.99), st.sampled_from([0.001, 0.01, 0.05]))
@settings(max_examples=50, deadline=None)
def test_the_detectable_margin_has_the_power_that_was_asked_for(n, sd, chance, alpha):
    margin = stats.detectable_margin(n, sd, chance, alpha)
    assert stats.power(n, sd, margin, alpha) == pytest.approx(chance, abs=1e-6)
    assert stats.runs_needed(sd, margin * 1.001, chance, alpha) <= n
    assert stats.runs_needed(sd, margin * 0.9, chance, alpha) > n


def test_fewer_than_two_runs_have_no_power_and_a_huge_effect_has_all_of_it():
    assert stats.power(2, 1e-9, 1e9, 1.1e-4) == pytest.approx(1)
    assert math.isnan(stats.power(1, 0.0013, 0.001))
    assert math.isnan(stats.detectable_margin(1, 0.0013))
    assert math.isnan(stats.passing_mean(0, 0.0013, 3.28))


@pytest.mark.parametrize(("name", "runs"), [
    ("FP8MLPUpProj", 10), ("FuseCE", 8), ("WindowWarmup", 12), ("BosAlign", 20), ("UNetValueEmbeds", 75),
])  # fmt: skip
def test_the_runs_that_would_pass_are_told(name, runs):
    found = stats.one_sample(LOSSES[name], TARGET)
    assert stats.runs_to_pass(found, TARGET) == runs
    assert found.mean < stats.passing_mean(runs, found.sd, TARGET)
    assert runs == found.n or found.mean >= stats.passing_mean(runs - 1, found.sd, TARGET)
    assert stats.runs_to_pass(found, found.mean - 0.001) is None


def test_the_runs_for_equivalence_have_that_power_in_simulation():
    assert [stats.equivalence_runs(0.0013, margin) for margin in (0.0010, 0.0015, 0.0020)] == [30, 14, 9]
    a, b = np.random.default_rng(1).normal(0, 0.0013, (2, 100_000, 30))
    less, more = (ttest_ind(a + shift, b, axis=1, equal_var=False).statistic for shift in (-0.001, 0.001))
    passed = (less < student.ppf(0.05, 58)) & (more > student.ppf(0.95, 58))
    assert 0.80 < passed.mean() < 0.813


# ---- Looking early


@pytest.mark.parametrize(("looks", "level"), [
    ([5, 10], 0.00522), ([5, 10, 15, 20], 0.00320), ([4, 8, 12, 16], 0.00304), ([8, 16, 24], 0.00394),
    (range(5, 41, 5), 0.00205), (range(3, 21), 0.00134), ([10], 0.01),
])  # fmt: skip
def test_planned_looks_have_the_published_level(looks, level):
    assert stats.look_level(looks) == pytest.approx(level, rel=0.05)


@pytest.mark.parametrize(("looks", "level"), [
    (range(3, 11), 0.0392), (range(3, 21), 0.0559), (range(3, 41), 0.0728), (range(5, 21, 5), 0.0298),
    (range(5, 41, 5), 0.0430), ([10, 20], 0.0178), ([10], 0.01),
])  # fmt: skip
def test_unplanned_looks_cost_what_is_published(looks, level):
    assert stats.true_level(looks) == pytest.approx(level, rel=0.05)


def test_testing_at_the_look_level_keeps_the_level_in_runs_drawn_one_by_one():
    level, passed = stats.look_level([4, 6], 0.05), np.zeros(100_000, bool)
    runs = np.random.default_rng(2).normal(3.28, 0.0013, (100_000, 6))
    for n in (4, 6):
        passed |= ttest_1samp(runs[:, :n], 3.28, axis=1, alternative="less").pvalue < level
    assert passed.mean() == pytest.approx(0.05, rel=0.04)


# ---- The steps track


def test_four_losses_of_3278_lie_on_the_bound_that_doubles_miss():
    target = Decimal("3.28")
    assert not (3.28 - 3.278) * 4**0.5 >= 0.004
    assert stats.steps_rule([Decimal("3.278")] * 4, target) == (0.004, True)
    assert stats.steps_rule([Decimal("3.276")], target) == (0.004, True)
    assert stats.steps_rule([Decimal("3.27800000000000000000000000001")] * 4, target)[1] is False
    assert stats.steps_rule([Decimal("3.2840"), Decimal("3.2841")], target)[1] is False


@pytest.mark.parametrize(("row", "mean", "statistic"), [
    (6, "3.278929", ".00479"), (8, "3.277977", ".00640"), (10, "3.278875", ".00503"), (12, "3.279047", ".00426"),
    (21, "3.2776", ".00481"), (25, "3.2781", ".00415"), (36, "3.2787", ".00424"),
])  # fmt: skip
def test_the_steps_table_gets_its_statistics(row, mean, statistic):
    assert stats.one_sample(list(map(float, STEPS[row])), TARGET).mean == rounded(mean)
    assert stats.steps_rule(STEPS[row], Decimal("3.28")) == (rounded(statistic), True)


@pytest.mark.parametrize(("new", "steps_new", "old", "steps_old", "statistic", "passes"), [
    (13, 3210, 11, 3225, ".00185", False), (13, 3210, 8, 3250, ".00292", False), (12, 3325, 6, 3375, ".00674", True),
])  # fmt: skip
def test_the_steps_table_gets_its_pairwise_statistics(new, steps_new, old, steps_old, statistic, passes):
    found = stats.steps_pairwise(STEPS[new], steps_new, STEPS[old], steps_old)
    assert found == (rounded(statistic), passes)


@given(st.lists(st.integers(327_000, 328_999), min_size=1, max_size=30))
def test_the_steps_rule_is_decided_as_in_whole_numbers(losses):
    margin = sum(328_000 - loss for loss in losses)  # n times the mean one, in units of 1e-5
    expected = margin > 0 and margin**2 >= 400**2 * len(losses)
    assert stats.steps_rule([Decimal(loss) / 100_000 for loss in losses], Decimal("3.28"))[1] is expected


def test_losses_that_are_missing_or_not_finite_fail_the_steps_rule():
    for losses in ([], [Decimal("3.2"), Decimal("nan")], [Decimal("-inf")]):
        statistic, passes = stats.steps_rule(losses, Decimal("3.28"))
        assert (math.isnan(statistic), passes) == (True, False)
        assert not stats.steps_pairwise(losses, 1, STEPS[8], 1)[1]
        assert not stats.steps_pairwise(STEPS[8], 1, losses, 1)[1]


def test_the_wide_arm_that_the_steps_rule_hides_is_seen():
    for row, sd, p, wide in ((21, ".00215", ".056", True), (22, ".00129", ".013", False)):
        found = stats.one_sample(list(map(float, STEPS[row])), TARGET)
        assert (found.sd, found.p, stats.sigma_p(found.sd, found.n) < 0.05) == (rounded(sd), rounded(p), wide)
    assert stats.sigma_p(stats.SIGMA_STEPS, 4) == pytest.approx(0.3916, abs=1e-4)
