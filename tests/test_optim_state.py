"""State of the optimizers on one process: by name, in safetensors, and in torch's form."""

from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_optim import assert_same, members, mixed, optimizers_for, parameters, train

from optim import NorMuon, load_named_state, named_state, reset


@pytest.mark.parametrize(
    ("shape", "split", "variance"),
    [
        ((64, 128), None, (1, 1, 128)),
        ((128, 64), None, (1, 128, 1)),
        ((64, 128), 4, (4, 1, 32)),
        ((3, 8, 4), 2, (6, 4, 1)),
        ((64, 128), (32, 32, 64), (3, 1, 64)),
        ((6, 20), (4, 2), (2, 1, 20)),
        ((3, 8, 4), (2, 6), (24, 1)),
    ],
)
def test_the_variance_has_one_number_for_each_row_or_column(shape, split, variance):
    optimizer = NorMuon([("w", torch.nn.Parameter(torch.ones(shape)))], 0.1, split=split)
    shapes = {name: tuple(tensor.shape) for name, tensor in optimizer.named_state()}
    assert shapes == {"w.momentum": shape, "w.variance": variance}


@pytest.mark.parametrize(
    ("index", "kept"), [*product(range(3), ["state_dict"]), *product(range(6), ["safetensors"])]
)
def test_a_state_is_a_snapshot_that_continues_as_if_never_interrupted(index, kept, tmp_path):
    optimizer, other = (optimizers_for(mixed())[index] for _ in range(2))
    train(optimizer, range(2))
    for target, source in zip(members(other), members(optimizer), strict=True):
        target.data.copy_(source)
    snapshot = optimizer.state_dict()
    save_file(dict(named_state(optimizer)), tmp_path / "state.safetensors")
    optimizer.param_groups[0]["lr"] = 0.123
    train(optimizer, [2])  # the snapshot must not follow
    if kept == "state_dict":
        other.load_state_dict(snapshot)
    else:
        load_named_state(other, load_file(tmp_path / "state.safetensors"))
    assert other.param_groups[0]["lr"] != 0.123
    other.param_groups[0]["lr"] = 0.123
    train(other, [2])
    for steps in ([], (7, 8)):
        train(optimizer, steps)
        train(other, steps)
        assert_same(members(optimizer), members(other))
        assert_same(dict(named_state(optimizer)), dict(named_state(other)))


@pytest.mark.parametrize("index", range(6))
def test_reset_returns_to_the_first_step_in_place(index):
    optimizer = optimizers_for(mixed())[index]
    buckets = getattr(optimizer, "buckets", [])
    fresh = dict(named_state(optimizer))
    places = [tensor.data_ptr() for bucket in buckets for tensor in bucket.state.values()]
    optimizer.param_groups[0]["initial_lr"] = 0.5
    train(optimizer, range(2))
    reset(optimizer)
    assert_same(dict(named_state(optimizer)), fresh)
    assert optimizer.param_groups[0]["lr"] == 0.5
    # A captured graph needs all state at its address.
    assert places == [tensor.data_ptr() for bucket in buckets for tensor in bucket.state.values()]


def named_layers(*names):
    return list(zip(names, parameters(*[(4, 8)] * len(names)), strict=True))


def test_named_state_goes_by_name_into_another_grouping():
    layers = named_layers("a", "b", "c")
    optimizer = NorMuon([{"params": layers[:2], "lr_mul": 3.0}, {"params": layers[2:]}], 0.1)
    train(optimizer, range(2))
    regrouped = NorMuon([{"params": layers[2:]}, {"params": [layers[1], layers[0]]}], 0.2)
    regrouped.load_named_state(dict(optimizer.named_state()))
    assert_same(dict(regrouped.named_state()), dict(optimizer.named_state()))
    with pytest.raises(ValueError, match=r"groups of \[2, 1\] parameters, not \[1, 2\]"):
        regrouped.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("b.variance"), r"lacks b.variance; build the optimizer as it was"),
        (lambda t: t.update({"z.momentum": t["a.momentum"]}), r"has an unknown z.momentum"),
        (
            lambda t: t.update({"a.variance": torch.zeros(2, 1, 8)}),
            r"has a.variance as \(2, 1, 8\), not \(1, 1, 8\)",
        ),
    ],
)
def test_a_named_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(change, message):
    optimizer = NorMuon(named_layers("a", "b"), 0.05)
    train(optimizer, [0])
    before = dict(optimizer.named_state())
    tensors = {name: tensor + 1 for name, tensor in before.items()}
    change(tensors)
    with pytest.raises(ValueError, match=message):
        optimizer.load_named_state(tensors)
    assert_same(dict(optimizer.named_state()), before)
