"""Checkpoints of the optimizers on one process, and bf16 weights that add up as float32 ones."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_optim import BETAS, assert_same_state, give_gradients, mixed, optimizers_for, parameters
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from optim import Adam, Muon, NorMuon
from optim.base import divide, join

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


def test_state_is_complete_before_the_first_step():
    for optimizer, names in zip(optimizers_for(mixed()), STATE_NAMES, strict=True):
        state = optimizer.state_dict()["state"]
        assert len(state) == len(members(optimizer))
        assert all(list(tensors) == names for tensors in state.values())
        assert not any(tensor.any() for tensors in state.values() for tensor in tensors.values())


def test_after_the_first_step_the_state_is_the_share_of_the_gradient_it_is_said_to_be():
    (normuon, (wide, *_)), (adam, (plain, *_)) = trained(1, steps=1), trained(2, steps=1)
    torch.testing.assert_close(normuon.state[wide]["momentum"], 0.05 * wide.grad)
    torch.testing.assert_close(adam.state[plain]["exp_avg"], 0.35 * plain.grad)
    torch.testing.assert_close(adam.state[plain]["exp_avg_sq"], 0.05 * plain.grad**2)
    assert adam.state[plain]["step"] == 1


@pytest.mark.parametrize(
    ("shape", "options", "variance"),
    [
        ((64, 128), {"axis": "rows"}, (1, 64, 1)),
        ((64, 128), {"axis": "cols"}, (1, 1, 128)),
        ((64, 128), {}, (1, 1, 128)),
        ((128, 64), {}, (1, 128, 1)),
        ((64, 128), {"split": 4}, (4, 1, 32)),
        ((64, 128), {"split": 4, "axis": "rows"}, (4, 64, 1)),
        ((64, 128), {"split": 4, "split_variance": False}, (1, 1, 128)),
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
    assert list(named) == [f"{number}.{name}" for number in range(len(params)) for name in STATE_NAMES[index]]
    assert all(type(tensor) is torch.Tensor for tensor in named.values())
    save_file(named, tmp_path / "state.safetensors")
    other = fresh_copy(index, params)
    other.load_named_state(load_file(tmp_path / "state.safetensors"))
    assert_goes_on_alike(optimizer, other)


@INDICES
def test_a_state_survives_torch_distributed_checkpoint_without_a_process_group(index, tmp_path, recwarn):
    optimizer, params = trained(index)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    other = fresh_copy(index, params)
    loaded = {"optimizer": other.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    other.load_state_dict(loaded["optimizer"])
    assert_goes_on_alike(optimizer, other)


def test_a_state_passes_through_the_named_form_of_torch_distributed_checkpoint():
    models = [torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 4, bias=False)) for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    one, other = (NorMuon(model.named_parameters(), 0.1) for model in models)
    train(one, members(one), range(2))
    models[1].load_state_dict(models[0].state_dict())
    named = get_optimizer_state_dict(models[0], one)
    assert list(named["state"]) == ["0.weight", "1.weight"]
    set_optimizer_state_dict(models[1], other, named)
    assert_goes_on_alike(one, other)


LOADER = """
import sys, torch
sys.path[:0] = sys.argv[2:]
from test_optim import *
params = mixed()
saved = torch.load(sys.argv[1] + "/saved.pt", weights_only=True)
torch._foreach_copy_([param.detach() for param in params], saved["params"])
optimizers = optimizers_for(params)
give_gradients(params, 2)
for optimizer, state in zip(optimizers, saved["states"]):
    optimizer.load_state_dict(state)
    optimizer.step()
