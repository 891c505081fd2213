"""The optimizers on one process, against textbook float64 twins, torch's own optimizers and hand-made cases."""

import copy

import pytest
import torch

from optim import Adam, Muon, NorMuon, Row, build_optimizers, reference

BETAS = (0.65, 0.95)


def parameters(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)


def assert_follows(optimizer, params, twin, steps=4, tolerance=1e-9):
    """Step both side by side; `twin(index, weight, grad, state)` returns the weight that parameter should have."""
    weights, states = [param.detach().double() for param in params], [{} for _ in params]
    for step in range(steps):
        give_gradients(params, step)
        weights = [twin(i, w, p.grad, s) for i, (w, p, s) in enumerate(zip(weights, params, states, strict=True))]
        optimizer.step()
        for weight, param in zip(weights, params, strict=True):
            torch.testing.assert_close(param.detach().double(), weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("beta2", [None, 0.9])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["spectral", "rms", "none"])
@pytest.mark.parametrize("method", ["polar_express", "newton_schulz", "normalize"])
def test_a_step_is_the_textbook_step(beta2, nesterov, scale, method):
    params = parameters((6, 12), (12, 6), (8, 8), (6, 12), (1, 12))
    options = {"momentum": 0.9, "nesterov": nesterov, "scale": scale, "method": method, "weight_decay": 0.1}
    kind, extra = (Muon, {}) if beta2 is None else (NorMuon, {"beta2": beta2})
    optimizer = kind(params, 0.05, dtype=torch.float64, **options, **extra)
    assert_follows(optimizer, params, lambda i, w, g, s: reference.muon_step(w, g, s, lr=0.05, beta2=beta2, **options))


@pytest.mark.parametrize("axis", ["stored", "rows", "cols"])
def test_groups_of_one_shape_keep_their_own_split_method_and_rates(axis):
    params = parameters(*[(4, 16)] * 7, (16, 4))
    options = [
        {"split": 4, "lr_mul": 2.0},
        {"method": "normalize", "wd_mul": 3.0},
        {"momentum": 0.5, "beta2": 0.5},
        {"split": 2, "lr": 0.01, "weight_decay": 0.3},
    ]
    groups = [{"params": params[i::4], **option} for i, option in enumerate(options)]
    optimizer = NorMuon(groups, 0.05, weight_decay=0.1, axis=axis, dtype=torch.float64)
    defaults = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.95, "beta2": 0.95, "axis": axis}
    assert_follows(optimizer, params, lambda i, w, g, s: reference.muon_step(w, g, s, **{**defaults, **options[i % 4]}))


@pytest.mark.parametrize("kind", [Muon, NorMuon])
def test_a_stack_of_matrices_steps_as_its_matrices_do(kind):
    (stack,) = parameters((3, 8, 4))
    singles = [torch.nn.Parameter(matrix.detach().clone()) for matrix in stack]
    together, apart = (kind(params, 0.1, dtype=torch.float64, split=2) for params in ([stack], singles))
    for step in range(3):
        give_gradients([stack], step)
        for single, grad in zip(singles, stack.grad, strict=True):
            single.grad = grad.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(stack.detach(), torch.stack([single.detach() for single in singles]))


def test_slices_that_fit_the_cache_take_the_same_step(monkeypatch):
    whole, cut = parameters(*[(8, 16)] * 7), parameters(*[(8, 16)] * 7)
    for params, limit in ((whole, 100), (cut, 3)):
        monkeypatch.setattr("optim.muon.batch_limit", lambda *_, limit=limit: limit)
        optimizer = NorMuon(params, 0.1, dtype=torch.float64)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b)


def test_muon_with_newton_schulz_is_close_to_the_one_in_torch():
    ours, theirs = (
        parameters((16, 48), (48, 16), dtype=torch.float32),
        parameters((16, 48), (48, 16), dtype=torch.float32),
    )
    optimizers = [
        Muon(ours, 0.02, weight_decay=0.1, method="newton_schulz", dtype=torch.bfloat16),
        torch.optim.Muon(theirs, 0.02, weight_decay=0.1, momentum=0.95),
    ]
    start = [param.detach().clone() for param in ours]
    for step in range(5):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            give_gradients(params, step)
            optimizer.step()
    for a, b, before in zip(ours, theirs, start, strict=True):
        assert (a - b).norm() < 0.03 * (b - before).norm()  # both round to bf16, in another order


