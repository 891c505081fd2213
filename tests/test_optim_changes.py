"""Groups and parameters that change after an optimizer was built: before and after its first step.

accelerate exchanges the parameters for FSDP2; add_param_group and model.to change them too. With
ranks and fully_shard: tests/test_optim_ranks.py.
"""

import pytest
import torch
from small_optim import (
    KINDS,
    KINDS_AND_WHOLE,
    SHAPES,
    Whole,
    bits,
    copies,
    give_gradients,
    members,
    parameters,
    train,
)
from torch import nn

from optim import AdamW, Guard, named_state

# ---- changes of an optimizer of three matrices


def exchange(optimizer):
    """As accelerate does: placeholders while the model is sharded, then its new parameters."""
    for group in optimizer.param_groups:
        old = group["params"]
        group["params"] = [torch.empty(1) for _ in old]
        group["params"] = copies(old)


def swap_in_place(optimizer):
    for param in members(optimizer):
        param.grad = None
        torch.utils.swap_tensors(param, nn.Parameter(param.detach().float()))


def convert(optimizer):
    """What model.float() does."""
    for param in members(optimizer):
        param.grad = None
        param.data = param.data.float()


def add_a_group(optimizer):
    of_half = {"use_muon": True} if isinstance(optimizer, Whole) else {}
    optimizer.add_param_group({"params": parameters((4, 8), seed=9), "lr": 0.3, **of_half})


def replace_the_group(optimizer):
    optimizer.param_groups[0] = {**optimizer.param_groups[0]}


def reshape(optimizer):
    param = members(optimizer)[0]
    param.grad = None
    param.data = param.data.repeat(1, 2)


def remove_one(optimizer):
    optimizer.param_groups[0]["params"].pop(0)


def reorder(optimizer):
    optimizer.param_groups[0]["params"].reverse()


CHANGES = [exchange, swap_in_place, convert, add_a_group, replace_the_group]
MOVES = [reshape, remove_one, reorder]  # which take a parameter with state from its place


def assert_steps_as_one_built_now(optimizer):
    groups = [{**group, "params": copies(group["params"])} for group in optimizer.param_groups]
    other = type(optimizer)(groups, 0.1)
    for step in range(3):
        train(optimizer, [step])
        train(other, [step])
        assert bits(members(optimizer)) == bits(members(other))
        assert bits(dict(named_state(optimizer))) == bits(dict(named_state(other)))


@pytest.mark.parametrize("first", ["nothing", "a skipped step", "a reset", "loading no steps"])
@pytest.mark.parametrize("change", CHANGES + MOVES)
@KINDS
def test_before_a_step_an_optimizer_follows_all_that_changes(kind, change, first):
    optimizer = kind(parameters(*SHAPES), 0.1)
    if first == "a skipped step":
        give_gradients(members(optimizer), 0)
        members(optimizer)[0].grad[0, 0] = torch.nan
        Guard([optimizer]).step()
    elif first == "a reset":
        train(optimizer, range(2))
        optimizer.reset()
    elif first == "loading no steps":
        optimizer.load_state_dict(optimizer.state_dict())
    change(optimizer)
    assert_steps_as_one_built_now(optimizer)


@pytest.mark.parametrize("change", CHANGES)
def test_before_a_step_the_whole_optimizer_follows_too(change):
    optimizer = Whole(parameters(*SHAPES), 0.1)
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate's prepare does
    change(optimizer)
    assert_steps_as_one_built_now(optimizer)


@pytest.mark.parametrize("change", CHANGES)
@KINDS_AND_WHOLE
def test_after_a_step_a_change_is_refused_and_the_fix_in_the_message_keeps_the_state(kind, change):
    optimizer, untouched = (kind(parameters(*SHAPES), 0.1) for _ in range(2))
    train(optimizer, range(2))
    train(untouched, range(2))
    change(optimizer)
    weights = bits(members(optimizer))
    fix = r"^groups or .* of \w+ changed after a step; (optimizer\.load_\S+\(.*\)\)) takes its st"
    with pytest.raises(ValueError, match=fix) as refused:
        train(optimizer, [2])
    assert bits(members(optimizer)) == weights
    code = str(refused.value).partition("; ")[2].partition(" takes")[0]
    eval(code, {"optimizer": optimizer})
    for name, tensor in named_state(untouched):  # late parameters start at zero
        torch.testing.assert_close(dict(named_state(optimizer))[name].to(tensor.dtype), tensor)
    train(optimizer, [2])
    train(untouched, [2])
    for param, other in zip(members(optimizer), members(untouched), strict=False):
        torch.testing.assert_close(param.to(other.dtype), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("steps", [0, 2])
def test_weights_in_channels_last_are_refused_with_the_way_back(steps):
    layer = nn.Conv2d(3, 8, 3, bias=False)
    optimizer = AdamW(layer.parameters(), 0.1)
    train(optimizer, range(steps))
    layer.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="undo channels_last" if steps == 0 else "changed after a"):
        train(optimizer, [2])
    with pytest.raises(ValueError, match="undo channels_last"):
        optimizer.load_state_dict(AdamW([torch.zeros(8, 3, 3, 3)], 0.1).state_dict())
    layer.to(memory_format=torch.contiguous_format)
    train(optimizer, [2])
