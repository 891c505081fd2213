"""The optimizers on one process, against references in float64.

Against torch's own optimizers: test_torch_promises.py.
"""

import math
from functools import partial

import pytest
import reference
import torch
from small_optim import bits, give_gradients, members, parameters

from optim import AdamW, Guard, Muon, NorMuon, RowAdam, SpikeRule, named_state

pytestmark = pytest.mark.core

MUONS = pytest.mark.parametrize("kind", [Muon, NorMuon])
CAUTIOUS = pytest.mark.parametrize("cautious", [False, True])


def assert_follows(optimizer, step_of):
    """Step next to a reference: `step_of(index, weight, grad, state)` returns the weight.

    Then the state must be the reference's: the step alone would not show a variance times a
    constant. The divisor changes, so a state that saw gradients before they were divided would
    differ.
    """
    params = members(optimizer)
    weights, states = [param.detach().double() for param in params], [{} for _ in params]
    for step in range(4):
        optimizer.grad_divisor = step + 1
        give_gradients(params, step)
        for index, param in enumerate(params):
            grad = param.grad / optimizer.grad_divisor
            weights[index] = step_of(index, weights[index], grad, states[index])
        gradients = bits([param.grad for param in params])
        optimizer.step()
        assert bits([param.grad for param in params]) == gradients
        for weight, param in zip(weights, params, strict=True):
            torch.testing.assert_close(param.detach().double(), weight, rtol=1e-9, atol=1e-9)
    found = dict(named_state(optimizer))
    for index, state in enumerate(states):
        blocks = [state.pop(kind) for kind in [*state] if kind.startswith("variance")]
        for kind, value in (state | ({"variance": torch.stack(blocks)} if blocks else {})).items():
            own = found.pop(f"{index}.{kind}").to(value.dtype)
            torch.testing.assert_close(own, value, rtol=1e-9, atol=1e-12)
    assert not found


# ---- the methods


@pytest.mark.parametrize("beta2", [None, 0.9])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("scale", "method"), [("spectral", "polar_express"), ("rms", "newton_schulz")]
)
@CAUTIOUS
def test_a_step_of_muon_is_the_textbook_step(beta2, nesterov, scale, method, cautious):
    options = {"momentum": 0.9, "nesterov": nesterov, "scale": scale, "method": method}
    options |= {"weight_decay": 0.8, "cautious": cautious}
    kind = Muon if beta2 is None else partial(NorMuon, beta2=beta2)
    assert_follows(
        kind(parameters((6, 12), (12, 6), (8, 8), (1, 12)), 0.05, dtype=torch.float64, **options),
        lambda i, w, g, s: reference.muon_step(w, g, s, lr=0.05, beta2=beta2, **options),
    )


ADAM, ROW_ADAM = (AdamW, reference.adam_step), (RowAdam, reference.row_adam_step)
OWN_KEYS = {AdamW: {"betas": (0.8, 0.9)}, RowAdam: {"beta2": 0.5}}


@pytest.mark.parametrize(("kind", "step", "shape"), [
    (*ADAM, (64,)), (*ADAM, ()), (*ADAM, (500, 700)),  # the last is cut on a CPU
    (*ROW_ADAM, (5, 3)), (*ROW_ADAM, (1, 4)),
])  # fmt: skip
@CAUTIOUS
def test_a_step_of_adam_and_of_row_adam_is_the_textbook_step(kind, step, shape, cautious):
    options = [{"lr_mul": 5.0, "wd_mul": 2.0}, {"eps": 1e-3, **OWN_KEYS[kind]}]
    pairs = zip(parameters(shape, (5, 3)), options, strict=True)
    groups = [{"params": [param], **option} for param, option in pairs]
    defaults = {"lr": 0.01, "weight_decay": 0.8, "cautious": cautious}
    defaults |= {"betas": (0.65, 0.95)} if kind is AdamW else {}
    assert_follows(
        kind(groups, **defaults),
        lambda i, w, g, s: step(w, g, s, **{**defaults, **options[i]}),
    )


def test_groups_of_one_shape_keep_their_own_split_method_and_rates():
    options = [
        {"split": 4, "lr_mul": 2.0},
        {"method": "newton_schulz", "wd_mul": 3.0},
        {"momentum": 0.5, "beta2": 0.5},
        {"split": 2, "lr": 0.01, "weight_decay": 0.3},
    ]
    pairs = zip(parameters(*[(4, 16)] * 4), options, strict=True)
    groups = [{"params": [param], **option} for param, option in pairs]
    defaults = {"lr": 0.05, "weight_decay": 0.1, "beta2": 0.95}
    assert_follows(
        NorMuon(groups, 0.05, weight_decay=0.1, dtype=torch.float64),
        lambda i, w, g, s: reference.muon_step(w, g, s, **{**defaults, **options[i]}),
    )


def packed_in(tensor, split):
    """The matrices that Muon's docstring says this tensor packs."""
    tensor, short = tensor.detach(), min(tensor.shape[-2:])
    if isinstance(split, int):
        long = max(tensor.shape[-2:]) // split
        wide = tensor.shape[-1] > tensor.shape[-2]
        return tensor.reshape(-1, *((short, long) if wide else (long, short))).unbind()
    if sum(split) == tensor.shape[-2]:
        return [part.contiguous() for part in tensor.split(split, dim=-2)]
    stacks = tensor.numel() // (sum(split) * short)
    return tensor.view(-1, short).split(split * stacks)


