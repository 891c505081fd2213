"""Techniques that change a step of Muon and NorMuon, against a twin for one matrix in float64."""

import pytest
import reference
import torch
from small_model import MACHINE, make_model, small
from torch._dynamo.testing import CompileCounterWithBackend

from optim import (
    Guard,
    Hyperball,
    Lookahead,
    Mixture,
    Muon,
    NorMuon,
    RowFloor,
    load_named_state,
    named_state,
)
from optim.update import update
from runtime.errors import Refused
from train_gpt import TECHNIQUES, make_optimizers

RATES = (0.05, 0.02, 0.04, 0.03)  # one a step
HOOKS = {
    "hyperball": {"update_hook": Hyperball()},
    "growing": {"update_hook": Hyperball(rms=2.0)},  # above the 1 at which weights begin
    "row_floor": {"update_hook": RowFloor(share=0.5)},
    "lookahead": {"update_hook": Lookahead(beta=0.8, share=0.6)},
    "mixture": {"momentum_hook": Mixture(beta=0.98, share=0.5)},
    "both": {"momentum_hook": Mixture(), "update_hook": Lookahead()},
}
STATES = {"lookahead": {"drift"}, "mixture": {"slow"}, "both": {"drift", "slow"}}
KINDS = pytest.mark.parametrize("kind", [Muon, NorMuon])
BALLS = ("hyperball", "growing")  # they replace weight decay
EACH = pytest.mark.parametrize("name", HOOKS)


# ---- the twins: one matrix, plain statements, the formulas of the papers and public runs


def hyperball(weight, plain, lr, rms):
    """R = |W|; V = W - lr R u / |u|; W = R V / |V|. Below R = rms sqrt(n) the norm only grows."""
    norm = weight.norm()
    radius = max(norm, rms * weight.numel() ** 0.5)
    u = weight - plain
    ahead = weight - lr * radius * u / u.norm()
    if norm < radius and ahead.norm() < radius:
        return ahead if ahead.norm() >= norm else ahead / ahead.norm() * norm
    return ahead / ahead.norm() * radius


def row_floor(weight, plain, lr, share):
    rows = []
    for old, new in zip(weight, plain, strict=True):
        change, least = new - old, lr * share * old.norm()
        if change.norm() < least:
            change = change / change.norm() * least
        rows.append(old + change)
    return torch.stack(rows)


def textbook(name, weight, grads, options):
    """The parameter after all steps, from the trained weights x and their own variables."""
    x, m, state, slow = weight.double(), torch.zeros_like(weight), {}, torch.zeros_like(weight)
    hook = [*HOOKS[name].values()]
    share = {"lookahead": 0.6, "both": 0.6}.get(name, 0.0)
    gamma = {"lookahead": 0.8, "both": 0.99}.get(name, 0.0)
    for lr, grad in zip(RATES, grads, strict=True):
        y = x + share * m
        if name in ("mixture", "both"):
            mixing = hook[0]
            mean = 0.95 * state.get("momentum", 0 * grad) + 0.05 * grad
            slow = mixing.beta * slow + (1 - mixing.beta) * grad
            memory = (1 - mixing.share) * mean + mixing.share * slow
            plain = reference.muon_step(y, grad, state, lr=lr, memory=memory, **options)
        else:
            plain = reference.muon_step(y, grad, state, lr=lr, **options)
        after = plain
        if name in BALLS:
            after = hyperball(y, plain, lr, hook[0].rms)
        if name == "row_floor":
            after = row_floor(y, plain, lr, hook[0].share)
        m = gamma * m + (1 - gamma) * (after - x)  # EMA-Nesterov; with gamma = share = 0 unused
        x = after
    return x + share * m


def weights_and_gradients(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    params, grads = [], []
    for shape in [(6, 12), (12, 6), (6, 12), (8, 8)]:
        weight = torch.randn(shape, generator=generator, dtype=torch.float64)
        params.append(torch.nn.Parameter(weight.to(dtype)))
        four = torch.randn(len(RATES), *shape, generator=generator, dtype=torch.float64)
        four[:, 0] *= 1e-3  # a row that moves little
        grads.append(four.to(dtype))
    return params, grads


def steps(optimizer, params, grads, numbers=(0, 1, 2, 3), guard=None):
    for number in numbers:
        optimizer.param_groups[0]["lr"] = RATES[number]
        for param, each in zip(params, grads, strict=True):
            param.grad = each[number].clone()
        (guard or optimizer).step()


@pytest.mark.parametrize(
    ("name", "decay"),
    [(name, 0.0) for name in HOOKS] + [(name, 0.3) for name in HOOKS if name not in BALLS],
)
@KINDS
def test_a_technique_is_its_formula_for_one_matrix(name, kind, decay):
    params, grads = weights_and_gradients()
    options = {"weight_decay": decay} | ({"beta2": 0.95} if kind is NorMuon else {})
    expected = [
        textbook(name, param.detach(), each, options)
        for param, each in zip(params, grads, strict=True)
    ]
    optimizer = kind(params, 0.05, dtype=torch.float64, **options, **HOOKS[name])
    steps(optimizer, params, grads)
    for param, weight in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), weight, rtol=1e-9, atol=1e-9)
    plain, same = weights_and_gradients()
    steps(kind(plain, 0.05, dtype=torch.float64, **options), plain, same)
    assert not torch.allclose(plain[0], params[0], rtol=1e-4)


