"""Looks after every pair: the level is kept, and a clear answer comes sooner."""

import math

import numpy as np
import pytest

from claims import stats
from claims.sequential import ALPHA, EQUAL, RACES, Plan, follow, judge, simulate

PLAN = Plan(pairs=20, margin=1.0)
SLACK = 3 * math.sqrt(ALPHA / RACES)  # three standard errors of a share of about ALPHA


def shares(difference: float, plan: Plan = PLAN) -> tuple[float, float, float, float]:
    """Of races at sd 1: the shares better, worse and without difference, and the mean pairs."""
    outcomes, used = simulate(plan, difference, sd=1.0)
    better, worse, same = ((outcomes == end).mean() for end in (1, 2, 3))
    return better, worse, same, used.mean()


@pytest.mark.parametrize("plan", [PLAN, Plan(20, 1.0, every=4), Plan(4, 1.0), Plan(20, 1e-9)])
def test_of_races_without_a_difference_one_in_a_hundred_finds_one(plan):
    better, worse, _, _ = shares(0.0, plan)
    assert better + worse <= ALPHA + SLACK
    assert plan.margin == 1.0 or better + worse >= ALPHA - SLACK, "nor is any level wasted"


@pytest.mark.parametrize("difference", [1.0, -1.0, 1.01, -1.5])
def test_a_difference_of_the_margin_is_overlooked_in_one_race_of_twenty(difference):
    _, _, same, _ = shares(difference)
    assert same <= EQUAL + 3 * math.sqrt(EQUAL / RACES)


def test_races_end_sooner_than_one_look_with_the_same_power_would():
    fixed = {}
    for difference, most in ((-1.0, 14.5), (-1.5, 10.5)):
        power, wrong, _, pairs = shares(difference)
        fixed[difference] = stats.runs_needed(1.0, -difference, power, ALPHA / 2)
        assert power > 0.75
        assert wrong < 0.001
        assert pairs < min(most, fixed[difference])
    _, _, same, pairs = shares(0.0)
    assert same > 0.9
    assert pairs < 12


def test_the_told_interval_holds_the_truth_at_every_stop():
    truth, missed = -0.8, 0
    drawn = np.random.default_rng(1).normal(truth, 1.0, (RACES, 20))
    _, used = follow(drawn, PLAN)
    for differences, n in zip(drawn, used, strict=True):
        half = PLAN.widths[n][0] * differences[:n].std(ddof=1) / math.sqrt(n)
        missed += abs(differences[:n].mean() - truth) > half
    assert missed / RACES <= ALPHA + SLACK
    verdict = judge(list(differences[:n]), PLAN)
    assert (verdict.high - verdict.low) / 2 == pytest.approx(half)
    assert verdict.final


def test_no_difference_is_told_with_an_interval_within_the_margin():
    drawn = np.random.default_rng(2).normal(0.0, 0.2, (20, 20))
    for differences in drawn:
        _, used = follow(differences[None], PLAN)
        verdict = judge(list(differences[: used[0]]), PLAN)
        assert verdict.outcome == "no difference"
        assert -PLAN.margin < verdict.low <= verdict.high < PLAN.margin
        assert verdict.confidence == 0.9


def test_a_verdict_is_that_of_the_t_test_at_the_level_of_a_look():
    differences = [-0.9, -1.4, -1.1, -1.2]
    test = stats.one_sample(differences, 0.0)
    level = stats.look_level(tuple(range(4, 21)), ALPHA / 2)
    for shift in np.linspace(-1.5, 1.1, 27):
        moved = [value + shift for value in differences]
        p = stats.one_sample(moved, 0.0).p
        assert (judge(moved, PLAN).high < 0) is bool(p < level)
    assert judge(differences, PLAN).mean == pytest.approx(test.mean)


@pytest.mark.parametrize(("differences", "outcome", "final"), [
    ([0.0] * 4, "no difference", True),  # equal to the bit
    ([-0.1] * 4, "undecided", False),  # no spread, so nothing is known of it
    ([-0.1] * 20, "undecided", True),
    ([-3.0, -3.1, -2.9], "undecided", False),  # before the first look
    ([-3.0, math.inf], "undecided", True),  # a run diverged
    ([-3.0, -3.1, -2.9, -3.05], "better", True),
    ([3.0, 3.1, 2.9, 3.05], "worse", True),
])  # fmt: skip
def test_edge_cases_never_decide_more_than_they_know(differences, outcome, final):
    verdict = judge(differences, PLAN)
    assert (verdict.outcome, verdict.final) == (outcome, final)


@pytest.mark.parametrize("plan", [(3, 1.0), (101, 1.0), (8, 0.0), (8, math.nan), (8, 1.0, 0)])
def test_a_plan_that_makes_no_sense_is_refused(plan):
    with pytest.raises(ValueError, match=r"it takes 4 to 100 pairs|margin is"):
        Plan(*plan)