states = [optimizer.state_dict() for optimizer in optimizers]
torch.save({"params": [param.detach() for param in params], "states": states}, sys.argv[1] + "/done.pt")
"""


def test_a_state_goes_on_in_a_new_process(tmp_path):
    params = mixed()
    optimizers = optimizers_for(params)

    def step(number):
        give_gradients(params, number)
        for optimizer in optimizers:
            optimizer.step()

    step(0)
    step(1)
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"params": [param.detach() for param in params], "states": states}, tmp_path / "saved.pt")
    here = Path(__file__).parent
    subprocess.run([sys.executable, "-c", LOADER, tmp_path, here, here.parent], check=True, timeout=300)
    step(2)
    done = torch.load(tmp_path / "done.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(params, done["params"], strict=True))
    for optimizer, state in zip(optimizers, done["states"], strict=True):
        assert_same_state(optimizer.state_dict(), state)


def named_layers(*names, seed=0):
    return list(zip(names, parameters(*[(4, 8)] * len(names), seed=seed), strict=True))


def test_named_state_goes_by_name_into_another_grouping_which_keeps_its_own_settings():
    layers = named_layers("a", "b", "c")
    optimizer = NorMuon([{"params": layers[:2], "lr_mul": 3.0}, {"params": layers[2:]}], 0.1)
    train(optimizer, [param for _, param in layers], range(2))
    values = dict(optimizer.named_state())

    regrouped = NorMuon([{"params": layers[2:]}, {"params": [layers[1], layers[0]], "lr_mul": 5.0}], 0.2)
    regrouped.load_state_dict(optimizer.state_dict())
    found = dict(regrouped.named_state())
    assert set(found) == set(values) == {f"{name}.{kind}" for name in "abc" for kind in STATE_NAMES[1]}
    assert all(torch.equal(found[name], values[name]) for name in values)
    assert [(group["lr"], group["lr_mul"]) for group in regrouped.param_groups] == [(0.2, 1.0), (0.2, 5.0)]

    alike = NorMuon([{"params": layers[:2]}, {"params": layers[2:]}], 0.2)
    alike.load_state_dict(optimizer.state_dict())
    assert [(group["lr"], group["lr_mul"]) for group in alike.param_groups] == [(0.1, 3.0), (0.1, 1.0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("b.variance"), r"the state lacks b.variance; build the optimizer as it was"),
        (lambda t: t.update({"z.momentum": t["a.momentum"]}), r"has an unknown z.momentum"),
        (lambda t: t.update({"a.variance": torch.zeros(2, 1, 8)}), r"has a.variance as \(2, 1, 8\) .*not \(1, 1, 8\)"),
        (lambda t: t.update({"b.momentum": t["b.momentum"].float()}), r"has b.momentum as .*float32, not .*float64"),
        (lambda t: [t.pop(name) for name in list(t)], r"lacks a.momentum; lacks a.variance; lacks b.momentum"),
    ],
)
def test_a_named_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(change, message):
    optimizer = NorMuon(named_layers("a", "b"), 0.05)
    train(optimizer, members(optimizer), [0])
    before, tensors = optimizer.state_dict(), {name: tensor + 1 for name, tensor in optimizer.named_state()}
    change(tensors)
    with pytest.raises(ValueError, match=message):
        optimizer.load_named_state(tensors)
    assert_same_state(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: NorMuon(parameters((4, 8)), 0.1, split=2), r"is of split 2, this of None; build alike"),
        (lambda: Muon(parameters((4, 8)), 0.1), r"lacks 0.variance"),
        (lambda: Adam(parameters((4, 8)), 0.1, betas=BETAS), r"lacks 0.momentum.*unknown 0.step"),
        (lambda: NorMuon(parameters((4, 8), (4, 8)), 0.1), r"groups of \[2\] parameters, this \[1\]; name them"),
        (lambda: NorMuon(parameters((8, 4)), 0.1), r"has 0.momentum as \(8, 4\).*not \(4, 8\)"),
        (lambda: NorMuon(named_layers("a"), 0.1), r"lacks 0.momentum.*unknown a.momentum"),
    ],
)
def test_a_state_of_another_optimizer_is_refused_and_changes_nothing(other, message):
    optimizer = NorMuon(parameters((4, 8)), 0.05)
    train(optimizer, members(optimizer), [0])
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(other().state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.05
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


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def reassembled(optimizer, param):
    return join([param.detach()], [optimizer.state[param]["remainder"]])[0]


def test_every_bf16_is_its_own_nearest_and_leaves_no_remainder():
    everything = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    numbers = everything[~everything.isnan()]
    assert len(numbers) == 2**16 - 2 * 127
    (high,), (low,) = divide([numbers.float()])
    assert torch.equal(bits(high), bits(numbers))
    assert not low.any()


def test_halves_go_away_from_zero_and_come_back_exactly():
    everything = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    finite = everything[everything.isfinite()]
    halfway = (bits(finite.float()) + 0x8000).view(torch.float32)  # between it and the next one further from zero
    (high,), (low,) = divide([halfway])
    assert torch.equal(bits(high), bits(finite) + 1)
    assert torch.equal(bits(join([high], [low])[0]), bits(halfway))


@settings(max_examples=200)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_the_bf16_part_is_the_nearest_and_both_parts_give_the_float32_back(values):
    exact = torch.tensor(values, dtype=torch.float32)
    (high,), (low,) = divide([exact])
    assert torch.equal(bits(join([high], [low])[0]), bits(exact))
    rounded = exact.to(torch.bfloat16)  # halves to even
    halfway = (bits(exact) & 0xFFFF) == 0x8000
    assert torch.equal(bits(high)[~halfway], bits(rounded)[~halfway])
    assert (high.float().abs() >= rounded.float().abs())[halfway].all()


# The first is the NaN that a GPU's own arithmetic returns.
@pytest.mark.parametrize("pattern", [0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF])
def test_nan_stays_nan(pattern):
    nan = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
    assert nan.isnan()
    (high,), (low,) = divide([nan])
    assert high.isnan()
    assert join([high], [low])[0].isnan()


EXACT = [
    lambda params, **options: Adam(
        params, 0.01, betas=BETAS, weight_decay=0.1, state_dtype=torch.float32, cautious=True, **options
    ),
    # Without momentum the state of bf16 weights, kept in bf16, is exact: it is the last gradient.
    lambda params, **options: Muon(
        params, 0.02, weight_decay=0.1, momentum=0.0, dtype=torch.float32, method="newton_schulz", **options
    ),
]


@pytest.mark.parametrize("build", EXACT)
def test_exact_bf16_weights_follow_float32_ones_bit_for_bit(build):
    exact = parameters((16, 8), (8, 24), dtype=torch.bfloat16)
    wide = [torch.nn.Parameter(param.detach().float()) for param in exact]
    ours, theirs = build(exact, exact_accumulation=True), build(wide)
    for step in range(20):
        give_gradients(exact, step)
        for param, twin in zip(exact, wide, strict=True):
            twin.grad = param.grad.float()
        ours.step()
        theirs.step()
        for param, twin in zip(exact, wide, strict=True):
            assert torch.equal(reassembled(ours, param), twin)
            assert (param.float() - twin).abs().max() <= (
                twin - twin.bfloat16().float()
            ).abs().max()  # rounded, not cut


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", [Adam, Muon, NorMuon])
def test_a_thousand_tiny_updates_of_bf16_weights_add_up_only_with_exact_accumulation(kind, exact):
    """Every step subtracts 1e-5 from weights of 1, whose neighbours in bf16 are 0.996 and 1.008."""
    (param,) = params = [torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))]
    if kind is Adam:
        optimizer = Adam(params, 1e-5, betas=BETAS, state_dtype=torch.float32, exact_accumulation=exact)
        moved = torch.ones(4, 4)
    else:
        options = {"method": "exact", "dtype": torch.float64, "exact_accumulation": exact}
        optimizer, moved = kind(params, 1e-5, **options), torch.eye(4)
    param.grad = moved.bfloat16()
    for _ in range(1000):
        optimizer.step()
    if not exact:
        assert (param == 1).all()
        return
    torch.testing.assert_close(reassembled(optimizer, param), 1 - 0.01 * moved, rtol=0, atol=2e-5)
    assert torch.equal(param.detach(), reassembled(optimizer, param).bfloat16())


@pytest.mark.parametrize("kind", [Muon, NorMuon, Adam])
def test_the_remainder_is_state_that_is_saved_loaded_and_reset(kind, tmp_path):
    extra = {"betas": BETAS} if kind is Adam else {}
    params, others = (parameters((4, 8), (8, 4), dtype=torch.bfloat16) for _ in range(2))
    one, other = (kind(members, 0.01, exact_accumulation=True, **extra) for members in (params, others))
    train(one, params, range(3))
    named = dict(one.named_state())
    remainders = {name: tensor for name, tensor in named.items() if name.endswith(".remainder")}
    assert list(remainders) == ["0.remainder", "1.remainder"]
    assert all(tensor.dtype == torch.int16 and tensor.any() for tensor in remainders.values())
    save_file(named, tmp_path / "state.safetensors")
    other.load_named_state(load_file(tmp_path / "state.safetensors"))
    with torch.no_grad():
        torch._foreach_copy_(others, params)
    assert_goes_on_alike(one, other)
    one.reset()
    assert torch.equal(reassembled(one, params[0]), params[0].detach().float())
    with pytest.raises(ValueError, match=r"has an unknown 0.remainder"):
        kind(params, 0.01, **extra).load_named_state(named)
    wide = kind(parameters((4, 8), dtype=torch.float32), 0.01, exact_accumulation=True, **extra)
    assert not any(name.endswith(".remainder") for name, _ in wide.named_state())
