"""A trainer that owns the whole optimizer: closures, hooks, copies, groups and states."""

import copy
import pickle

import pytest
import torch
from test_guards import bits
from test_muon_with_adamw import (
    RULE,
    backward,
    built,
    model,
    names,
    same_weights,
    train,
)
from test_optim import assert_same, members
from test_optim_changes import copies, exchange, swap_in_place
from torch import nn

from optim import (
    AdamW,
    Muon,
    MuonWithAdamW,
    NorMuon,
    load_named_state,
    named_state,
)


def test_the_class_of_the_matrices_and_the_options_of_each_half_are_the_given_ones():
    _, optimizer = built(muon=Muon, betas=(0.5, 0.6), eps=1e-3, momentum=0.7, nesterov=False)
    muon, adam = optimizer.parts
    assert (type(muon), type(adam)) == (Muon, AdamW)
    assert muon.nesterov is False
    assert {group["momentum"] for group in muon.param_groups} == {0.7}
    assert {(group["betas"], group["eps"]) for group in adam.param_groups} == {((0.5, 0.6), 1e-3)}


def test_a_loss_that_was_given_once_is_not_judged_again():
    net, optimizer = built(spike=RULE)
    for step in range(6):
        backward(net, step)
        optimizer.latest_loss = 3.0 if step < 3 else None
        optimizer.step()
    losses, *norms = optimizer.guard.state_dict()["window"]
    assert losses.isfinite().sum() == 3
    assert [norm.isfinite().sum() for norm in norms] == [6, 6]


def test_a_rate_that_is_set_before_the_first_step_is_that_of_the_first_step():
    (net, optimizer), (other, expected) = built(0.5), built(0.01)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    train(net, optimizer, [0])
    train(other, expected, [0])
    assert same_weights(net, other)


def test_hooks_run_once_a_step_and_see_its_gradients_and_new_weights():
    net, optimizer = built()
    before, seen = copies(net.parameters()), []

    def double(*_):
        for param in net.parameters():
            param.grad *= 2

    optimizer.register_step_pre_hook(double)
    optimizer.register_step_post_hook(lambda *_: seen.append(copies(net.parameters())))
    backward(net, 0)
    norms = torch.cat([param.grad.flatten() for param in net.parameters()]).norm()
    optimizer.step()
    (after,) = seen
    found = torch.tensor(optimizer.guard.gradient_norms(optimizer.verdict)).norm()
    torch.testing.assert_close(found, 2 * norms)
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_compiled_step_is_the_eager_one():
    (net, optimizer), (other, eager) = built(), built()
    step = torch.compile(optimizer.step)
    for number in range(2):
        backward(net, number)
        step()
        train(other, eager, [number])
    assert same_weights(net, other)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_model_that_is_wrapped_is_sorted_as_the_model_itself(wrap):
    kinds = [
        [(group["use_muon"], group["name"], len(group["params"])) for group in each.param_groups]
        for each in (MuonWithAdamW(wrap(model()), 0.1), built()[1])
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_with_the_way_to_copy_its_state(duplicate):
    with pytest.raises(TypeError, match=r"^MuonWithAdamW cannot be copied; .* state_dict\(\)"):
        duplicate(built()[1])


@pytest.mark.parametrize(("layers", "kinds"), [
    ([nn.Linear(4, 4), nn.Linear(4, 2)], [NorMuon, AdamW]),
    ([nn.LayerNorm(4)], [AdamW]),
])  # fmt: skip
def test_a_half_without_parameters_is_left_out_until_it_gets_some(layers, kinds):
    net = nn.Sequential(*layers)
    optimizer = MuonWithAdamW(net, 0.1)
    assert [type(half) for half in optimizer.parts] == kinds
    late = [nn.Parameter(torch.ones(4, 4))]
    optimizer.add_param_group({"params": late, "use_muon": True})
    for param in members(optimizer):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert [type(half) for half in optimizer.parts] == [NorMuon, AdamW]
    assert not torch.equal(late[0], torch.ones(4, 4))


@pytest.mark.parametrize("change", [exchange, swap_in_place])
def test_parameters_that_accelerate_exchanges_before_the_first_step_are_followed(change):
    (net, optimizer), (other, expected) = built(), built()
    optimizer.load_state_dict(optimizer.state_dict())  # as its prepare does
    grads = [param.grad for param in net.parameters() if backward(net, 0) is not None]
    for param in net.parameters():
        param.grad = None
    by_name = dict(zip(names(optimizer), members(optimizer), strict=True))
    order = [name for name, _ in net.named_parameters()]
    change(optimizer)
    now = dict(zip(names(optimizer), members(optimizer), strict=True))
    assert now.keys() == by_name.keys()
    for name, grad in zip(order, grads, strict=True):
        now[name].grad = grad
    optimizer.step()
    train(other, expected, [0])
    for name, param in other.named_parameters():
        assert torch.equal(now[name], param)


def test_a_group_that_is_replaced_or_added_after_a_step_is_refused_with_the_fix_that_works():
    net, optimizer = built()
    train(net, optimizer, range(2))
    state = dict(named_state(optimizer))
    optimizer.param_groups[0] = {**optimizer.param_groups[0]}
    late = nn.Parameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [("late", late)], "use_muon": True})
    backward(net, 2)
    before = bits(net.state_dict())
    with pytest.raises(ValueError, match=r"optimizer.load_state_dict\(optimizer.state_dict\(\)\)"):
        optimizer.step()
    assert bits(net.state_dict()) == before
    optimizer.load_state_dict(optimizer.state_dict())
    found = dict(named_state(optimizer))
    assert_same({name: found[name] for name in state}, state)
    late.grad = torch.ones(4, 4)
    optimizer.step()
    assert not torch.equal(late, torch.ones(4, 4))


def with_an_unknown_parameter(saved):
    saved["state"][99] = saved["state"][0]


def that_ascends(saved):
    saved["param_groups"][-1]["maximize"] = True


def of_torch(saved):
    for group in saved["param_groups"]:
        del group["use_muon"]


def test_the_state_of_a_half_is_refused_by_the_whole_and_loads_in_the_half():
    net, optimizer = built()
    train(net, optimizer, range(2))
    _, fresh = built()
    for half, old in zip(fresh.parts, optimizer.parts, strict=True):
        with pytest.raises(ValueError, match="group alike"):
            fresh.load_state_dict(old.state_dict())
        half.load_state_dict(old.state_dict())
    assert bits(fresh.state_dict()["state"]) == bits(optimizer.state_dict()["state"])


def test_a_state_without_windows_as_torchs_checkpoints_keep_it_empties_them():
    net, optimizer = built(spike=RULE)
    train(net, optimizer, range(6))
    saved = optimizer.state_dict()
    del saved["guard"]
    optimizer.load_state_dict(saved)
    assert optimizer.guard.state_dict()["window"].isnan().all()
    assert bits(optimizer.state_dict()["state"]) == bits(saved["state"])


def test_an_unknown_name_is_refused_and_changes_nothing():
    net, optimizer = built()
    train(net, optimizer, range(2))
    before = dict(named_state(optimizer))
    wrong = {name: tensor + 1 for name, tensor in before.items()} | {"z.step": torch.ones(())}
    with pytest.raises(ValueError, match=r"has an unknown z\.step"):
        load_named_state(optimizer, wrong)
    assert_same(dict(named_state(optimizer)), before)
