"""Checkpoints of the optimizers on one process, and bf16 weights that add up as float32 ones."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_optim import BETAS, assert_same_state, give_gradients, mixed, optimizers_for, parameters
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from optim import Adam, Muon, NorMuon

INDICES = pytest.mark.parametrize("index", [0, 1, 2])  # of optimizers_for
STATE_NAMES = [["momentum"], ["momentum", "variance"], ["step", "exp_avg", "exp_avg_sq"]]


def train(optimizer, params, steps):
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def members(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def trained(index, steps=2, dtype=torch.float32):
    """(optimizer, its parameters) after some steps."""
    params = mixed(dtype)
    optimizer = optimizers_for(params)[index]
    train(optimizer, members(optimizer), range(steps))
    return optimizer, members(optimizer)


def fresh_copy(index, params):
    """An optimizer without past over copies of the weights."""
    optimizer = optimizers_for(mixed(params[0].dtype))[index]
    with torch.no_grad():
        for target, source in zip(members(optimizer), params, strict=True):
            target.copy_(source)
    return optimizer


def assert_goes_on_alike(one, other):
    """Same state, and same bits after two more steps."""
    assert_same_state(one.state_dict(), other.state_dict())
    for optimizer in (one, other):
        train(optimizer, members(optimizer), (7, 8))
    assert all(torch.equal(a, b) for a, b in zip(members(one), members(other), strict=True))
    assert_same_state(one.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    ("shape", "options", "variance"),
    [
        ((64, 128), {"axis": "rows"}, (1, 64, 1)),
        ((64, 128), {"axis": "cols"}, (1, 1, 128)),
        ((64, 128), {}, (1, 1, 128)),
        ((128, 64), {}, (1, 128, 1)),
        ((64, 128), {"split": 4}, (4, 1, 32)),
        ((64, 128), {"split": 4, "axis": "rows"}, (4, 64, 1)),
        ((3, 8, 4), {"split": 2}, (6, 4, 1)),
    ],
)
def test_the_variance_has_one_number_for_each_row_or_column(shape, options, variance):
    optimizer = NorMuon([("w", torch.nn.Parameter(torch.ones(shape)))], 0.1, **options)
    assert {name: tuple(tensor.shape) for name, tensor in optimizer.named_state()} == {
        "w.momentum": shape,
        "w.variance": variance,
    }


@INDICES
def test_a_loaded_state_continues_as_if_never_interrupted(index):
    optimizer, params = trained(index)
    snapshot, other = optimizer.state_dict(), fresh_copy(index, params)
    kept = copy.deepcopy(snapshot["state"])
    train(optimizer, params, [2])
    assert_same_state(snapshot, {"state": kept})  # the snapshot must not follow
    other.load_state_dict(snapshot)
    train(other, members(other), [2])
    assert_goes_on_alike(optimizer, other)


@INDICES
def test_loading_keeps_the_tensors_of_the_state_where_they_are(index):
    optimizer, _ = trained(index)
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    optimizer.load_state_dict(trained(index, steps=3)[0].state_dict())
    found = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert all(a is b for a, b in zip(tensors, found, strict=True))


@INDICES
def test_a_state_survives_safetensors(index, tmp_path):
    optimizer, params = trained(index)
    named = dict(optimizer.named_state())
    assert list(named) == [
        f"{number}.{name}" for number in range(len(params)) for name in STATE_NAMES[index]
    ]
    assert all(type(tensor) is torch.Tensor for tensor in named.values())
    save_file(named, tmp_path / "state.safetensors")
    other = fresh_copy(index, params)
    other.load_named_state(load_file(tmp_path / "state.safetensors"))
    assert_goes_on_alike(optimizer, other)


def test_a_state_passes_through_the_named_form_of_torch_distributed_checkpoint():
    models = [
        torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 4, bias=False))
        for _ in "ab"
    ]
    models[1].load_state_dict(models[0].state_dict())
    one, other = (NorMuon(model.named_parameters(), 0.1) for model in models)
    train(one, members(one), range(2))
    models[1].load_state_dict(models[0].state_dict())
    named = get_optimizer_state_dict(models[0], one)
    assert list(named["state"]) == ["0.weight", "1.weight"]
    set_optimizer_state_dict(models[1], other, named)
    assert_goes_on_alike(one, other)


def named_layers(*names, seed=0):
    return list(zip(names, parameters(*[(4, 8)] * len(names), seed=seed), strict=True))


def test_named_state_goes_by_name_into_another_grouping_which_keeps_its_own_settings():
    layers = named_layers("a", "b", "c")
    optimizer = NorMuon([{"params": layers[:2], "lr_mul": 3.0}, {"params": layers[2:]}], 0.1)
    train(optimizer, [param for _, param in layers], range(2))
    values = dict(optimizer.named_state())

    regrouped = NorMuon(
        [{"params": layers[2:]}, {"params": [layers[1], layers[0]], "lr_mul": 5.0}], 0.2
    )
    regrouped.load_state_dict(optimizer.state_dict())
    found = dict(regrouped.named_state())
    assert (
        set(found) == set(values) == {f"{name}.{kind}" for name in "abc" for kind in STATE_NAMES[1]}
    )
    assert all(torch.equal(found[name], values[name]) for name in values)
    assert [(group["lr"], group["lr_mul"]) for group in regrouped.param_groups] == [
        (0.2, 1.0),
        (0.2, 5.0),
    ]

    alike = NorMuon([{"params": layers[:2]}, {"params": layers[2:]}], 0.2)
    alike.load_state_dict(optimizer.state_dict())
    assert [(group["lr"], group["lr_mul"]) for group in alike.param_groups] == [
        (0.1, 3.0),
        (0.1, 1.0),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("b.variance"),
            r"the state lacks b.variance; build the optimizer as it was",
        ),
        (lambda t: t.update({"z.momentum": t["a.momentum"]}), r"has an unknown z.momentum"),
        (
            lambda t: t.update({"a.variance": torch.zeros(2, 1, 8)}),
            r"has a.variance as \(2, 1, 8\), not \(1, 1, 8\)",
        ),
        (
            lambda t: [t.pop(name) for name in list(t)],
            r"lacks a.momentum; lacks a.variance; lacks b.momentum",
        ),
    ],
)
def test_a_named_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(change, message):
    optimizer = NorMuon(named_layers("a", "b"), 0.05)
    train(optimizer, members(optimizer), [0])
    before, tensors = (
        optimizer.state_dict(),
        {name: tensor + 1 for name, tensor in optimizer.named_state()},
    )
    change(tensors)
    with pytest.raises(ValueError, match=message):
        optimizer.load_named_state(tensors)
    assert_same_state(optimizer.state_dict(), before)


@INDICES
def test_a_deep_copy_goes_on_by_itself(index):
    optimizer, params = trained(index)
    other = copy.deepcopy(optimizer)
    before = [param.detach().clone() for param in params]
    assert not any(a is b for a, b in zip(params, members(other), strict=True))
    train(other, members(other), [2])
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    train(optimizer, params, [2])
    assert_goes_on_alike(optimizer, other)


# ---- bf16 weights with the rest of their float32 bits beside them


EXACT = [
    lambda params, **options: Adam(
        params,
        0.01,
        betas=BETAS,
        weight_decay=0.1,
        state_dtype=torch.float32,
        cautious=True,
        **options,
    ),
    # Without momentum the state of bf16 weights, kept in bf16, is exact: it is the last gradient.
    lambda params, **options: Muon(
        params,
        0.02,
        weight_decay=0.1,
        momentum=0.0,
        dtype=torch.float32,
        method="newton_schulz",
        **options,
    ),
]
