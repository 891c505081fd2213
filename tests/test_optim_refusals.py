"""What goes wrong between two steps is refused before anything is sent, written or loaded."""

import math

import numpy as np
import pytest
import torch
from test_guards import bits
from test_muon_with_adamw import RULE, backward, built, train
from test_optim import give_gradients, parameters
from torch import nn

from optim import AdamW, Guard, MuonWithAdamW, NorMuon, RowAdam, SpikeRule, reset


def everything(net, optimizer):
    return bits([net.state_dict(), optimizer.state_dict()["state"]])


# ---- settings


@pytest.mark.parametrize(("setting", "value", "message"), [
    ("lr", math.nan, r"lr must be in \[0, inf\), got nan for parameter 0.weight"),
    ("lr", None, r"lr must be in .*, got None for .*; give a number"),
    ("lr", "0.1", r"lr must be in .*, got '0.1' for"),
    ("lr", -1, r"lr must be in .*, got -1 for"),
    ("lr", torch.tensor(math.nan), r"lr must be in .*, got tensor\(nan\) for"),
    ("betas", (1.5, 0.9), r"betas must be in \[0, 1\), got \(1.5, 0.9\) for"),
    ("betas", (0.9,), r"got \(0.9,\) .*; give two numbers"),
    ("betas", 0.9, r"got 0.9 .*; give two numbers"),
])  # fmt: skip
def test_a_setting_that_left_its_range_stops_the_step_of_both_halves(setting, value, message):
    net, optimizer = built(spike=RULE)
    train(net, optimizer, range(2))
    before, windows = everything(net, optimizer), bits(optimizer.guard.state_dict())
    bad = next(group for group in optimizer.param_groups if not group["use_muon"])
    good, bad[setting] = bad[setting], value
    loss = backward(net, 2)
    with pytest.raises(ValueError, match=message):
        optimizer.step(loss=loss)
    assert everything(net, optimizer) == before
    assert bits(optimizer.guard.state_dict()) == windows
    bad[setting] = good
    optimizer.step(loss=loss)
    assert everything(net, optimizer) != before


@pytest.mark.parametrize("kind", [NorMuon, AdamW, RowAdam])
def test_an_optimizer_of_its_own_refuses_a_bad_rate_too_and_one_that_is_gone(kind):
    (param,) = parameters((4, 8))
    optimizer = kind([("w", param)], 0.1)
    give_gradients([param], 0)
    before = param.detach().clone()
    optimizer.param_groups[0]["lr"] = math.inf
    with pytest.raises(ValueError, match="got inf for parameter w"):
        optimizer.step()
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match="got None for parameter w"):
        optimizer.step()
    assert torch.equal(param, before)


def test_rates_that_are_tensors_or_of_numpy_are_taken():
    weights = []
    for rate in (0.125, torch.tensor(0.125), np.float32(0.125)):
        (param,) = parameters((4, 8))
        optimizer = AdamW([param], 0.5)
        optimizer.param_groups[0]["lr"] = rate
        give_gradients([param], 0)
        optimizer.step()
        weights.append(param.detach())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


# ---- the verdict


def test_before_the_first_step_and_after_a_reset_the_verdict_is_that_of_a_taken_step():
    net, optimizer = built()
    fresh = optimizer.verdict
    assert optimizer.guard.explain(fresh) is None
    assert optimizer.guard.held(fresh) is None
    assert optimizer.guard.gradient_norms(fresh) == [0, 0]
    train(net, optimizer, [0])
    assert optimizer.verdict.shape == fresh.shape
    assert all(norm > 0 for norm in optimizer.guard.gradient_norms(optimizer.verdict))
    reset(optimizer)
    assert torch.equal(optimizer.verdict, fresh)


# ---- groups


def one_kind(**options):
    net = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    return net, MuonWithAdamW(net, 0.1, spike=RULE, **options)


def add_and_step(optimizer, group):
    optimizer.param_groups.append(group)  # as a trainer may that does not know add_param_group
    optimizer.step()


