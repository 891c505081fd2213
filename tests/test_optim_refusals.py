"""What goes wrong between two steps is refused before anything is sent, written or loaded."""

import math
from functools import partial

import pytest
import torch
from small_optim import SHAPES, Whole, bits, copies, give_gradients, members, parameters, train
from torch import nn

from optim import AdamW, Guard, MuonWithAdamW, NorMuon, RowAdam, SpikeRule, reset

WATCHED = partial(Whole, spike=SpikeRule(start=4, window=8))


def stepped(kind, count=2):
    optimizer = kind(parameters(*SHAPES), 0.1)
    train(optimizer, range(count))
    return optimizer


def everything(optimizer):
    """Weights, state and windows, to the bit."""
    saved = optimizer.state_dict()
    return bits([members(optimizer), saved["state"], saved.get("guard")])


# ---- settings


@pytest.mark.parametrize(("kind", "setting", "value", "message"), [
    (WATCHED, "lr", math.nan, r"lr must be in \[0, inf\), got nan for parameter 2"),
    (WATCHED, "lr", torch.tensor(math.nan), r"got tensor\(nan\) for parameter 2"),
    (WATCHED, "betas", (1.5, 0.9), r"betas must be in \[0, 1\), got \(1.5, 0.9\) for"),
    (NorMuon, "lr", math.inf, r"lr must be in .*, got inf for parameter 0"),
    (RowAdam, "lr", "0.1", r"lr must be in .*, got '0.1' for"),
    (AdamW, "lr", -1, r"lr must be in .*, got -1 for"),
    (AdamW, "lr", None, r"lr must be in .*, got None for .*; give a number"),
    (AdamW, "betas", (0.9,), r"got \(0.9,\) .*; give two numbers"),
    (AdamW, "betas", 0.9, r"got 0.9 .*; give two numbers"),
])  # fmt: skip
def test_a_setting_that_left_its_range_stops_the_step_whole_until_it_is_put_back(
    kind, setting, value, message
):
    optimizer = stepped(kind)
    before, group = everything(optimizer), optimizer.param_groups[-1]
    good, group[setting] = group[setting], value
    with pytest.raises(ValueError, match=message):
        train(optimizer, [2])
    assert everything(optimizer) == before
    group[setting] = good
    train(optimizer, [2])
    assert everything(optimizer) != before


# ---- groups of the whole optimizer


def add_and_step(optimizer, group):
    optimizer.param_groups.append(group)  # as a trainer may that does not know add_param_group
    optimizer.step()


@pytest.mark.parametrize("add", [MuonWithAdamW.add_param_group, add_and_step])
def test_a_first_group_of_matrices_after_a_step_is_refused_and_the_windows_stay(add):
    net = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    optimizer = MuonWithAdamW(net, 0.1, spike=SpikeRule())
    train(optimizer, [0])
    before, count = everything(optimizer), len(optimizer.param_groups)
    (late,) = parameters((4, 4))
    group = {"params": [late], "param_names": ["late"], "use_muon": True}
    with pytest.raises(ValueError, match="has stepped without groups of use_muon=True; add one"):
        add(optimizer, group)
    del optimizer.param_groups[count:]
    assert everything(optimizer) == before
    train(optimizer, [1])
    reset(optimizer)
    optimizer.add_param_group(group)
    before = copies([late])
    train(optimizer, [2])
    assert not torch.equal(late, before[0])


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("change", "message"), [
    (lambda group: group.update(use_muon=False), "has use_muon=True any longer; put its groups"),
    (lambda group: group["params"].clear(), "has use_muon=True any longer; put its groups"),
    (lambda group: group.update(use_muon=None), "needs use_muon; set it to True for"),
])  # fmt: skip
def test_groups_that_leave_a_half_empty_are_refused_until_they_are_put_back(change, message, steps):
    optimizer = stepped(Whole, steps)
    before, muon = everything(optimizer), optimizer.param_groups[0]
    kept = {**muon, "params": [*muon["params"]]}
    change(muon)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    muon.update(kept)
    assert everything(optimizer) == before
    train(optimizer, [steps])
    assert everything(optimizer) != before


# ---- losses


def test_a_loss_of_two_elements_is_refused_before_the_step():
    optimizer = stepped(WATCHED)
    before, losses = everything(optimizer), torch.ones(2)
    give_gradients(members(optimizer), 2)
    guard = Guard(optimizer.parts, spike=SpikeRule())
    for step in (lambda: optimizer.step(loss=losses), lambda: guard.step(losses)):
        with pytest.raises(ValueError, match=r"one number, got the shape \(2,\); give its mean"):
            step()
    assert everything(optimizer) == before


# ---- states


def without_variance(saved):
    del saved["state"][0]["variance"]


def with_another_moment(saved):
    saved["state"][2]["exp_avg"] = torch.ones(3)


def with_another_window(saved):
    saved["guard"]["window"] = torch.ones(3, 5)


def of_no_spike_rule(saved):
    saved["guard"] = stepped(Whole).state_dict()["guard"]


@pytest.mark.parametrize(("change", "message"), [
    (without_variance, "lacks 0.variance"),
    (with_another_moment, r"2.exp_avg as \(3,\), not \(8, 4\)"),
    (with_another_window, "build the guard alike"),
    (of_no_spike_rule, r"or del state\['guard'\], and its windows start empty"),
    (lambda saved: saved["param_groups"][0].update(use_muon=False),
     r"use_muon \[False, False\], not \[True, False\]; group alike"),
    (lambda saved: saved["param_groups"][1].update(lr=-3),
     r"lr must be in \[0, inf\), got -3 of the state"),
    (lambda saved: saved["param_groups"][1].update(betas=(0.9,)),
     r"got \(0.9,\) of the state; give two numbers"),
    (lambda saved: saved.pop("state"), "has no 'state', only .* give what optimizer.state_dict"),
    (lambda saved: saved.pop("param_groups"), "has no 'param_groups'"),
])  # fmt: skip
def test_a_state_that_could_not_be_stepped_from_is_refused_and_changes_nothing(change, message):
    optimizer = stepped(WATCHED)
    saved = optimizer.state_dict()
    train(optimizer, range(2))
    change(saved)
    before = bits(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert bits(optimizer.state_dict()) == before


def test_the_state_of_a_half_is_refused_by_the_whole_and_loads_in_the_half():
    optimizer, fresh = stepped(Whole), stepped(Whole, 0)
    for half, old in zip(fresh.parts, optimizer.parts, strict=True):
        saved = old.state_dict()
        with pytest.raises(ValueError, match="group alike"):
            fresh.load_state_dict(saved)
        with pytest.raises(ValueError, match="has no 'state'"):
            half.load_state_dict({"param_groups": saved["param_groups"]})
        half.load_state_dict(saved)
    assert bits(fresh.state_dict()["state"]) == bits(optimizer.state_dict()["state"])
