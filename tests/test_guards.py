"""Guards: which steps are skipped, and that a skipped one leaves no trace, bit for bit."""

import math
import warnings

import pytest
import torch
from safetensors.torch import load, save
from small_optim import bits, give_gradients, members
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

import optim.muon
from optim import AdamW, Guard, Held, Muon, NorMuon, RowAdam, Skip, SpikeRule
from optim.update import new_values

NAN, INF = math.nan, math.inf


# ---- models, their gradients, and everything that a step may change

KINDS = {  # optimizer, its options, shapes of its parameters
    "muon": (Muon, {"lr": 0.05, "weight_decay": 0.1}, [(6, 12), (12, 6), (6, 12)]),
    "normuon": (
        NorMuon, {"lr": 0.05, "weight_decay": 0.1, "split": 2}, [(8, 16), (16, 8), (2, 4, 8)],
    ),
    "adam": (
        AdamW, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.65, 0.95)}, [(9,), (5, 7), ()],
    ),
    "rows": (RowAdam, {"lr": 0.01, "weight_decay": 0.1}, [(5, 7), (3, 4)]),
    "adamw of torch": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}, [(6, 4)]),
    "sgd of torch": (torch.optim.SGD, {"lr": 0.01}, [(6, 4)]),
    "muon of torch": (torch.optim.Muon, {"lr": 0.01}, [(6, 4)]),
    "nadam of torch": (torch.optim.NAdam, {"lr": 0.01}, [(6, 4)]),
}  # fmt: skip
OURS, TORCH = tuple(KINDS)[:4], tuple(KINDS)[4:]


def model(kinds=OURS, dtype=torch.float32, device="cpu", **options):
    """Parameters by name, and an optimizer of each kind over its own. Some weights are -0.0."""
    generator = torch.Generator().manual_seed(0)
    params, optimizers = {}, []
    for kind in kinds:
        optimizer, own_options, shapes = KINDS[kind]
        own = {}
        for index, shape in enumerate(shapes):
            weight = torch.randn(shape, generator=generator)
            weight.view(-1)[0] = -0.0
            own[f"{kind}.{index}"] = torch.nn.Parameter(weight.to(device, dtype))
        params |= own
        given = own_options | (options if kind in OURS else {})
        optimizers.append(optimizer(own.items(), **given))
    return params, optimizers


def traces(params, optimizers):
    """Bytes of all that a step may change."""
    return bits([params, [optimizer.state_dict()["state"] for optimizer in optimizers]])


FAULTS = {
    "nan": lambda grad: grad.reshape(-1)[-1:].fill_(NAN),
    "inf": lambda grad: grad.reshape(-1)[-1:].fill_(-INF),
    "overflow": lambda grad: grad.fill_(3e38),  # finite, but not its norm
}


def trained(steps, faults=(), guarded=True, **options):
    """Traces after these steps; faults: {step: (parameter, name of what its gradient has)}."""
    params, optimizers = model(**options)
    guard = Guard(optimizers)
    for step in steps:
        give_gradients(params.values(), step)
        bad = None
        if step in faults:
            bad, fault = faults[step]
            FAULTS[fault](params[bad].grad)
        gradients = bits([param.grad for param in params.values()])
        if guarded:
            skip = guard.explain(guard.step())
            assert (skip and skip.tensor) == bad
        else:
            for optimizer in optimizers:
                optimizer.step()
        assert bits([param.grad for param in params.values()]) == gradients
    return traces(params, optimizers)


RUNS = [(OURS, name) for name in ("muon.2", "normuon.0", "adam.1", "rows.0")]
RUNS += [((kind, "adam"), f"{kind}.0") for kind in TORCH]


