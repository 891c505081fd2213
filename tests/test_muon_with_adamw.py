"""One optimizer for a whole model: it steps as its halves do, and fits the trainers that own it.

As one optimizer among others: test_torch_promises.py, test_optim_changes.py. What it refuses:
test_optim_refusals.py. With ranks, fully_shard and torch's checkpoints: test_optim_ranks.py.
"""

import io
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from small_optim import bits, copies, give_gradients, members, parameters
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
    named_state,
    reset,
)  # fmt: skip

# Only what is far off is a spike: these runs are short and noisy.
RULE = SpikeRule(start=4, window=8, sigma=12.0, least_spread=0.1, least_log_spread=0.2)


def model(seed=0):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    return nn.Sequential(nn.Embedding(20, 8), layer, nn.Linear(8, 20))


def built(rate=0.01, seed=0, **options):
    net = model(seed)
    return net, MuonWithAdamW(net, rate, **options)


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


def spoil(net, name):
    net.get_parameter(name).grad.view(-1)[-1] = torch.nan


def kind_of_skip(optimizer):
    skip = optimizer.guard.explain(optimizer.verdict)
    return skip and skip.guard


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
    assert bits(net.state_dict()) == bits(other.state_dict())
    assert bits(net.state_dict()) != bits(model().state_dict())


def test_the_class_of_the_matrices_and_the_options_of_each_half_are_the_given_ones():
    _, optimizer = built(muon=Muon, betas=(0.5, 0.6), eps=1e-3, momentum=0.7, nesterov=False)
    muon, adam = optimizer.parts
    assert (type(muon), type(adam)) == (Muon, AdamW)
    assert muon.nesterov is False
    assert {group["momentum"] for group in muon.param_groups} == {0.7}
    assert {(group["betas"], group["eps"]) for group in adam.param_groups} == {((0.5, 0.6), 1e-3)}


@pytest.mark.parametrize("decayed", [False, True])
def test_what_nanogpt_does_not_decay_does_not_decay_here_either_but_by_a_row(decayed):
    net = model()
    rows = [Row("*.norm1.weight", "adamw")] if decayed else []
    optimizer = MuonWithAdamW(net, 0.01, rows=rows, weight_decay=0.5)
    before = {name: bits(param) for name, param in net.named_parameters()}
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    moved = {name for name, param in net.named_parameters() if bits(param) != before[name]}
    matrices = {name for name, param in net.named_parameters() if param.ndim > 1}
    assert moved == matrices | ({"1.norm1.weight"} if decayed else set())


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
        named = [f"gradient of {name} is" in str(each.message) for each in said]
        assert named == ([True] if step == 0 else [])
        assert optimizer.guard.explain(optimizer.verdict)[::2] == ("nonfinite", name)
    before = copies(net.parameters())
    train(net, optimizer, [2])
    assert kind_of_skip(optimizer) is None
    assert not any(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))


def by_attribute(optimizer, loss):
    optimizer.latest_loss = loss
    optimizer.step()


@pytest.mark.parametrize(("give", "judged"), [
    (lambda optimizer, loss: optimizer.step(loss=loss), "spike"),
    (by_attribute, "spike"),
    (lambda optimizer, loss: optimizer.step(lambda: loss), "spike"),
    (lambda optimizer, loss: optimizer.step(lambda: np.float32(loss)), "spike"),
    (lambda optimizer, loss: optimizer.step(lambda: round(loss.item())), "spike"),
    (lambda optimizer, loss: optimizer.step(lambda: None), None),
], ids=["argument", "attribute", "closure", "closure numpy", "closure int", "nothing"],
)  # fmt: skip
def test_a_loss_for_the_spike_rule_is_given_by_argument_attribute_or_closure(give, judged):
    net, optimizer = built(spike=RULE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(7):
            give(optimizer, backward(net, step) * (1e3 if step == 6 else 1.0))
    assert kind_of_skip(optimizer) == judged
    named = ["the loss or a norm spiked" in str(each.message) for each in said]
    assert named == ([True] if judged else [])


def test_a_loss_that_was_given_once_is_not_judged_again():
    net, optimizer = built(spike=RULE)
    for step in range(6):
        backward(net, step)
        optimizer.latest_loss = 3.0 if step < 3 else None
        optimizer.step()
    losses, *norms = optimizer.guard.state_dict()["window"]
    assert losses.isfinite().sum() == 3
    assert [norm.isfinite().sum() for norm in norms] == [6, 6]


def test_before_the_first_step_and_after_a_reset_the_verdict_is_that_of_a_taken_step():
    net, optimizer = built()
    fresh = optimizer.verdict
    assert kind_of_skip(optimizer) is None
    assert optimizer.guard.held(fresh) is None
    assert optimizer.guard.gradient_norms(fresh) == [0, 0]
    train(net, optimizer, [0])
    assert optimizer.verdict.shape == fresh.shape
    assert all(norm > 0 for norm in optimizer.guard.gradient_norms(optimizer.verdict))
    reset(optimizer)
    assert torch.equal(optimizer.verdict, fresh)


# ---- trainers that own the step


@pytest.mark.parametrize("bad", [None, "1.linear1.weight", "0.weight"])
def test_a_gradient_scaler_takes_the_whole_step_or_none_of_it(bad):
    (net, optimizer), (plain, other) = built(clip=1.0), built(clip=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(net, 0)).backward()
    if bad is None:
        backward(plain, 0)
        other.step()
    else:
        spoil(net, bad)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (1024.0 if bad is None else 512.0)
    near = {} if bad is None else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), **near)


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


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_model_that_is_wrapped_is_sorted_as_the_model_itself(wrap):
    kinds = [
        [(group["use_muon"], group["name"], len(group["params"])) for group in each.param_groups]
        for each in (MuonWithAdamW(wrap(model()), 0.1), built()[1])
    ]
    assert kinds[0] == kinds[1]


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