@pytest.mark.parametrize("shape", [(64,), (5, 7), (50, 700), ()])  # the third is larger than a CPU piece
def test_adam_is_the_textbook_step(shape):
    params = parameters(shape, (3,))
    options = [{"lr_mul": 5.0, "wd_mul": 2.0}, {"betas": (0.8, 0.9), "eps": 1e-3}]
    groups = [{"params": [param], **option} for param, option in zip(params, options, strict=True)]
    optimizer = Adam(groups, 0.01, betas=BETAS, weight_decay=0.1)
    defaults = {"lr": 0.01, "betas": BETAS, "weight_decay": 0.1}
    assert_follows(optimizer, params, lambda i, w, g, s: reference.adam_step(w, g, s, **{**defaults, **options[i]}))


def test_adam_is_the_one_in_torch_when_eps_vanishes():
    ours, theirs = parameters((40, 3), (7,), dtype=torch.float32), parameters((40, 3), (7,), dtype=torch.float32)
    optimizers = [
        Adam(ours, 0.01, betas=(0.9, 0.95), eps=1e-20, weight_decay=0.1),
        torch.optim.AdamW(theirs, 0.01, betas=(0.9, 0.95), eps=1e-20, weight_decay=0.1),
    ]
    for step in range(10):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            give_gradients(params, step)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_bf16_adam_state_is_rounded_only_when_stored():
    (param,) = parameters((50,))
    optimizer = Adam([param], 0.01, betas=BETAS, state_dtype=torch.bfloat16)
    start = param.detach().clone()
    give_gradients([param], 0)
    exact = reference.adam_step(start, param.grad, {}, lr=0.01, betas=BETAS)
    optimizer.step()
    torch.testing.assert_close(param.detach(), exact, rtol=1e-12, atol=1e-12)
    assert optimizer.state[param]["exp_avg"].dtype == torch.bfloat16
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], (0.35 * param.grad).bfloat16())


def optimizers_for(params):
    return [
        Muon(params[:4], 0.05, weight_decay=0.1, dtype=torch.float32),
        NorMuon(params[4:8], 0.05, split=2, dtype=torch.float32),
        Adam(params[8:], 0.01, betas=BETAS),
    ]


def mixed(dtype=torch.float32):
    return parameters(*[(4, 8)] * 4, *[(8, 4)] * 4, (4, 8), (9,), dtype=dtype)


