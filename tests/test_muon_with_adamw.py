"""One optimizer for a whole model: it steps as its halves do, and fits the trainers that own it.

With ranks, fully_shard and torch's checkpoints: tests/test_optim_ranks.py.
"""

import copy
import io
import warnings
from functools import partial

import pytest
import torch
from safetensors.torch import load, save
from test_guards import bits
from test_optim import assert_same, members, parameters
from test_optim_changes import copies
from torch import nn

from optim import (
    AdamW,
    Guard,
    Muon,
    MuonWithAdamW,
    NorMuon,
    Row,
    SpikeRule,
    copy_state,
    groups_for,
    load_named_state,
    named_state,
    reset,
)  # fmt: skip

# Only what is far off is a spike: these runs are short and noisy.
RULE = SpikeRule(start=4, window=8, sigma=12.0, least_spread=0.1, least_log_spread=0.2)


def model(seed=0):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    return nn.Sequential(nn.Embedding(20, 8), layer, nn.Linear(8, 20))


def loss_of(net, step):
    tokens = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(step))
    logits = net(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), ((tokens + 1) % 20).flatten())


def backward(net, step):
    net.zero_grad()
    loss = loss_of(net, step)
    loss.backward()
    return loss.detach()


def train(net, optimizer, steps):
    for step in steps:
        optimizer.step(loss=backward(net, step))
    return net


def built(rate=0.01, seed=0, **options):
    net = model(seed)
    return net, MuonWithAdamW(net, rate, **options)


def spoil(net, name):
    dict(net.named_parameters())[name].grad.view(-1)[-1] = torch.nan


def same_weights(net, other):
    return bits(net.state_dict()) == bits(other.state_dict())


@pytest.mark.filterwarnings("ignore:MuonWithAdamW skipped")
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_is_that_of_its_halves_behind_one_guard(clip):
    options = {"weight_decay": 0.1, "cautious": True}
    net, optimizer = built(0.02, adam_lr=0.003, clip=clip, spike=RULE, split=1, **options)
    other = model()
    groups = groups_for(other)
    halves = [
        NorMuon(groups["muon"], 0.02, scale="rms", split=1, **options),
        AdamW(groups["adamw"], 0.003, **options),
    ]
    guard = Guard(halves, clip=clip, spike=RULE)
    for step in range(6):
        loss = backward(net, step)
        backward(other, step)
        if step == 4:
            spoil(net, "2.weight")
            spoil(other, "2.weight")
        optimizer.step(loss=loss)
        guard.step(loss)
    assert same_weights(net, other)
    assert not same_weights(net, model())


def test_what_nanogpt_does_not_decay_does_not_decay_here_either():
    net, optimizer = built(weight_decay=0.5)
    gain = net[1].norm1.weight
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    moved = {name for name, param in net.named_parameters() if not torch.equal(param, before[name])}
    assert moved == {name for name, param in net.named_parameters() if param.ndim > 1}
    assert torch.equal(gain, torch.ones(8))
    rows = [Row("*.norm1.weight", "adamw", {"weight_decay": 0.5})]
    net = model()
    optimizer = MuonWithAdamW(net, 0.01, rows=rows)
    net[1].norm1.weight.grad = torch.zeros(8)
    optimizer.step()
    assert (net[1].norm1.weight < 1).all()


# ---- a bad step


@pytest.mark.parametrize("name", ["0.weight", "1.linear1.weight"])
def test_a_bad_gradient_of_either_half_stops_both_and_is_one_warning_that_names_it(name):
    net, optimizer = built()
    train(net, optimizer, range(2))
    for step in range(2):
        backward(net, step)
        spoil(net, name)
        before = bits([net.state_dict(), optimizer.state_dict()])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.step()
        assert bits([net.state_dict(), optimizer.state_dict()]) == before
        assert [f"gradient of {name} is" in str(each.message) for each in said] == [True] * (
            1 - step
        )
        assert optimizer.guard.explain(optimizer.verdict)[::2] == ("nonfinite", name)
    before = copy.deepcopy(net.state_dict())
    train(net, optimizer, [2])
    assert optimizer.guard.explain(optimizer.verdict) is None
    assert not any(torch.equal(before[name], param) for name, param in net.named_parameters())


