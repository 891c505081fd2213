"""An analysis after every pair: the level is kept, and a clear answer comes sooner."""

import math

import numpy as np
import pytest
from small_run import ROOT

from claims import stats
from claims.judge import ALPHA, EQUAL, RacePlan, Verdict, decide
from claims.logs import finished_runs

PLAN = RacePlan(pairs=20, margin=1.0)
RACES = 10_000
SLACK = 3 * math.sqrt(ALPHA / RACES)  # three standard errors of a share of about ALPHA
OUTCOMES = ["undecided", "better", "worse", "no difference"]


def follow(differences: np.ndarray, plan: RacePlan) -> tuple[np.ndarray, np.ndarray]:
    """Many races at once, [races, pairs]: the number of each one's outcome, and its pairs."""
    outcomes = np.zeros(len(differences), int)
    used = np.full(len(differences), plan.analyses[-1])
    for n in plan.analyses:
        mean = differences[:, :n].mean(1)
        error = differences[:, :n].std(1, ddof=1) / math.sqrt(n)
        wide, narrow = (width * error for width in plan.widths(n))
        shown = [mean + wide < 0, mean - wide > 0, abs(mean) + narrow < plan.margin]
        found = np.where(outcomes == 0, np.select(shown, [1, 2, 3], 0), 0)
        outcomes[found > 0], used[found > 0] = found[found > 0], n
    return outcomes, used


def race(differences: list[float], plan: RacePlan) -> Verdict:
    """The judge's verdict at the first analysis that decides."""
    verdicts = (decide(differences[:n], plan) for n in plan.analyses)
    return next(verdict for verdict in verdicts if verdict.final)


def shares(difference: float, plan: RacePlan = PLAN) -> tuple[float, float, float, float]:
    """Of races at sd 1: the shares better, worse and without difference, and the mean pairs."""
    drawn = np.random.default_rng(0).normal(difference, 1.0, (RACES, plan.analyses[-1]))
    outcomes, used = follow(drawn, plan)
    better, worse, same = ((outcomes == end).mean() for end in (1, 2, 3))
    return better, worse, same, used.mean()


def test_the_judge_decides_as_the_simulated_races_do():
    truth = np.repeat([-0.9, -0.5, 0.0, 0.9], 25)[:, None]
    drawn = np.random.default_rng(3).normal(truth, 1.0, (100, 20))
    for plan in (PLAN, RacePlan(20, 0.7, every=3)):
        outcomes, used = follow(drawn, plan)
        found = [race(list(differences), plan) for differences in drawn]
        assert [verdict.outcome for verdict in found] == [OUTCOMES[end] for end in outcomes]
        assert [verdict.pairs for verdict in found] == used.tolist()
        assert set(outcomes) == {0, 1, 2, 3}


@pytest.mark.parametrize("plan", [
    PLAN, RacePlan(20, 1.0, every=4), RacePlan(4, 1.0), RacePlan(20, 1e-9),
])  # fmt: skip
def test_of_races_without_a_difference_one_in_a_hundred_finds_one(plan):
    better, worse, _, _ = shares(0.0, plan)
    assert better + worse <= ALPHA + SLACK
    assert plan.margin == 1.0 or better + worse >= ALPHA - SLACK, "nor is any level wasted"


def test_on_the_losses_of_the_records_no_verdict_is_wrong_over_twice_as_often():
    """Each loss in standard deviations from the mean of its record; B's spread alone is worst."""
    losses = []
    for path in sorted(ROOT.glob("records/small/*/runs")):
        found = np.array([run.final_loss for run in finished_runs(path)])
        losses.extend((found - found.mean()) / found.std())
    rng = np.random.default_rng(0)
    a, b = rng.choice(losses, (2, RACES, 20))
    diverged = rng.random((2, RACES, 20)) < 0.05
    guess = 100.0  # its loss: hundreds of standard deviations above that of a sound run
    some_diverged = np.where(diverged[1], guess, b) - np.where(diverged[0], guess, a)
    for d in (b - a, b, 3 * b - a, some_diverged):
        margin = float(d.std())
        outcomes = [follow(d + shift, RacePlan(20, margin))[0] for shift in (0, margin, -margin)]
        assert (outcomes[0] == 1).mean() <= 2 * ALPHA / 2
        assert (outcomes[0] == 2).mean() <= 2 * ALPHA / 2
        for overlooked in outcomes[1:]:
            assert (overlooked == 3).mean() <= 1.5 * EQUAL


@pytest.mark.parametrize("difference", [1.0, -1.0, 1.01, -1.5])
def test_a_difference_of_the_margin_is_overlooked_in_one_race_of_twenty(difference):
    _, _, same, _ = shares(difference)
    assert same <= EQUAL + 3 * math.sqrt(EQUAL / RACES)


def test_a_verdict_is_that_of_the_t_test_at_the_level_of_an_analysis():
    differences = [-0.9, -1.4, -1.1, -1.2]
    test = stats.one_sample(differences, 0.0)
    level = stats.interim_level(tuple(range(4, 21)), ALPHA / 2)
    for shift in np.linspace(-1.5, 1.1, 27):
        moved = [value + shift for value in differences]
        p = stats.one_sample(moved, 0.0).p
        assert (decide(moved, PLAN).high < 0) is bool(p < level)
        assert (decide([-value for value in moved], PLAN).low > 0) is bool(p < level)
    assert decide(differences, PLAN).mean == pytest.approx(test.mean)


@pytest.mark.parametrize(("differences", "outcome", "final"), [
    ([0.0] * 4, "no difference", True),  # equal to the bit
    ([-0.1] * 4, "undecided", False),  # no spread, so nothing is known of it
    ([-0.1] * 20, "undecided", True),
    ([-3.0, -3.1, -2.9], "undecided", False),  # before the first analysis
    ([-3.0, math.inf], "undecided", True),  # a run diverged
    ([-3.0, -3.1, -2.9, -3.05], "better", True),
    ([3.0, 3.1, 2.9, 3.05], "worse", True),
])  # fmt: skip
def test_edge_cases_never_decide_more_than_they_know(differences, outcome, final):
    verdict = decide(differences, PLAN)
    assert (verdict.outcome, verdict.final) == (outcome, final)