def test_a_parameter_without_gradient_keeps_every_bit_and_its_state():
    params = mixed()
    optimizers = optimizers_for(params)
    missing = [params[1], params[6], params[9]]
    for step in range(3):
        give_gradients(params, step)
        if step == 2:
            for param in missing:
                param.grad = None
            before = [param.detach().clone() for param in params]
            states = [copy.deepcopy(o.state[p]) for o in optimizers for p in missing if p in o.state]
        for optimizer in optimizers:
            optimizer.step()
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param, old) == any(param is other for other in missing)
    after = [o.state[p] for o in optimizers for p in missing if p in o.state]
    assert [list(state) for state in states] == [
        ["momentum"],
        ["momentum", "variance"],
        ["step", "exp_avg", "exp_avg_sq"],
    ]
    assert all(torch.equal(old[k], new[k]) for old, new in zip(states, after, strict=True) for k in old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divisor", [1, 4])
@pytest.mark.parametrize("nesterov", [True, False])
def test_gradients_are_only_read_and_nothing_aliases_them(dtype, divisor, nesterov):
    params = parameters((4, 8), (8, 8), dtype=dtype)
    for optimizer in (
        NorMuon(params, 0.1, dtype=dtype, nesterov=nesterov, grad_divisor=divisor),
        Adam(params, 0.1, betas=BETAS, grad_divisor=divisor),
    ):
        give_gradients(params, 0)
        before = [param.grad.clone() for param in params]
        optimizer.step()
        assert all(torch.equal(param.grad, grad) for param, grad in zip(params, before, strict=True))
        state = copy.deepcopy(optimizer.state_dict()["state"])
        for param in params:
            param.grad.fill_(3)
        for index, tensors in optimizer.state_dict()["state"].items():
            assert all(torch.equal(tensor, state[index][name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_divisor_divides_the_gradient_before_the_state_sees_it(index):
    divided, plain = mixed(), mixed()
    ours, twin = (optimizers_for(params)[index] for params in (divided, plain))
    ours.grad_divisor = 8
    for step in range(2):
        give_gradients(divided, step)
        give_gradients(plain, step)
        for param in plain:
            param.grad /= 8
        ours.step()
        twin.step()
    assert all(torch.equal(a, b) for a, b in zip(divided, plain, strict=True))
    assert_same_state(ours.state_dict(), twin.state_dict())


def test_learning_rate_and_momentum_are_read_at_every_step():
    params = parameters((6, 10))
    optimizer = Muon(params, 1.0, momentum=0.1, dtype=torch.float64)
    weight, state = params[0].detach().clone(), {}
    for step, (lr, momentum) in enumerate([(0.1, 0.85), (0.2, 0.9), (0.0, 0.95)]):
        give_gradients(params, step)
        optimizer.param_groups[0].update(lr=lr, momentum=momentum)
        weight = reference.muon_step(weight, params[0].grad, state, lr=lr, momentum=momentum)
        optimizer.step()
        torch.testing.assert_close(params[0].detach(), weight, rtol=1e-9, atol=1e-9)


def test_reset_returns_to_the_constructed_state_in_place():
    params = mixed()
    for optimizer in optimizers_for(params):
        fresh = optimizer.state_dict()
        pointers = [t.data_ptr() for state in optimizer.state.values() for t in state.values()]
        give_gradients(params, 0)
        optimizer.param_groups[0]["lr"] = 9.0
        optimizer.step()
        assert optimizer.state_dict()["param_groups"] != fresh["param_groups"]
        optimizer.reset()
        again = optimizer.state_dict()
        assert again["param_groups"] == fresh["param_groups"]
        assert_same_state(again, fresh)
        assert pointers == [t.data_ptr() for state in optimizer.state.values() for t in state.values()]


def assert_same_state(one, other):
    assert one["state"].keys() == other["state"].keys()
    for index, tensors in one["state"].items():
        assert tensors.keys() == other["state"][index].keys()
        assert all(torch.equal(tensor, other["state"][index][name]) for name, tensor in tensors.items())


def test_state_is_complete_before_the_first_step():
    for optimizer, names in zip(
        optimizers_for(mixed()),
        [{"momentum"}, {"momentum", "variance"}, {"step", "exp_avg", "exp_avg_sq"}],
        strict=True,
    ):
        state = optimizer.state_dict()["state"]
        assert len(state) == sum(len(group["params"]) for group in optimizer.param_groups)
        assert all(set(tensors) == names for tensors in state.values())


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_loaded_state_continues_as_if_never_interrupted(index):
    straight, resumed = mixed(), mixed()
    optimizer = optimizers_for(straight)[index]
    for step in range(2):
        give_gradients(straight, step)
        optimizer.step()
    snapshot = optimizer.state_dict()
    with torch.no_grad():
        for target, source in zip(resumed, straight, strict=True):
            target.copy_(source)
    give_gradients(straight, 2)
    optimizer.step()  # the snapshot must not follow

    other = optimizers_for(resumed)[index]
    other.load_state_dict(snapshot)
    give_gradients(resumed, 2)
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    assert_same_state(optimizer.state_dict(), other.state_dict())


def test_a_state_that_does_not_fit_changes_nothing():
    optimizer = NorMuon(parameters((4, 8)), 0.05)
    before = optimizer.state_dict()
    for other in (NorMuon(parameters((4, 8)), 0.1, split=2), Muon(parameters((4, 8)), 0.1)):
        with pytest.raises(ValueError, match=r"parameter 0 needs state .*variance.*build the optimizer as it was"):
            optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, this optimizer \[1\]"):
        optimizer.load_state_dict(NorMuon(parameters((4, 8), (4, 8)), 0.1).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert_same_state(optimizer.state_dict(), before)


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    (param,) = parameters((4, 4))
    optimizer = Muon([param], 0.1)

    def closure():
        loss = param.square().sum()
        loss.backward()
        return loss

    expected = param.detach().square().sum()
    assert optimizer.step(closure) == expected
    assert param.detach().square().sum() != expected


class DTensor(torch.nn.Parameter):
    """Stands for torch's class of that name, which needs a device mesh."""


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda p: Muon(p, -0.1), ValueError, r"lr must be in \[0, inf\), got -0.1; a usual value is 0.02"),
        (lambda p: Muon(p, float("nan")), ValueError, r"lr must be in .* got nan"),
        (lambda p: Muon(p, 0.1, momentum=1.0), ValueError, r"momentum must be in \[0, 1\), got 1.0"),
        (lambda p: Muon([{"params": p, "lr_mul": -1}], 0.1), ValueError, r"lr_mul must be in \[0, inf\), got -1"),
        (
            lambda p: Muon([{"params": p, "lrmul": 2}], 0.1),
            ValueError,
            r"unknown param group key 'lrmul'; known: lr, lr_mul",
        ),
        (lambda p: Muon(p, 0.1, scale="big"), ValueError, r"unknown scale 'big'; choose one of spectral, rms, none"),
        (lambda p: Muon(p, 0.1, method="qr"), ValueError, r"unknown method 'qr'; choose one of polar_express"),
        (lambda p: Muon(p, 0.1, split=3), ValueError, r"split must divide 8, the longer side of parameter 0, got 3"),
        (lambda p: Muon(p, 0.1, split=0), ValueError, r"split must divide 8"),
        (lambda p: Muon(p, 0.1, dtype="bf16"), ValueError, r"floating-point torch.dtype, got 'bf16'"),
        (lambda p: Muon(p, 0.1, grad_divisor=0), ValueError, r"grad_divisor must be a positive number, got 0"),
        (
            lambda p: Muon([("gain", p[0].detach()[0])], 0.1),
            ValueError,
            r"parameter gain has shape \(8,\).*give it to Adam",
        ),
        (lambda p: NorMuon(p, 0.1, beta2=1.5), ValueError, r"beta2 must be in \[0, 1\), got 1.5"),
        (lambda p: NorMuon(p, 0.1, axis="both"), ValueError, r"unknown axis 'both'; choose one of stored, rows, cols"),
        (lambda p: Muon(p, 0.1, beta2=0.9), TypeError, r"beta2"),
        (
            lambda p: Adam(p, 0.1, betas=(0.9, 1.0)),
            ValueError,
            r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)",
        ),
        (lambda p: Adam(p, 0.1, betas=BETAS, eps=-1.0), ValueError, r"eps must be in \[0, inf\), got -1.0"),
        (lambda p: Adam(p, 0.1, betas=BETAS, state_dtype=torch.int8), ValueError, r"floating-point, got torch.int8"),
        (lambda p: Adam([p[0].detach().T], 0.1, betas=BETAS), ValueError, r"not contiguous"),
        (lambda p: Adam([("embed", DTensor(p[0]))], 0.1, betas=BETAS), TypeError, r"parameter embed is a DTensor"),
    ],
)
def test_bad_settings_are_refused_with_value_rule_and_fix(build, error, message):
    with pytest.raises(error, match=message):
        build([torch.nn.Parameter(torch.ones(4, 8))])


def test_late_parameter_groups_are_refused():
    optimizer = Muon(parameters((4, 4)), 0.1)
    with pytest.raises(RuntimeError, match="build a new optimizer"):
        optimizer.add_param_group({"params": parameters((4, 4))})


def table_and_model():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "mlp": torch.nn.Linear(4, 8)})
    rows = [
        Row("embed.*", "adam", {"lr_mul": 75.0}),
        Row("*.bias", "adam"),
        Row("mlp.weight", "muon", {"split": 2}),
    ]
    factories = {"adam": lambda groups: Adam(groups, 0.008, betas=BETAS), "muon": lambda groups: NorMuon(groups, 0.03)}
    return model, rows, factories