@pytest.mark.filterwarnings("ignore:MuonWithAdamW skipped")
@pytest.mark.parametrize("given", ["argument", "attribute", "closure", "nothing"])
def test_a_loss_for_the_spike_rule_is_given_by_argument_attribute_or_closure(given):
    net, optimizer = built(spike=RULE)
    for step in range(7):
        factor = 1e3 if step == 6 else 1.0
        loss = backward(net, step)
        if given == "argument":
            optimizer.step(loss=loss * factor)
        elif given == "attribute":
            optimizer.latest_loss = loss * factor
            optimizer.step()
        elif given == "closure":
            returned = optimizer.step(lambda loss=loss, factor=factor: loss * factor)
            assert returned == loss * factor
        else:
            assert optimizer.step(lambda: None) is None
    skip = optimizer.guard.explain(optimizer.verdict)
    assert (skip and skip.guard) == (None if given == "nothing" else "spike")


def test_a_spike_of_the_gradient_is_seen_before_it_is_clipped():
    net, optimizer = built(spike=RULE, clip=1e-3)
    train(net, optimizer, range(6))
    before = bits(net.state_dict())
    backward(net, 6)
    for param in net.parameters():
        param.grad *= 100
    with pytest.warns(UserWarning, match="skipped a step: the loss or a norm spiked"):
        optimizer.step()
    assert bits(net.state_dict()) == before


# ---- trainers that own the step


def test_a_closure_is_called_with_gradients_on():
    net, optimizer = built()
    before = copies(net.parameters())

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert not any(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))


def test_a_gradient_scaler_takes_the_whole_step_or_none_of_it():
    for name in (None, "1.linear1.weight", "0.weight"):
        net, optimizer = built(clip=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(net, 0)).backward()
        if name is not None:
            spoil(net, name)
        before = copies(net.parameters())
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True)]
        assert set(same) == {name is not None}
        assert scaler.get_scale() == (1024.0 if name is None else 512.0)
        if name is None:
            plain, other = built(clip=1.0)
            backward(plain, 0)
            other.step()
            torch.testing.assert_close(net.state_dict(), plain.state_dict())