@pytest.mark.parametrize(("layers", "kinds"), [
    ([nn.Linear(4, 4), nn.Linear(4, 2)], [NorMuon, AdamW]),
    ([nn.LayerNorm(4)], [AdamW]),
])  # fmt: skip
def test_a_half_without_parameters_is_left_out_until_it_gets_some(layers, kinds):
    optimizer = MuonWithAdamW(nn.Sequential(*layers), 0.1)
    assert [type(half) for half in optimizer.parts] == kinds
    late = parameters((4, 4))
    before = bits(late)
    optimizer.add_param_group({"params": late, "use_muon": True})
    give_gradients(members(optimizer), 0)
    optimizer.step()
    assert [type(half) for half in optimizer.parts] == [NorMuon, AdamW]
    assert bits(late) != before


@pytest.mark.parametrize(("build", "message"), [
    (lambda: MuonWithAdamW(model().parameters(), 0.1), "needs use_muon; set it to .* the model"),
    (lambda: MuonWithAdamW(model().requires_grad_(False), 0.1), "Sequential has no .* unfreeze"),
    (lambda: MuonWithAdamW(model(), 0.1, clip=0.0), "clip must be a norm above 0, got 0.0; None"),
    (lambda: MuonWithAdamW([{"params": [torch.ones(9)], "use_muon": True}], 0.1), "to AdamW"),
    (lambda: MuonWithAdamW([], 0.1, rows=[Row("*", "muon")]), "rows sort .* give the model"),
])  # fmt: skip
def test_bad_settings_are_refused_with_value_rule_and_fix(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# ---- state


@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(in_a_file):
    options = {"spike": RULE, "clip": 0.5, "weight_decay": 0.1}
    (net, optimizer), (other, resumed) = built(**options), built(0.5, seed=1, **options)
    train(net, optimizer, range(6))
    other.load_state_dict(net.state_dict())
    saved = optimizer.state_dict()
    if in_a_file:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file)
    train(net, optimizer, [6])  # the snapshot must not follow
    resumed.load_state_dict(saved)
    train(other, resumed, [6])
    for steps in ([], [7, 8]):
        train(net, optimizer, steps)
        train(other, resumed, steps)
        assert bits(net.state_dict()) == bits(other.state_dict())
        assert bits(optimizer.state_dict()) == bits(resumed.state_dict())


def test_a_state_without_windows_as_torchs_checkpoints_keep_it_empties_them():
    net, optimizer = built(spike=RULE)
    train(net, optimizer, range(6))
    saved = optimizer.state_dict()
    del saved["guard"]
    optimizer.load_state_dict(saved)
    assert optimizer.guard.state_dict()["window"].isnan().all()
    assert bits(optimizer.state_dict()["state"]) == bits(saved["state"])


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


def test_a_state_of_muon_with_aux_adam_loads():
    """As KellerJordan/Muon saves it: both kinds of groups, and plain numbers of steps."""
    vectors, matrices = parameters((9,), (3,)), parameters((4, 8), (8, 4))
    random = parameters((9,), (4, 8), (8, 4), seed=5)
    state = {key: {"momentum_buffer": random[key - 1].detach()} for key in (2, 3)}
    state |= {0: {"exp_avg": random[0].detach(), "exp_avg_sq": random[0].square(), "step": 7}}
    adam = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0, "use_muon": False}
    muon = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "use_muon": True}
    groups = [{"params": vectors, "use_muon": False}, {"params": matrices, "use_muon": True}]
    optimizer = MuonWithAdamW(groups, 0.1, muon=Muon, scale="spectral", method="newton_schulz")
    give_gradients(vectors + matrices, 0)
    optimizer.step()  # what had state before has none of it after
    saved_groups = [adam | {"params": [0, 1]}, muon | {"params": [2, 3]}]
    optimizer.load_state_dict({"state": state, "param_groups": saved_groups})
    found = dict(named_state(optimizer))
    moments = [found[name] for name in ("0.exp_avg", "2.momentum", "3.momentum")]
    assert bits(moments) == bits(random)
    assert (found["0.step"], found["1.step"]) == (7, 0)
    assert not found["1.exp_avg_sq"].any()
    adam, muon = optimizer.param_groups
    assert (muon["momentum"], muon["lr"], adam["eps"]) == (0.9, 0.03, 1e-10)
