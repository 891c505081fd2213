"""What users of torch's optimizers expect of ours, held to torch's own where there is one."""

import copy
import inspect
import pickle
import re
from functools import partial
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_optim import BETAS, KINDS, assert_same, give_gradients, members, parameters, train

from optim import AdamW, Muon, NorMuon, load_named_state, named_state, reset

SHAPES = ((4, 8), (8, 4), (4, 8))


def optimizers():
    """Three of ours, then three of torch's."""
    params = parameters(*[(4, 8)] * 4, *[(8, 4)] * 4, (4, 8), (9,), dtype=torch.float32)
    return [
        Muon(params[:4], 0.05, weight_decay=0.1, dtype=torch.float32),
        NorMuon(params[4:8], 0.05, split=2, dtype=torch.float32),
        AdamW(params[8:], 0.01, betas=BETAS),
        torch.optim.Muon(params[:4], 0.05),
        torch.optim.AdamW(params[8:], 0.01),
        torch.optim.SGD(params[8:], 0.01),
    ]


@KINDS
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_an_optimizer_is_refused_with_the_way_to_copy_its_state(kind, duplicate):
    with pytest.raises(TypeError, match=rf"^{kind.__name__} cannot be copied; .* state_dict\(\)"):
        duplicate(kind(parameters(*SHAPES), 0.1))


# ---- state: by name, in safetensors, and in torch's form


@pytest.mark.parametrize(
    ("index", "kept"), [*product(range(3), ["state_dict"]), *product(range(6), ["safetensors"])]
)
def test_a_state_is_a_snapshot_that_continues_as_if_never_interrupted(index, kept, tmp_path):
    optimizer, other = (optimizers()[index] for _ in range(2))
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
    optimizer = optimizers()[index]
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


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("b.variance"), r"lacks b.variance; build the optimizer as it was"),
    (lambda t: t.update({"z.momentum": t["a.momentum"]}), r"has an unknown z.momentum"),
    (lambda t: t.update({"a.variance": torch.ones(2)}), r"a.variance as \(2,\), not \(1, 1, 8"),
])  # fmt: skip
def test_a_named_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(change, message):
    optimizer = NorMuon(named_layers("a", "b"), 0.05)
    train(optimizer, [0])
    before = dict(optimizer.named_state())
    tensors = {name: tensor + 1 for name, tensor in before.items()}
    change(tensors)
    with pytest.raises(ValueError, match=message):
        optimizer.load_named_state(tensors)
    assert_same(dict(optimizer.named_state()), before)


# ---- states of other optimizers


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.Muon])
def test_a_state_of_torch_loads_and_the_next_steps_are_those_of_torch(kind):
    """After its own loss of a parameter: one that had no gradient yet has no state there."""
    options = {"weight_decay": 0.0}
    if kind is torch.optim.Muon:
        ours, near = partial(Muon, method="newton_schulz", dtype=torch.bfloat16, **options), 0.03
    else:
        ours, near = partial(AdamW, eps=1e-12, **options), 1e-5
        options = options | {"eps": 1e-12}
    theirs = parameters((16, 48), (16, 48), dtype=torch.float32)
    other = kind(theirs, 0.02, **options)
    for step in range(3):
        give_gradients(theirs[:1], step)
        other.step()
    start = [param.detach().clone() for param in theirs]
    params = [torch.nn.Parameter(param.clone()) for param in start]
    optimizer = ours(params, 0.5)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert "nesterov" not in optimizer.param_groups[0]  # it is no group key of ours
    train(other, range(3, 6))
    train(optimizer, range(3, 6))
    for a, b, before in zip(params, theirs, start, strict=True):
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
    before = dict(optimizer.named_state())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(theirs.state_dict())
    assert_same(dict(optimizer.named_state()), before)
    assert optimizer.param_groups[0]["lr"] == 0.2


# ---- options of torch's optimizers


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
    assert_same(ones, others)


# ---- rates, compilation, state


@KINDS
def test_a_learning_rate_may_be_a_tensor_that_a_schedule_changes_in_place(kind):
    ones, others = parameters(*SHAPES), parameters(*SHAPES)
    rate = torch.tensor(0.1, dtype=torch.float64)
    tensor, number = kind(ones, rate), kind(others, 0.1)
    for step in range(3):
        train(tensor, [step])
        train(number, [step])
        rate *= 0.5
        number.param_groups[0]["lr"] *= 0.5
    torch.testing.assert_close(ones, others, rtol=1e-12, atol=1e-12)
    assert tensor.param_groups[0]["lr"] is rate


@KINDS
def test_a_compiled_step_is_the_eager_one_for_groups_of_equal_shape(kind):
    optimizers = []
    for _ in range(2):
        params = parameters(*SHAPES, dtype=torch.float32)
        rates = torch.tensor(0.2), torch.tensor(0.1)
        groups = [{"params": params[:1], "lr": rates[0]}, {"params": params[1:]}]
        optimizers.append(kind(groups, rates[1]))
    eager, compiled = optimizers
    step = torch.compile(compiled.step)
    for number in range(3):
        train(eager, [number])
        give_gradients(members(compiled), number)
        step()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= 0.5
    assert_same(members(eager), members(compiled))
    assert_same(dict(named_state(eager)), dict(named_state(compiled)))