def test_a_table_sends_each_parameter_to_its_optimizer_with_its_options():
    model, rows, factories = table_and_model()
    built = build_optimizers(model.named_parameters(), rows, factories)
    found = {
        (name, group["param_names"][0]): (group["lr_mul"], group.get("split"))
        for name, optimizer in built.items()
        for group in optimizer.param_groups
    }
    assert found == {
        ("adam", "embed.weight"): (75.0, None),
        ("adam", "mlp.bias"): (1.0, None),
        ("muon", "mlp.weight"): (1.0, 2),
    }
    optimized = {param for optimizer in built.values() for group in optimizer.param_groups for param in group["params"]}
    assert optimized == set(model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[1:], r"parameter embed.weight matches no row"),
        (lambda rows: [*rows, Row("mlp.*", "adam")], r"parameter mlp.weight matches 2 rows: 'mlp.weight', 'mlp.\*'"),
        (lambda rows: [*rows, Row("gate", "adam")], r"row 'gate' matches no parameter"),
        (lambda rows: [*rows[:2], Row("mlp.weight", "lion")], r"names optimizer 'lion', not one of adam, muon"),
    ],
)
def test_an_incomplete_or_ambiguous_table_lists_the_offenders(change, message):
    model, rows, factories = table_and_model()
    with pytest.raises(ValueError, match=message):
        build_optimizers(model.named_parameters(), change(rows), factories)
