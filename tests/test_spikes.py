"""The spike rule of guards against a slow twin; its windows, kept and resumed."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from scipy.stats import median_abs_deviation
from test_guards import INF, NAN, bits, give_gradients, model, traces

from optim import Adam, Guard, Skip, SpikeRule
from optim.spikes import Spikes

FLAGS = torch.tensor([True]), torch.tensor([False])  # wanted, restart


class Twin:
    """A spike rule from its description, with a list that only grows, in float64."""

    def __init__(self, rule):
        self.rule, self.past, self.skips = rule, [], 0

    def limit(self):
        values = np.array(self.past[-self.rule.window :])
        if len(values) < self.rule.start:
            return INF
        middle = (len(values) - 1) // 2
        centre = np.sort(values)[middle]
        spread = 1.4826 * np.sort(abs(values - centre))[middle]
        return centre + self.rule.sigma * max(spread, self.rule.least_spread * abs(centre))

    def step(self, value):
        """Whether a step with this loss is taken, and whether rounding may decide otherwise."""
        limit = self.limit()
        anew = self.skips >= self.rule.patience and math.isfinite(value) and value > limit
        taken = math.isfinite(value) and (anew or value <= limit)
        self.past = [] if anew else self.past
        self.past += [value] if math.isfinite(value) and taken else []
        self.skips = 0 if taken else self.skips + 1
        return taken, abs(value - limit) <= 1e-5 * abs(limit)


def watcher(rule):
    """A guard that watches losses alone."""
    return Guard([Adam([torch.nn.Parameter(torch.ones(2))], 0.1, betas=(0.9, 0.95))], spike=rule)


def taken(guard, losses):
    """For each loss, whether the guard takes the step."""
    return [guard.explain(guard.step(torch.tensor(loss), only=())) is None for loss in losses]


def noise(count, centre=3.0, deviation=0.02, seed=0):
    """Losses that float32 holds exactly, so that a twin in float64 sees the same ones."""
    values = np.random.default_rng(seed).normal(centre, deviation, count)
    return [float(np.float32(value)) for value in values]


EVENTS = st.sampled_from([*["usual"] * 12, "high", "far", "low", "shift", "nan", "inf"])


def trace(events, seed):
    level, losses = 3.0, []
    for event, loss in zip(events, noise(len(events), 0.0, seed=seed), strict=True):
        level += 1.5 * (event == "shift")
        loss += level + {"high": 0.1, "far": 30.0, "low": -1.0}.get(event, 0.0)
        losses.append({"nan": NAN, "inf": INF}.get(event, float(np.float32(loss))))
    return losses


@settings(max_examples=50)
@given(
    events=st.lists(EVENTS, min_size=20, max_size=70),
    seed=st.integers(0, 999),
    patience=st.integers(1, 5),
)
def test_every_verdict_is_that_of_the_slow_twin(events, seed, patience):
    rule = SpikeRule(window=12, sigma=4.0, start=6, patience=patience)
    guard, twin = watcher(rule), Twin(rule)
    for loss in trace(events, seed):
        expected, rounding_decides = twin.step(loss)
        if rounding_decides:
            break
        assert taken(guard, [loss]) == [expected]


@given(
    st.lists(st.floats(0.5, 50, width=32), min_size=5, max_size=21).filter(
        lambda values: len(values) % 2
    )
)
def test_the_robust_limit_is_made_of_the_median_and_the_median_deviation(values):
    spikes = Spikes(
        SpikeRule(window=32, start=3, sigma=5.0, least_spread=0.0), 1, torch.device("cpu")
    )
    for value in values:
        spikes.enter(torch.tensor([value]), *FLAGS)
    expected = np.median(values) + 5.0 * median_abs_deviation(values, scale="normal")
    assert spikes.limits().item() == pytest.approx(expected, rel=2e-6)


def test_each_value_has_its_own_window():
    spikes = Spikes(SpikeRule(window=8, start=3), 3, torch.device("cpu"))
    for step in range(20):
        row = torch.tensor([1.0, 5.0 if step % 2 else -INF, -INF])
        spikes.enter(row, row.isfinite(), *FLAGS[1:])
    one, five, absent = spikes.limits().tolist()
    assert (one, five, absent) == (pytest.approx(1.06), pytest.approx(5.3, abs=1e-5), INF)


@pytest.mark.parametrize("level", [1.0, 1e3, 1e5])
def test_a_norm_may_rise_by_the_same_factor_at_every_level(level):
    guard = Guard([Adam([torch.nn.Parameter(torch.ones(1))], 0.1)], spike=SpikeRule())
    (param,) = guard.optimizers[0].param_groups[0]["params"]
    verdicts = []
    for norm in [level] * 40 + [1.3 * level, 1.4 * level]:
        param.grad = torch.tensor([norm])
        verdicts.append(guard.explain(guard.step()) is None)
    assert verdicts == [True] * 41 + [False]


def test_nothing_is_judged_before_enough_values_are_in_the_window():
    for rule in (SpikeRule(start=10, window=20),):
        assert all(taken(watcher(rule), [*noise(9), 1e9]))
        assert taken(watcher(rule), [*noise(10), 1e9])[-1] is False


def test_after_a_nan_or_infinite_loss_no_normal_step_is_skipped():
    for bad in (NAN, INF):
        for rule in (SpikeRule(),):
            verdicts = taken(watcher(rule), [*noise(100), bad, *noise(200, seed=1)])
            assert [index for index, good in enumerate(verdicts) if not good] == [100]


def test_a_loss_of_minus_infinity_is_skipped():
    assert taken(watcher(SpikeRule()), [-INF]) == [False]


def spikes_after_an_outlier(rule):
    """Verdicts on losses of 6.0 that come 10, 50 and 120 steps after one of 30."""
    losses = noise(300)
    for step, loss in {100: 30.0, 110: 6.0, 150: 6.0, 220: 6.0}.items():
        losses[step] = loss
    verdicts = taken(watcher(rule), losses)
    assert verdicts.count(False) == [verdicts[step] for step in (100, 110, 150, 220)].count(False)
    return [verdicts[step] for step in (100, 110, 150, 220)]


def test_one_outlier_does_not_hide_the_next_ones():
    assert spikes_after_an_outlier(SpikeRule()) == [False, False, False, False]


def test_a_lasting_change_of_level_is_accepted_after_patience_and_the_window_starts_anew():
    rule = SpikeRule(patience=5, start=20)
    verdicts = taken(watcher(rule), [*noise(50), *noise(24, centre=6.0), 9.0])
    assert [index for index, good in enumerate(verdicts) if not good] == [50, 51, 52, 53, 54]
    # Nineteen values of the new level are not enough to judge by, and twenty are.
    verdicts = taken(watcher(rule), [*noise(50), *noise(25, centre=6.0), 9.0])
    assert verdicts[-2:] == [True, False]


def test_a_verdict_names_the_value_that_is_an_outlier():
    guard = watcher(SpikeRule())
    taken(guard, noise(50))
    assert guard.explain(guard.step(torch.tensor(6.5))) == Skip("spike", 6.5, None)


@pytest.mark.parametrize("which", ["muon", "normuon", "adam"])
def test_a_gradient_norm_that_is_an_outlier_is_skipped_though_the_loss_is_not(which):
    params, optimizers = model()
    guard = Guard(optimizers, spike=SpikeRule(start=8, window=16))
    for step in range(12):
        give_gradients(params, step)
        assert guard.explain(guard.step(torch.tensor(3.0))) is None
    give_gradients(params, 12)
    mine = [param for name, param in params.items() if name.startswith(which + ".")]
    for param in mine:
        param.grad *= 100
    before = traces(params, optimizers)
    norm = torch.linalg.vector_norm(torch.cat([param.grad.flatten() for param in mine]))
    skip = guard.explain(guard.step(torch.tensor(3.0)))
    assert skip == Skip("spike", pytest.approx(norm.item(), rel=1e-5), None)
    assert traces(params, optimizers) == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"window": 3}, "window must be at least 4, got 3"),
        ({"sigma": 0.0}, "sigma must be positive, got 0.0"),
        ({"sigma": NAN}, "sigma must be positive, got nan"),
        ({"start": 2}, r"start must be between 3 and window \(128\), got 2"),
        ({"start": 17, "window": 16}, r"start must be between 3 and window \(16\), got 17"),
        ({"least_spread": -0.1}, "least_spread must be 0 or more, a share of the centre, got -0.1"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_refused_by_name(setting, message):
    with pytest.raises(ValueError, match=message):
        SpikeRule(**setting)


# ---- state


@pytest.mark.parametrize("interruption", [3, 35, 42, 100])
def test_a_guard_resumed_from_a_file_goes_on_as_if_never_interrupted(interruption):
    rule = SpikeRule(window=32, start=16, patience=4)
    losses = [
        *noise(40),
        9.0,
        *[6.0] * 3,
        NAN,
        *noise(60, seed=1),
        *[7.0] * 6,
        *noise(30, centre=7.0),
    ]
    straight, first = watcher(rule), watcher(rule)
    verdicts = taken(straight, losses)
    taken(first, losses[:interruption])
    resumed = watcher(rule)
    resumed.load_state_dict(load(save(first.state_dict())))
    assert resumed.report() == first.report()
    assert taken(resumed, losses[interruption:]) == verdicts[interruption:]
    assert bits(resumed.state_dict()) == bits(straight.state_dict())
    assert 5 < verdicts.count(False) < 15


@pytest.mark.parametrize(
    "other",
    [
        lambda: watcher(SpikeRule(window=64)),
        lambda: watcher(None),
        lambda: Guard(model()[1], spike=SpikeRule()),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(other):
    guard = watcher(SpikeRule())
    taken(guard, [*noise(40), 9.0])
    before = bits(guard.state_dict())
    with pytest.raises(ValueError, match="build the guard alike"):
        guard.load_state_dict(other().state_dict())
    incomplete = copy.copy(other().state_dict())
    incomplete.pop("steps")
    with pytest.raises(ValueError, match="build the guard alike"):
        guard.load_state_dict(incomplete)
    assert bits(guard.state_dict()) == before


# ---- several optimizers, of which one steps less often


@pytest.mark.parametrize("every", [1, 2, 3])
def test_an_optimizer_that_steps_less_often_is_not_starved_by_a_lasting_rise_of_its_gradients(
    every,
):
    params, optimizers = model(("muon", "adam"))
    guard = Guard(optimizers, spike=SpikeRule(window=32, start=8, patience=5))
    skipped = []
    for step in range(40 * every):
        give_gradients(params, 0)
        for name, param in params.items():
            param.grad *= 10 if name.startswith("adam.") and step >= 20 * every else 1
        stepping = optimizers if step % every == every - 1 else optimizers[:1]
        if guard.explain(guard.step(torch.tensor(3.0), only=stepping)) is not None:
            skipped.append(step)
    assert skipped == [20 * every + every * (index + 1) - 1 for index in range(5)]
