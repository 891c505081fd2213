"""The spike rule of guards against a slow reference; its windows, kept and resumed."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from small_optim import give_gradients
from test_guards import INF, NAN, model, traces

from optim import AdamW, Guard, Skip, SpikeRule


class Reference:
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
        return taken, math.isfinite(limit) and abs(value - limit) <= 1e-5 * abs(limit)


def watcher(rule):
    """A guard of one optimizer."""
    return Guard([AdamW([torch.nn.Parameter(torch.ones(1))], 0.1)], spike=rule)


def taken(guard, losses):
    """For each loss, with one gradient for all, whether the guard takes the step."""
    (param,) = guard.optimizers[0].param_groups[0]["params"]
    param.grad = torch.ones(1)
    return [guard.explain(guard.step(torch.tensor(loss))) is None for loss in losses]


def noise(count, centre=3.0, seed=0):
    """Losses that float32 holds exactly, so that float64 sees the same ones."""
    values = np.random.default_rng(seed).normal(centre, 0.02, count)
    return [float(np.float32(value)) for value in values]


EVENTS = st.sampled_from([*["usual"] * 12, "high", "far", "low", "shift", "nan", "inf", "-inf"])


def trace(events, seed):
    level, losses = 3.0, []
    for event, loss in zip(events, noise(len(events), 0.0, seed=seed), strict=True):
        level += 1.5 * (event == "shift")
        loss += level + {"high": 0.1, "far": 30.0, "low": -1.0}.get(event, 0.0)
        losses.append({"nan": NAN, "inf": INF, "-inf": -INF}.get(event, float(np.float32(loss))))
    return losses


@settings(max_examples=25)
@given(
    events=st.lists(EVENTS, min_size=20, max_size=70),
    seed=st.integers(0, 999),
    patience=st.integers(1, 5),
)
def test_every_verdict_is_that_of_the_slow_reference_though_each_step_resumes_from_a_file(
    events, seed, patience
):
    rule = SpikeRule(window=12, sigma=4.0, start=6, patience=patience)
    guard, reference = watcher(rule), Reference(rule)
    for loss in trace(events, seed):
        saved, guard = save(guard.state_dict()), watcher(rule)
        guard.load_state_dict(load(saved))
        expected, rounding_decides = reference.step(loss)
        if rounding_decides:
            break
        assert taken(guard, [loss]) == [expected]


def test_a_jump_at_a_known_step_costs_no_step_if_the_guard_is_told_and_then_it_judges_again():
    """Record 89 at a change of its batch and losses: the loss + 6 %."""
    told, untold = watcher(SpikeRule()), watcher(SpikeRule())
    for guard in (told, untold):
        assert all(taken(guard, noise(300, centre=4.0)))
    told.forget()
    jump = noise(40, centre=4.24, seed=1)
    assert taken(untold, jump).count(False) >= 10
    assert all(taken(told, jump))
    assert taken(told, [4.9, 4.24]) == [False, True]


@pytest.mark.parametrize("which", ["loss", "muon", "normuon", "adam"])
def test_an_outlier_is_skipped_and_told_though_all_other_values_are_usual(which):
    params, optimizers = model()
    guard = Guard(optimizers, spike=SpikeRule(start=8, window=16))
    for step in range(12):
        give_gradients(params.values(), step)
        assert guard.explain(guard.step(torch.tensor(3.0))) is None
    give_gradients(params.values(), 12)
    mine = [param for name, param in params.items() if name.startswith(which + ".")]
    for param in mine:
        param.grad *= 100
    before = traces(params, optimizers)
    value = 6.5
    if mine:
        value = torch.linalg.vector_norm(torch.cat([param.grad.flatten() for param in mine])).item()
    skip = guard.explain(guard.step(torch.tensor(3.0 if mine else value)))
    assert skip == Skip("spike", pytest.approx(value, rel=1e-5), None)
    assert traces(params, optimizers) == before


# ---- several optimizers, of which one steps less often


@pytest.mark.parametrize("every", [1, 2, 3])
def test_an_optimizer_that_steps_less_often_is_not_starved_by_a_lasting_rise_of_gradients(every):
    params, optimizers = model(("muon", "adam"))
    guard = Guard(optimizers, spike=SpikeRule(window=32, start=8, patience=5))
    skips = []
    for step in range(40 * every):
        give_gradients(params.values(), 0)
        for name, param in params.items():
            param.grad *= 10 if name.startswith("adam.") and step >= 20 * every else 1
        stepping = optimizers if step % every == every - 1 else optimizers[:1]
        if guard.explain(guard.step(torch.tensor(3.0), only=stepping)) is not None:
            skips.append(step)
    assert skips == [20 * every + every * (index + 1) - 1 for index in range(5)]