@pytest.mark.parametrize("add", [MuonWithAdamW.add_param_group, add_and_step])
def test_a_first_group_of_matrices_after_a_step_is_refused_and_the_windows_stay(add):
    net, optimizer = one_kind()
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step(loss=1.0)
    windows, count = bits(optimizer.guard.state_dict()), len(optimizer.param_groups)
    late = nn.Parameter(torch.ones(4, 4))
    group = {"params": [late], "param_names": ["late"], "use_muon": True}
    with pytest.raises(ValueError, match="has stepped without groups of use_muon=True; add one"):
        add(optimizer, group)
    assert bits(optimizer.guard.state_dict()) == windows
    del optimizer.param_groups[count:]
    optimizer.step(loss=1.0)
    reset(optimizer)
    optimizer.add_param_group(group)
    late.grad = torch.ones(4, 4)
    optimizer.step()
    assert not torch.equal(late, torch.ones(4, 4))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("change", "message"), [
    (lambda group: group.update(use_muon=False), "has use_muon=True any longer; put its groups"),
    (lambda group: group["params"].clear(), "has use_muon=True any longer; put its groups"),
    (lambda group: group.update(use_muon=None), "needs use_muon; set it to True for"),
])  # fmt: skip
def test_groups_that_leave_a_half_empty_are_refused_until_they_are_put_back(change, message, steps):
    net, optimizer = built()
    train(net, optimizer, range(steps))
    before = everything(net, optimizer)
    muon = [group for group in optimizer.param_groups if group["use_muon"]]
    kept = [{**group, "params": [*group["params"]]} for group in muon]
    for group in muon:
        change(group)
    backward(net, steps)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    for group, old in zip(muon, kept, strict=True):
        group.update(old)
    assert everything(net, optimizer) == before
    train(net, optimizer, [steps])
    assert everything(net, optimizer) != before


# ---- losses


@pytest.mark.filterwarnings("ignore:MuonWithAdamW skipped")
@pytest.mark.parametrize("convert", [np.float32, round])
def test_a_closure_may_return_any_number_for_the_spike_rule(convert):
    net, optimizer = built(spike=RULE)
    for step in range(6):
        factor = 1.0 if step < 5 else 1e4
        loss = backward(net, step).item() * factor
        optimizer.step(lambda loss=loss: convert(loss))
    assert optimizer.guard.explain(optimizer.verdict).guard == "spike"


def test_a_loss_of_two_elements_is_refused_before_the_step():
    net, optimizer = built(spike=RULE)
    loss = backward(net, 0)
    before = everything(net, optimizer)
    with pytest.raises(ValueError, match=r"one number, got the shape \(2,\); give its mean"):
        optimizer.step(loss=loss.repeat(2))
    with pytest.raises(ValueError, match=r"got the shape \(2,\)"):
        Guard(optimizer.parts, spike=RULE).step(loss.repeat(2))
    assert everything(net, optimizer) == before


# ---- what is loaded or given


def negative_rate(saved):
    saved["param_groups"][-1]["lr"] = -3


def single_beta(saved):
    saved["param_groups"][-1]["betas"] = (0.9,)


def of_no_spike_rule(saved):
    saved["guard"] = built()[1].state_dict()["guard"]


@pytest.mark.parametrize(("change", "message"), [
    (negative_rate, r"lr must be in \[0, inf\), got -3 of the state"),
    (single_beta, r"got \(0.9,\) of the state; give two numbers"),
    (of_no_spike_rule, r"or del state\['guard'\], and its windows start empty"),
    (lambda saved: saved.pop("state"), "has no 'state', only .* give what optimizer.state_dict"),
    (lambda saved: saved.pop("param_groups"), "has no 'param_groups'"),
])  # fmt: skip
def test_a_state_that_could_not_be_stepped_from_is_refused_and_changes_nothing(change, message):
    net, optimizer = built(spike=RULE)
    train(net, optimizer, range(2))
    saved = optimizer.state_dict()
    train(net, optimizer, [2])
    change(saved)
    before = bits(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert bits(optimizer.state_dict()) == before


def test_a_state_of_one_half_without_its_entries_is_refused():
    _, optimizer = built()
    for half in optimizer.parts:
        with pytest.raises(ValueError, match="has no 'state'"):
            half.load_state_dict({"param_groups": half.state_dict()["param_groups"]})


def test_a_state_of_no_spike_rule_loads_as_its_refusal_says():
    net, plain = built()
    train(net, plain, range(2))
    saved = plain.state_dict()
    del saved["guard"]
    _, optimizer = built(spike=SpikeRule())
    optimizer.load_state_dict(saved)
    assert bits(optimizer.state_dict()["state"]) == bits(saved["state"])


@pytest.mark.parametrize("clip", ["1", math.nan, [1.0]])
def test_a_clip_that_is_no_norm_is_refused(clip):
    with pytest.raises(ValueError, match=r"clip must be a norm above 0, got .*; None does not"):
        built(clip=clip)
