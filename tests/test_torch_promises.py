"""What users of torch's optimizers expect of ours, held to torch's own where there is one."""

import copy
import inspect
import pickle
import re
import warnings
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_optim import (
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

from optim import AdamW, Guard, Muon, NorMuon, RowAdam, load_named_state, named_state, reset


def state_of(optimizer):
    return bits(dict(named_state(optimizer)))


# ---- the step


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("kind", [Muon, AdamW, torch.optim.SGD, Whole])
def test_hooks_run_once_a_step_and_see_its_weights_and_a_scheduler_sees_the_step(kind, guarded):
    params, calls = parameters(*SHAPES), []
    optimizer = kind(params, 0.1)
    steps = Guard([optimizer]) if guarded else optimizer
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda *_: calls.append(bits(params)))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = bits(params)
    give_gradients(params, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps.step()
        scheduler.step()
    assert calls == [before, bits(params)]
    assert before != bits(params)


@KINDS_AND_WHOLE
def test_a_closure_is_called_with_gradients_and_its_loss_returned(kind):
    params = parameters(*SHAPES)
    before = copies(params)

    def closure():
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    assert kind(params, 0.1).step(closure) == sum(param.square().sum() for param in before)
    assert not any(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@KINDS_AND_WHOLE
def test_a_learning_rate_may_be_a_tensor_that_a_schedule_changes_in_place(kind):
    ones, others = parameters(*SHAPES), parameters(*SHAPES)
    rate = torch.tensor(0.1, dtype=torch.float64)
    tensor, number = kind(ones, rate), kind(others, 0.1)
    for step in range(3):
        train(tensor, [step])
        train(number, [step])
        rate *= 0.5
        for group in number.param_groups:
            group["lr"] = np.float64(group["lr"] * 0.5)
    torch.testing.assert_close(ones, others, rtol=1e-12, atol=1e-12)
    assert tensor.param_groups[0]["lr"] is rate


@KINDS_AND_WHOLE
def test_a_compiled_step_is_the_eager_one_though_rates_change(kind):
    eager, compiled = (kind(parameters(*SHAPES, dtype=torch.float32), 0.1) for _ in range(2))
    for optimizer in (eager, compiled):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.2)
    step = torch.compile(compiled.step)
    for number in range(3):
        train(eager, [number])
        give_gradients(members(compiled), number)
        step()
        for optimizer in (eager, compiled):
            optimizer.param_groups[0]["lr"] *= 0.5
    assert bits(members(eager)) == bits(members(compiled))
    assert state_of(eager) == state_of(compiled)


@KINDS_AND_WHOLE
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_an_optimizer_is_refused_with_the_way_to_copy_its_state(kind, duplicate):
    with pytest.raises(TypeError, match=r"cannot be copied; .* state_dict\(\)"):
        duplicate(kind(parameters(*SHAPES), 0.1))


# ---- state: by name, in safetensors, and in torch's form

OURS = {
    "muon": partial(Muon, weight_decay=0.1, dtype=torch.float32),
    "normuon": partial(NorMuon, split=2, dtype=torch.float32),
    "adamw": AdamW, "rowadam": RowAdam, "whole": Whole,
}  # fmt: skip
TORCHS = {"torch muon": torch.optim.Muon, "torch adamw": torch.optim.AdamW,
          "torch sgd": torch.optim.SGD}  # fmt: skip
BUILDS = OURS | TORCHS


@pytest.mark.parametrize(
    ("name", "kept"), [*product(OURS, ["state_dict"]), *product(BUILDS, ["safetensors"])]
)
def test_a_state_is_a_snapshot_that_continues_as_if_never_interrupted(name, kept, tmp_path):
    build = BUILDS[name]
    optimizer, other = (build(parameters(*SHAPES, dtype=torch.float32), 0.05) for _ in range(2))
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
    assert other.param_groups[0]["lr"] == 0.05
    other.param_groups[0]["lr"] = 0.123
    train(other, [2])
    for steps in ([], (7, 8)):
        train(optimizer, steps)
        train(other, steps)
        assert bits(members(optimizer)) == bits(members(other))
        assert state_of(optimizer) == state_of(other)


@pytest.mark.parametrize("name", BUILDS)
def test_reset_returns_to_the_first_step_in_place(name):
    optimizer = BUILDS[name](parameters(*SHAPES, dtype=torch.float32), 0.05)
    parts = getattr(optimizer, "parts", [optimizer])
    buckets = [bucket for part in parts for bucket in getattr(part, "buckets", [])]

    def places():
        return [tensor.data_ptr() for bucket in buckets for tensor in bucket.state.values()]

    fresh, at_first = state_of(optimizer), places()
    optimizer.param_groups[0]["initial_lr"] = 0.5
    train(optimizer, range(2))
    reset(optimizer)
    assert state_of(optimizer) == fresh
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert places() == at_first  # a captured graph needs all state at its address


def named_layers(*names):
    return list(zip(names, parameters(*[(4, 8)] * len(names)), strict=True))


def test_named_state_goes_by_name_into_another_grouping():
    layers = named_layers("a", "b", "c")
    optimizer = NorMuon([{"params": layers[:2], "lr_mul": 3.0}, {"params": layers[2:]}], 0.1)
    train(optimizer, range(2))
    regrouped = NorMuon([{"params": layers[2:]}, {"params": [layers[1], layers[0]]}], 0.2)
    regrouped.load_named_state(dict(optimizer.named_state()))
    assert state_of(regrouped) == state_of(optimizer)
    with pytest.raises(ValueError, match=r"groups of \[2, 1\] parameters, not \[1, 2\]"):
        regrouped.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", [NorMuon, Whole])
@pytest.mark.parametrize(("change", "message"), [
    (lambda state: state.pop("0.variance"), r"lacks 0.variance; build the optimizer as it was"),
    (lambda state: state.update({"z.momentum": torch.ones(4)}), r"has an unknown z.momentum"),
    (lambda state: state.update({"0.variance": torch.ones(2)}), r"as \(2,\), not \(1, 1, 8\)"),
])  # fmt: skip
def test_a_named_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(
    kind, change, message
):
    optimizer = kind(parameters(*SHAPES), 0.05)
    train(optimizer, [0])
    before = state_of(optimizer)
    tensors = {name: tensor + 1 for name, tensor in named_state(optimizer)}
    change(tensors)
    with pytest.raises(ValueError, match=message):
        load_named_state(optimizer, tensors)
    assert state_of(optimizer) == before


# ---- states and options of other optimizers


EXACT = {"betas": (0.9, 0.999), "eps": 1e-12}  # torch's eps acts after bias correction
DECAY = {"weight_decay": 0.1}


@pytest.mark.parametrize(("ours", "theirs", "near"), [
    (partial(AdamW, **EXACT, **DECAY), partial(torch.optim.AdamW, **EXACT, **DECAY), 1e-5),
    (partial(AdamW, **EXACT), partial(torch.optim.Adam, **EXACT), 1e-5),
    # Both round to bf16, in another order.
    (partial(Muon, method="newton_schulz", dtype=torch.bfloat16, **DECAY),
     partial(torch.optim.Muon, **DECAY), 0.03),
], ids=["adamw", "adam", "muon"])  # fmt: skip
def test_steps_are_those_of_torch_also_after_loading_its_state(ours, theirs, near):
    """One parameter has no state there, as it had no gradient yet."""
    others = parameters((16, 48), (48, 16), dtype=torch.float32)
    other = theirs(others, 0.02)
    for step in range(3):
        give_gradients(others[:1], step)
        other.step()
    start, params = copies(others), copies(others)
    optimizer = ours(params, 0.5)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert "nesterov" not in optimizer.param_groups[0]  # it is no group key of ours
    train(other, range(3, 6))
    train(optimizer, range(3, 6))
    for a, b, before in zip(params, others, start, strict=True):
        assert (a - b).norm() <= near * (b - before).norm()


@pytest.mark.parametrize(("other", "ours", "message"), [
    (partial(torch.optim.AdamW, maximize=True), AdamW, "AdamW .* maximize=True of the state; neg"),
    (partial(torch.optim.Adam, weight_decay=0.1), AdamW, "decoupled_weight_decay=False"),
    (torch.optim.Muon, partial(Muon, scale="rms"), "adjust_lr_fn=None .*scale='spectral' is None"),
    (partial(torch.optim.SGD, momentum=0.9), Muon, "not do dampening=0 .*; torch.optim.SGD does"),
])  # fmt: skip
def test_a_state_whose_settings_mean_another_step_is_refused_and_changes_nothing(
    other, ours, message
):
    theirs, optimizer = other(parameters((4, 8)), lr=0.1), ours(parameters((4, 8)), 0.2)
    for each in (theirs, optimizer):
        train(each, range(2))
    before = state_of(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(theirs.state_dict())
    assert state_of(optimizer) == before
    assert optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(("kind", "option", "value", "fix"), [
    (AdamW, "maximize", True, "negate the loss"),
    (AdamW, "use_muon", True, "give Muon's groups to Muon"),
    (Muon, "use_muon", False, "give Muon's groups to Muon"),
    (partial(AdamW, weight_decay=0.1), "decoupled_weight_decay", False, "weight_decay=0"),
    (Muon, "ns_steps", 6, "newton_schulz five, newton_schulz_12 twelve"),
    (NorMuon, "ns_coefficients", (3.4445, -4.775, 2.0315), "of method='newton_schulz'"),
    (Muon, "adjust_lr_fn", "match_rms_adamw", "scale='rms' is 'match_rms_adamw'"),
])  # fmt: skip
def test_an_option_that_changes_the_step_is_refused_by_the_name_of_the_class(
    kind, option, value, fix, by_group
):
    params = parameters((4, 8))
    by_name = {} if by_group else {option: value}
    groups = [{"params": params, option: value}] if by_group else params
    name = getattr(kind, "func", kind).__name__
    message = rf"^{name} does not do {option}={re.escape(repr(value))} for parameter 0; .*{fix}"
    with pytest.raises(ValueError, match=message):
        kind(groups, 0.1, **by_name)


@pytest.mark.parametrize(("ours", "theirs", "settings"), [
    (AdamW, torch.optim.AdamW, (0.01, (0.8, 0.9), 1e-3, 0.3)),
    (Muon, torch.optim.Muon, (0.01, 0.3, 0.8, False)),
])  # fmt: skip
def test_settings_by_position_are_in_the_order_of_torch(ours, theirs, settings):
    names = list(inspect.signature(theirs).parameters)[1 : 1 + len(settings)]
    ones, others = parameters((4, 8)), parameters((4, 8))
    train(ours(ones, *settings), range(2))
    train(ours(others, **dict(zip(names, settings, strict=True))), range(2))
    assert bits(ones) == bits(others)