@pytest.mark.parametrize(("kinds", "name"), RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("at_once", [("cpu",), ()])  # or selecting by the flag, as on a GPU
def test_a_run_with_bad_gradients_is_the_run_without_those_steps_to_the_bit(
    kinds, name, dtype, cautious, at_once, monkeypatch
):
    monkeypatch.setattr("optim.base.READ_AT_ONCE", at_once)
    options = {"kinds": kinds, "dtype": dtype, "cautious": cautious}
    faults = {0: (name, "nan"), 3: (name, "inf"), 4: (name, "overflow"), 5: ("adam.0", "nan")}
    taken = [step for step in range(8) if step not in faults]
    assert trained(range(8), faults, **options) == trained(taken, guarded=False, **options)


def test_a_gradient_that_float16_holds_is_not_taken_for_an_overflow():
    param = torch.nn.Parameter(torch.ones(256, 256, dtype=torch.float16))
    for optimizer in (AdamW([param], 1.0, eps=1e-3), torch.optim.SGD([param], 1e-4)):
        guard, before = Guard([optimizer]), bits(param)
        # The norm is 76,800, and the largest float16 65,504.
        param.grad = torch.full_like(param, 300.0)
        assert guard.explain(guard.step()) is None
        assert bits(param) != before


@pytest.mark.parametrize("options", [
    {}, {"spike": SpikeRule()}, {"nonfinite": False}, {"clip": 1e-3}
], ids=str)  # fmt: skip
def test_a_verdict_gives_the_gradient_norm_of_each_optimizer_before_any_clip(options):
    params, optimizers = model()
    guard = Guard(optimizers, **options)
    for stepping in (optimizers, optimizers[:2]):
        give_gradients(params.values(), 0)
        norms = [0.0] * len(optimizers)
        for number, optimizer in enumerate(stepping):
            gradients = [param.grad.flatten() for param in members(optimizer)]
            norms[number] = torch.cat(gradients).double().norm().item()
        verdict = guard.step(torch.tensor(3.0), only=stepping)
        assert guard.gradient_norms(verdict) == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_a_verdict_gives_the_norm_and_the_first_bad_tensor(clip):
    params, optimizers = model()
    guard = Guard(optimizers, clip=clip)
    give_gradients(params.values(), 0)
    assert guard.explain(guard.step()) is None
    before = traces(params, optimizers)
    for name in ("rows.1", "adam.1", "normuon.2", "muon.1"):  # each comes before the last
        FAULTS["inf"](params[name].grad)
        assert guard.explain(guard.step()) == Skip("nonfinite", INF, name)
    assert traces(params, optimizers) == before


# ---- clipping


@pytest.mark.parametrize("kinds", [OURS, ("adam", "adamw of torch", "sgd of torch")])
@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_a_clipped_step_is_that_after_torchs_own_clipping(kinds, clip):
    left = []
    for by_guard in (True, False):
        params, optimizers = model(kinds, dtype=torch.float64)
        guard = Guard(optimizers, clip=clip if by_guard else None)
        guard.divide_by(3.0)
        for step in range(4):
            give_gradients(params.values(), step)
            if not by_guard:
                torch.nn.utils.clip_grad_norm_(params.values(), 3 * clip)
            guard.step()
        left.append(params)
    torch.testing.assert_close(left[0], left[1], rtol=1e-6, atol=1e-9)
    assert clip == 0.5 or bits(left[0]) == bits(left[1])  # a norm below the clip changes no bit


def test_a_sum_that_is_dropped_for_a_nan_does_not_clip_the_others_to_nothing():
    params, (muon, adam) = model(("muon", "adam"))
    guard = Guard([muon, adam], clip=1.0)
    give_gradients(params.values(), 0)
    for name in ("muon.0", "adam.1"):
        FAULTS["nan"](params[name].grad)
    guard.step(only=[muon])  # skipped; the sum of AdamW's gradients has a NaN
    give_gradients([params[name] for name in params if name.startswith("muon.")], 1)
    before = bits(params)
    assert guard.explain(guard.step()) is None
    moved = {name for name in params if bits(params[name]) != before[name]}
    assert moved == {name for name in params if name.startswith("muon.")}
    assert not any(param.isnan().any() for param in params.values())


# ---- an orthogonalization that fails though the gradient is clean


@pytest.fixture(params=["nan", "inf", "all"])
def failing(request, monkeypatch):
    """A list; while it holds anything, matrices with an element beyond 1e4 get a bad direction."""
    real, on = optim.muon.orthogonalized, []

    def orthogonalized(G, choice):
        X = real(G, choice)
        marked = (G.abs() > 1e4).flatten(1).any(1) & bool(on)
        places = slice(None) if request.param == "all" else slice(1, 2)
        X[marked, 0, places] = INF if request.param == "inf" else NAN
        return X

    monkeypatch.setattr("optim.muon.orthogonalized", orthogonalized)
    return on


# Parameters whose last matrix fails, and how many matrices they have.
FAILED = {"muon": {"muon.1": 1}, "normuon": {"normuon.0": 2, "normuon.2": 4}}


def mark(params, kind):
    for name in FAILED[kind]:
        params[name].grad.view(-1)[-1] = 1e6


def with_failures(kind, failing, **options):
    """Parameters and state before and after a step in which some last matrices fail, and verdict.

    Without `failing`, the last matrices get the same gradients and are stepped.
    """
    params, optimizers = model((kind, "adam"), **options)
    guard = Guard(optimizers, spike=SpikeRule())
    for step in range(3):
        give_gradients(params.values(), step)
        before = [{n: p.detach().clone() for n, p in params.items()}, state_of(optimizers)]
        if step == 2:
            mark(params, kind)
            failing.append("on")
        verdict = guard.step(torch.tensor(3.0))
    failing.clear()
    return before, [params, state_of(optimizers)], guard, verdict


def state_of(optimizers):
    return {name: tensor for each in optimizers for name, tensor in each.named_state()}


@pytest.mark.filterwarnings("ignore:.* orthogonalized parameter")
@pytest.mark.parametrize("kind", FAILED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("at_once", [("cpu",), ()])  # or selecting by the flag, as on a GPU
def test_a_matrix_that_fails_keeps_weights_and_variance_to_the_bit_and_all_else_steps(
    kind, dtype, cautious, at_once, failing, monkeypatch
):
    monkeypatch.setattr("optim.base.READ_AT_ONCE", at_once)
    options = {"dtype": dtype, "cautious": cautious}
    before, after, guard, verdict = with_failures(kind, failing, **options)
    _, sound, _, none = with_failures(kind, [], **options)
    assert guard.explain(verdict) is None
    assert guard.held(verdict) == Held(len(FAILED[kind]), next(iter(FAILED[kind])))
    assert guard.held(none) is None
    for old, new, other in zip(before, after, sound, strict=True):
        for name in new:
            was, now, healthy = (bits(each[name]) for each in (old, new, other))
            matrices = FAILED[kind].get(name.removesuffix(".variance"))
            last = len(was) // matrices if matrices else 0
            first = len(was) - last
            assert now[:first] == healthy[:first]
            assert now[first:] == was[first:]
            assert not last or healthy[first:] != was[first:]


@pytest.mark.parametrize("rank", [None, 0, 1])  # None: one process, else as with DDP
@pytest.mark.parametrize("kind", FAILED)
def test_matrices_that_fail_are_one_warning_of_the_first_rank(kind, rank, failing, monkeypatch):
    if rank is not None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    params, (optimizer,) = model((kind,))
    failing.append("on")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(2):
            give_gradients(params.values(), step)
            mark(params, kind)
            optimizer.step()
            assert optimizer.failed.sum() == len(FAILED[kind])
    named = [f"parameter {next(iter(FAILED[kind]))} to" in str(each.message) for each in said]
    assert named == ([] if rank == 1 else [True])


@pytest.mark.parametrize("kind", FAILED)
def test_a_gradient_that_is_not_finite_is_no_failure_of_a_matrix_and_stays_visible(kind, recwarn):
    params, optimizers = model((kind,))
    guard = Guard(optimizers, nonfinite=False)
    for step in range(3):
        give_gradients(params.values(), step)
        if step == 1:
            params[f"{kind}.1"].grad.view(-1)[0] = NAN
        assert guard.held(guard.step()) is None
    assert params[f"{kind}.1"].isnan().any()
    assert not recwarn.list


# ---- gradients that are summed over several steps


def in_sums(period, bad, guarded):
    """Traces of 12 steps whose AdamW steps every `period`-th; bad: steps with a NaN for Muon.

    Without a guard they leave out the bad steps, and Adam's where one of them is summed.
    """
    params, (muon, adam) = model(("muon", "adam"))
    guard = Guard([muon, adam])
    for step in range(12):
        last = step % period == period - 1
        give_gradients(params.values(), step, add=True)
        if guarded:
            if step in bad:
                FAULTS["nan"](params["muon.1"].grad)
            saved, guard = save(guard.state_dict()), Guard([muon, adam])
            guard.load_state_dict(load(saved))  # as after a resume
            guard.step(only=[muon, adam, muon] if last else [muon])  # each once
        elif step not in bad:
            muon.step()
        if last:
            if not guarded and not any(step - period < number <= step for number in bad):
                adam.step()
            adam.zero_grad()
        muon.zero_grad()
    return traces(params, [muon, adam])


@pytest.mark.parametrize("period", [2, 3])
@pytest.mark.parametrize("bad", [(), (0,), (2,), (3,), (2, 3), (1, 6), (5, 6, 7)])
def test_a_sum_with_a_skipped_step_is_dropped_whole_and_the_next_is_not_also_resumed(period, bad):
    assert in_sums(period, bad, guarded=True) == in_sums(period, bad, guarded=False)


# ---- nothing waits for the device


@pytest.mark.parametrize("rule", [None, SpikeRule()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_guard_follows_its_parameters_to_a_device_that_holds_no_values(rule, dtype):
    _, optimizers = model(dtype=dtype, cautious=True, compiled=False)
    guard = Guard(optimizers, spike=rule, clip=1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [torch.nn.Parameter(param.to("meta")) for param in group["params"]]
        for param in members(optimizer):
            param.grad = torch.empty_like(param)
        optimizer.step()
    loss = torch.empty((), device="meta")
    guard.step(loss, only=optimizers[:1])
    verdict = guard.step(loss)
    assert verdict.device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):
        guard.explain(verdict)
    theirs = torch.optim.SGD(members(optimizers[0]))
    assert "waits for the device once a step" in Guard([theirs]).describe()


# ---- compiled


@pytest.mark.parametrize("kinds", [("muon", "normuon"), ("adam", "rows")])
def test_a_compiled_update_is_the_eager_one_and_writes_to_no_input(kinds, monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(new_values, dynamic=False, backend=counter)

    def watched(*given):
        tensors = [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]
        before = [tensor._version for tensor in tensors]
        found = compiled(*given)
        assert [tensor._version for tensor in tensors] == before
        return found

    monkeypatch.setattr("optim.base.compiled_values", lambda: watched)
    monkeypatch.setattr("optim.base.READ_AT_ONCE", ())
    seen = []
    for choice in (False, True):
        params, optimizers = model(kinds, compiled=choice)
        guard = Guard(optimizers)
        for step in range(5):
            give_gradients(params.values(), step)
            if step == 2:
                FAULTS["inf"](params[f"{kinds[0]}.1"].grad)
            for group in optimizers[0].param_groups:  # what OneCycleLR changes
                beta = 0.9 - 0.1 * step
                group.update(lr=0.01 * (step + 1), momentum=beta, betas=(beta, 0.95))
            guard.step()
            if step == 1:
                frames = counter.frame_count
        seen.append([params, [optimizer.state_dict()["state"] for optimizer in optimizers]])
    torch.testing.assert_close(seen[1], seen[0], rtol=2e-5, atol=2e-5)
    assert 0 < frames == counter.frame_count


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [AdamW, Muon, NorMuon])
def test_on_a_gpu_a_compiled_update_is_the_eager_one(kind, monkeypatch):
    torch._dynamo.reset()
    strict = torch.compile(new_values, dynamic=False)  # an error is none that is kept quiet
    monkeypatch.setattr("optim.base.compiled_values", lambda: strict)
    options = {} if kind is AdamW else {"dtype": torch.float32}  # of the products
    weights = []
    for compiled in (False, True):
        random = torch.Generator("cuda").manual_seed(0)
        start = torch.randn(8, 256, 256, generator=random, device="cuda")  # many blocks
        own = [weight.clone().requires_grad_() for weight in start]
        optimizer = kind(own, lr=0.01, weight_decay=0.1, compiled=compiled, **options)
        for _ in range(5):
            for weight in own:
                weight.grad = torch.randn(256, 256, generator=random, device="cuda")
            optimizer.step()
        weights.append(torch.stack(own).detach())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_guarded_step_never_waits_for_the_gpu():
    params, optimizers = model(device="cuda")
    give_gradients(params.values(), 0)
    guard, loss = Guard(optimizers, spike=SpikeRule(), clip=1.0), torch.tensor(3.0, device="cuda")
    guard.step(loss)  # kernels are loaded
    guard.step(loss, only=optimizers[:1])
    verdicts = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            loss.item()  # a wait is seen
        for optimizer in optimizers:
            optimizer.step()
        verdicts.append(guard.step(loss, only=optimizers[:1]))
        verdicts.append(guard.step(loss))
        params["adam.1"].grad.fill_(NAN)
        verdicts.append(guard.step(loss))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [skip and skip.tensor for skip in map(guard.explain, verdicts)] == [None, None, "adam.1"]