@pytest.mark.parametrize("kind", [
    partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4),
    partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9),
    partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=3),
])  # fmt: skip
def test_torchs_schedulers_set_the_rates_of_both_halves_as_those_of_torchs_optimizer(kind):
    net, optimizer = built()
    theirs = torch.optim.AdamW([{"params": [torch.ones(1)]} for _ in optimizer.param_groups], 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = kind(optimizer), kind(theirs)
        for step in range(6):
            train(net, optimizer, [step])
            theirs.step()
            for scheduler in schedulers:
                scheduler.step()
            found = [[group["lr"] for group in each.param_groups] for each in (optimizer, theirs)]
            assert found[0] == found[1]
    used = [half.param_groups[0]["lr"] for half in optimizer.parts]
    assert used == [found[0][0]] * 2


# ---- groups


def test_groups_that_say_use_muon_are_stepped_in_the_order_in_which_they_are_given():
    matrix, vector, other = parameters((4, 8), (8,), (8, 4))
    groups = [
        {"params": [vector], "use_muon": False, "lr": 0.3},
        {"params": [matrix], "use_muon": True},
        {"params": other, "use_muon": True, "lr_mul": 2.0},
    ]
    optimizer = MuonWithAdamW(groups, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.1, 0.1]
    assert [members(half) for half in optimizer.parts] == [[matrix, other], [vector]]
    names = {name.partition(".")[0] for name, _ in named_state(optimizer)}
    assert names == {"0", "1", "2"}  # places in the whole


def frozen():
    return model().requires_grad_(False)


@pytest.mark.parametrize(("build", "message"), [
    (lambda: MuonWithAdamW(model().parameters(), 0.1), "needs use_muon; set it to .* the model"),
    (lambda: MuonWithAdamW(frozen(), 0.1), "Sequential has no parameter that requires .* unfreeze"),
    (lambda: MuonWithAdamW(model(), 0.1, clip=0.0), "clip must be a norm above 0, got 0.0; None"),
    (lambda: MuonWithAdamW([{"params": [torch.ones(9)], "use_muon": True}], 0.1), "to AdamW"),
    (lambda: MuonWithAdamW([], 0.1, rows=[Row("*", "muon")]), "rows sort .* give the model"),
])  # fmt: skip
def test_bad_settings_are_refused_with_value_rule_and_fix(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def names(optimizer):
    return [name for group in optimizer.param_groups for name in group["param_names"]]


# ---- state


@pytest.mark.parametrize("kept", ["state_dict", "torch.save", "safetensors"])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(kept):
    options = {"spike": RULE, "clip": 0.5, "weight_decay": 0.1}
    net, optimizer = built(**options)
    train(net, optimizer, range(6))
    other, resumed = built(0.5, seed=1, **options)
    other.load_state_dict(net.state_dict())
    saved = optimizer.state_dict()
    if kept == "torch.save":
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file)
    train(net, optimizer, [6])  # the snapshot must not follow
    if kept == "safetensors":
        net, optimizer = built(**options)
        train(net, optimizer, range(6))
        load_named_state(resumed, load(save(dict(named_state(optimizer)))))
        for group in resumed.param_groups:
            group["lr"] = 0.01
        resumed.guard.load_state_dict(optimizer.guard.state_dict())
        train(net, optimizer, [6])
    else:
        resumed.load_state_dict(saved)
    train(other, resumed, [6])
    for steps in ([], [7, 8]):
        train(net, optimizer, steps)
        train(other, resumed, steps)
        assert same_weights(net, other)
        assert bits(optimizer.state_dict()) == bits(resumed.state_dict())


def without_variance(saved):
    del saved["state"][0]["variance"]


def with_another_moment(saved):
    last = max(saved["state"])
    saved["state"][last]["exp_avg"] = torch.ones(3)


def of_another_guard(saved):
    saved["guard"]["window"] = torch.ones(3, 5)


def of_other_kinds(saved):
    saved["param_groups"][0]["use_muon"] = False


@pytest.mark.parametrize(("change", "message"), [
    (without_variance, "lacks 1.self_attn.in_proj_weight.variance"),
    (with_another_moment, r"2.weight.exp_avg as \(3,\), not \(20, 8\)"),
    (of_another_guard, "build the guard alike"),
    (of_other_kinds, r"use_muon \[False, False.*, not \[True, False.*; group alike"),
])  # fmt: skip
def test_a_state_that_does_not_fit_in_either_half_is_refused_and_changes_nothing(change, message):
    net, optimizer = built(spike=RULE)
    train(net, optimizer, range(2))
    saved = optimizer.state_dict()
    train(net, optimizer, range(2))
    change(saved)
    before = bits(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert bits(optimizer.state_dict()) == before


def test_reset_and_copied_state_reach_both_halves():
    net, optimizer = built(spike=RULE)
    fresh = bits(optimizer.state_dict()["state"])
    train(net, optimizer, range(2))
    copy_state(optimizer, "0.weight", "2.weight")
    copy_state(optimizer, "1.linear1.weight", "1.linear1.weight")
    found = dict(named_state(optimizer))
    assert torch.equal(found["2.weight.exp_avg"], found["0.weight.exp_avg"])
    reset(optimizer)
    assert bits(optimizer.state_dict()["state"]) == fresh
    assert optimizer.guard.state_dict()["window"].isnan().all()


def of_muon_with_aux_adam():
    """A state as KellerJordan/Muon saves it: both kinds of groups, and plain numbers of steps."""
    random = dict(enumerate(parameters((9,), (4, 8), (8, 4), (3,), seed=5)))
    state = {key: {"momentum_buffer": random[place].detach()} for key, place in ((2, 1), (3, 2))}
    state |= {0: {"exp_avg": random[0].detach(), "exp_avg_sq": random[0].square(), "step": 7}}
    adam = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0, "use_muon": False}
    muon = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "use_muon": True}
    groups = [adam | {"params": [0, 1]}, muon | {"params": [2, 3]}]
    return {"state": state, "param_groups": groups}, random


def test_a_state_of_muon_with_aux_adam_loads():
    saved, random = of_muon_with_aux_adam()
    vectors, matrices = parameters((9,), (3,)), parameters((4, 8), (8, 4))
    groups = [{"params": vectors, "use_muon": False}, {"params": matrices, "use_muon": True}]
    optimizer = MuonWithAdamW(groups, 0.1, muon=Muon, scale="spectral", method="newton_schulz")
    for param in vectors + matrices:
        param.grad = torch.ones_like(param)
    optimizer.step()  # what had state before has none of it after
    optimizer.load_state_dict(saved)
    found = dict(named_state(optimizer))
    ours = [found[name] for name in ("2.momentum", "3.momentum", "0.exp_avg")]
    assert_same(ours, [random[1], random[2], random[0]])
    assert (found["0.step"], found["1.step"]) == (7, 0)
    assert not found["1.exp_avg_sq"].any()
    adam, muon = optimizer.param_groups
    assert (muon["momentum"], muon["lr"], adam["eps"]) == (0.9, 0.03, 1e-10)