@MUONS
@pytest.mark.parametrize(("shape", "split", "variance"), [
    ((6, 20), (4, 2), (2, 1, 20)),  # K and V alone: wider than high
    ((2, 20, 4), (6, 6, 8), (40, 1)),  # in each of two experts
    ((96, 12), 4, (4, 24, 1)),
    ((12, 96), 4, (4, 1, 24)),
    ((3, 8, 4), 2, (6, 4, 1)),
    ((6, 24), (2, 2, 4, 4, 4, 4, 4), (7, 1, 6)),
    ((24, 3), (6, 3, 3, 6, 6), (24, 1)),
])  # fmt: skip
def test_packed_matrices_step_as_parameters_of_their_own_at_the_scale_of_the_whole(
    kind, shape, split, variance
):
    """NorMuon's variance has one number for each row or column of each matrix."""

    def scale(matrix):
        return max(1, matrix.shape[-2] / matrix.shape[-1]) ** 0.5

    (packed,) = parameters(shape)
    groups = []
    for part in packed_in(packed, split):
        lr_mul = scale(packed) / scale(part)
        groups.append({"params": [torch.nn.Parameter(part.clone())], "lr_mul": lr_mul})
    options = {"weight_decay": 0.1, "dtype": torch.float64}
    together, apart = kind([packed], 0.1, split=split, **options), kind(groups, 0.1, **options)
    for step in range(3):
        give_gradients([packed], step)
        for param, grad in zip(members(apart), packed_in(packed.grad, split), strict=True):
            param.grad = grad.clone()
        together.step()
        apart.step()
    for piece, param in zip(packed_in(packed, split), members(apart), strict=True):
        torch.testing.assert_close(piece, param.detach())
        assert f"{piece.shape[-2]} x {piece.shape[-1]}: polar_express" in together.describe()
    shapes = {"0.momentum": shape} | ({"0.variance": variance} if kind is NorMuon else {})
    assert {name: tuple(state.shape) for name, state in named_state(together)} == shapes


@MUONS
@pytest.mark.parametrize("scale", ["spectral", "rms"])
@pytest.mark.parametrize(("shape", "split"), [
    ((8, 3, 2, 2), None), ((24, 2, 3), None), ((6, 8), None), ((4, 4, 2, 2), 4),
])  # fmt: skip
def test_flattened_filters_step_as_the_matrix_of_the_same_memory_to_the_bit(
    kind, scale, shape, split
):
    options = {"weight_decay": 0.1, "scale": scale, "split": split, "dtype": torch.float64}
    (filters,) = parameters(shape)
    matrix = torch.nn.Parameter(filters.detach().clone().flatten(1))
    flattening = kind([{"params": [filters], "flatten": True}], 0.1, **options)
    plain = kind([matrix], 0.1, **options)
    for step in range(4):
        give_gradients([filters], step)
        matrix.grad = filters.grad.flatten(1)
        flattening.step()
        plain.step()
        if step == 1:  # its state has the shape of the parameter, and loads
            saved = flattening.state_dict()
            assert saved["state"][0]["momentum"].shape == shape
            flattening = kind([filters], 0.2, flatten=True, **options)
            flattening.load_state_dict(saved)
    assert torch.equal(filters.flatten(1), matrix)


# ---- what cannot be built


def named(*shape):
    return [("w", torch.nn.Parameter(torch.ones(shape)))]


@pytest.mark.parametrize(("build", "message"), [
    (lambda p: Muon([("up", p[0])], -0.1), r"lr .* in \[0, inf\), got -0.1 for parameter up"),
    (lambda p: Muon(p, 0.1, momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
    (lambda p: RowAdam(p, 0.1, beta2=1.0), r"beta2 must be in \[0, 1\), got 1.0"),
    (lambda p: RowAdam(p, 0.1, eps=-1.0), r"eps must be in \[0, inf\), got -1.0"),
    (lambda p: Muon(p, 0.1, scale="big"), r"scale 'big'; choose one of spectral"),
    (lambda p: Muon(p, 0.1, split=(2, 4)), r"add up to 8, .* 4 rows, got \(2, 4\)"),
    (lambda p: Muon(named(8), 0.1), r"w has shape \(8,\).* AdamW"),
    (lambda p: Muon(named(8, 3, 4, 4), 0.1), r"shape \(8, 3, 4, 4\).* flatten=True"),
    (lambda p: RowAdam(named(2, 3, 4), 0.1), r"w has the shape \(2, 3, 4\).* AdamW"),
    (lambda p: AdamW([p[0].detach().T], 0.1), r"not contiguous; undo channels_last"),
    (lambda p: Muon([{"params": []}], 0.1), r"groups without parameters"),
    (lambda p: Muon([{"params": p, "scale": "rms"}], 0.1), r"scale of .* 0 .* give it to Muon"),
    (lambda p: AdamW([*p, torch.ones(3, device="meta")], 0.1), r"0 on cpu, 1 on meta; build"),
    (lambda p: AdamW([("a", p[0]), ("b", p[0])], 0.1), r"parameters a and b are one; list it"),
    (lambda p: Guard([Muon(p, 0.1)], process_group="g"), r"Muon has no process_group.*; give it"),
    (lambda p: Guard([Muon(p, 0.1)], clip="1"), r"clip must be .* above 0, got '1'; None does"),
    (lambda p: Guard([Muon(p, 0.1)], clip=math.nan), r"clip must be .* above 0, got nan"),
    (lambda p: Guard([Muon(p, 0.1)], clip=0.0), r"clip must be .* above 0, got 0.0"),
    (lambda p: SpikeRule(sigma=math.nan), r"sigma > 0.*sigma=nan"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_bad_settings_are_refused_with_value_rule_and_fix(build, message):
    with pytest.raises(ValueError, match=message):
        build(parameters((4, 8)))