@KINDS
def test_hyperball_keeps_the_norm_of_each_packed_matrix_and_lets_zeros_grow_to_theirs(kind):
    weight = torch.randn(4, 8, 8)
    weight[3] = 0
    param = torch.nn.Parameter(weight.view(8, 32).clone())
    optimizer = kind([param], 0.2, split=4, update_hook=Hyperball(rms=0.5))
    for _ in range(12):
        param.grad = torch.randn(8, 32)
        optimizer.step()
    norms = [each.norm() for each in param.detach().view(4, 8, 8)]
    expected = [max(each.norm(), torch.tensor(0.5 * 8)) for each in weight]
    torch.testing.assert_close(norms, expected, rtol=1e-4, atol=1e-4)


# ---- what the rest of an optimizer does with them


@EACH
@KINDS
@pytest.mark.parametrize("at_once", [("cpu",), ()])  # reading the flag, and selecting by it
def test_a_skipped_step_leaves_no_trace_and_a_loaded_state_goes_on(
    name, kind, at_once, monkeypatch
):
    monkeypatch.setattr("optim.base.READ_AT_ONCE", at_once)
    (params, grads), (others, _) = (weights_and_gradients(torch.float32) for _ in range(2))
    optimizer, other = (kind(each, 0.05, **HOOKS[name]) for each in (params, others))
    guard = Guard([optimizer])
    steps(optimizer, params, grads, [0, 1], guard)
    assert {key[2:] for key in dict(named_state(optimizer))} >= STATES.get(name, set())
    before = [param.detach().clone() for param in params], dict(named_state(optimizer))
    poisoned = [each.clone() for each in grads]
    poisoned[1][2, 0, 0] = float("nan")
    steps(optimizer, params, poisoned, [2], guard)
    after = [param.detach() for param in params], dict(named_state(optimizer))
    torch.testing.assert_close(after, before, rtol=0, atol=0)

    load_named_state(other, before[1])
    for param, value in zip(others, before[0], strict=True):
        param.data.copy_(value)
    steps(optimizer, params, grads, [3], guard)
    steps(other, others, grads, [3])
    torch.testing.assert_close(others, params, rtol=0, atol=0)


def test_compiled_hooks_are_the_eager_ones_and_a_new_rate_compiles_nothing(monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(update, dynamic=False, backend=counter)
    monkeypatch.setattr("optim.base.compiled_update", lambda: compiled)
    for name in ("growing", "row_floor", "both"):
        seen = []
        for choice in (False, True):
            params, grads = weights_and_gradients(torch.float32)
            optimizer = NorMuon(params, 0.05, compiled=choice, **HOOKS[name])
            steps(optimizer, params, grads, [0, 1])
            frames = counter.frame_count
            steps(optimizer, params, grads, [2, 3])
            seen.append(params)
        torch.testing.assert_close(seen[1], seen[0], rtol=2e-4, atol=2e-4)
        assert 0 < frames == counter.frame_count


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: Muon(p, 0.1, update_hook=Mixture()), r"update_hook must be a UpdateHook, got M"),
        (lambda p: Muon(p, 0.1, momentum_hook=3), r"momentum_hook must be a MomentumHook, got 3"),
        (
            lambda p: Muon(p, 0.1, weight_decay=0.1, update_hook=Hyperball()),
            r"Hyperball replaces weight decay; set it to 0 for parameter 0",
        ),
        (lambda p: Hyperball(rms=-1), r"rms must be in \[0, inf\), got -1"),
        (lambda p: RowFloor(share=2), r"share must be in \[0, 1\], got 2"),
        (lambda p: Lookahead(beta=1.0), r"beta must be in \[0, 1\), got 1.0"),
        (lambda p: Mixture(share=1.0), r"share must be in \[0, 1\), got 1.0"),
    ],
)
def test_a_bad_hook_is_refused_with_value_and_rule(build, message):
    with pytest.raises(ValueError, match=message):
        build([torch.nn.Parameter(torch.ones(4, 8))])


# ---- in the trainer


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_each_technique_of_the_trainer_moves_all_matrices(technique):
    config = small("tiny", "copyinit", technique=technique, gates="adam")
    model = make_model(config)
    model.initialize(0)
    optimizers, guard = make_optimizers(config, model, MACHINE)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        guard.step()
    groups = optimizers["matrix"].param_groups
    names = [name for group in groups for name in group["param_names"]]
    assert len(names) == 3 * len(model.table)  # packed attention, MLP up and down
    for name in names:
        assert not torch.equal(model.get_parameter(name), before[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"technique": "row_floor", "recipe": "adamw"}, "--technique row_floor: it must be none"),
        ({"technique": "mixture", "optimizer": "torch_muon"}, "none for --optimizer torch_muon"),
        ({"technique": "hyperball"}, "--gates matrix: it must be adam for --technique hyperball"),
        (
            {"technique": "hyperball", "gates": "adam", "matrix_wd": 0.1},
            "--matrix-wd 0.1: it must be 0 for --technique hyperball",
        ),
    ],
)
def test_a_technique_that_cannot_work_is_refused_by_name(changes, message):
    with pytest.raises(Refused, match=message):
        small("tiny", **{"recipe": "copyinit"} | changes)
