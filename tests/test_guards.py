"""Guards: which steps are skipped, and that a skipped one leaves no trace, bit for bit."""

import math
import warnings
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load, save
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from optim import Adam, Guard, Muon, NorMuon, Skip, SpikeRule
from optim.base import update
from optim.orthogonalize import LARGEST_SINGULAR_VALUE

NAN, INF = math.nan, math.inf
TOLERANT = SpikeRule(
    window=8, start=3, least_spread=0.2, least_log_spread=0.2
)  # of gradient norms that vary: spikes are 2.2 times the usual


# ---- models, their gradients, and everything that a step may change

SHAPES = {
    "muon": [(6, 12), (12, 6), (6, 12)],
    "normuon": [(8, 16), (16, 8), (2, 4, 8)],
    "adam": [(9,), (5, 7), ()],
}
FACTORIES = {
    "muon": lambda params, **options: Muon(params, 0.05, **{"weight_decay": 0.1, **options}),
    "normuon": lambda params, **options: NorMuon(
        params, 0.05, split=2, weight_decay=0.1, **options
    ),
    "adam": lambda params, **options: Adam(
        params, 0.01, betas=(0.65, 0.95), weight_decay=0.1, **options
    ),
}


def model(kinds=("muon", "normuon", "adam"), dtype=torch.float32, **options):
    """Parameters by name, and an optimizer of each kind over its own. Some weights are -0.0."""
    generator = torch.Generator().manual_seed(0)
    params = {
        f"{kind}.{index}": torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for kind in kinds
        for index, shape in enumerate(SHAPES[kind])
    }
    for param in params.values():
        param.data.reshape(-1)[0] = -0.0
    named = {
        kind: [(name, param) for name, param in params.items() if name.startswith(kind + ".")]
        for kind in kinds
    }
    return params, [FACTORIES[kind](named[kind], **options) for kind in kinds]


def give_gradients(params, step, add=False):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params.values():
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = param.grad + grad if add and param.grad is not None else grad


def on_a_device(monkeypatch, at_once=()):
    """Let this CPU be one whose flags are not read."""
    monkeypatch.setattr("optim.base.READ_AT_ONCE", at_once)
    monkeypatch.setattr("optim.foreign.READ_AT_ONCE", at_once)


def bits(thing):
    """Containers with every tensor as its bytes, so that -0.0 and NaN count."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(thing, Mapping):
        return {key: bits(value) for key, value in thing.items()}
    return [bits(value) for value in thing] if isinstance(thing, (list, tuple)) else thing


def traces(params, optimizers):
    """Bytes of all that a step may change."""
    return bits([params, [optimizer.state_dict()["state"] for optimizer in optimizers]])


FAULTS = {
    "nan": lambda grad: grad.reshape(-1)[-1:].fill_(NAN),
    "inf": lambda grad: grad.reshape(-1)[-1:].fill_(-INF),
    "overflow": lambda grad: grad.fill_(3e38),  # finite, but not its norm
}
OPTIONS = [{}, {"cautious": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kinds", [("muon",), ("normuon",), ("adam",), ("muon", "normuon", "adam")], ids="+".join
)
@pytest.mark.parametrize("earlier", [0, 2])
def test_a_skipped_step_changes_no_bit_of_weights_and_state_and_no_gradient(
    earlier, kinds, dtype, options
):
    params, optimizers = model(kinds, dtype, **options)
    step = optimizers[0].step if len(kinds) == 1 else Guard(optimizers).step
    for number in range(earlier):
        give_gradients(params, number)
        step()
    for fault in FAULTS.values():
        before = traces(params, optimizers)
        give_gradients(params, earlier)
        fault(params[f"{kinds[-1]}.1"].grad)
        gradients = bits([param.grad for param in params.values()])
        step()
        assert traces(params, optimizers) == before
        assert bits([param.grad for param in params.values()]) == gradients
    give_gradients(params, earlier)
    step()
    after = traces(params, optimizers)
    changed = [before[0][name] != after[0][name] for name in params]
    for old, new in zip(before[1], after[1], strict=True):
        changed += [old[index][name] != new[index][name] for index in old for name in old[index]]
    assert all(changed)


def trained(steps, faults=None, guarded=True, **options):
    """(traces, guard) after these steps; faults: {(step, parameter): function of its gradient}."""
    params, optimizers = model(**options)
    guard = Guard(optimizers) if guarded else None
    for step in steps:
        give_gradients(params, step)
        for (number, name), fault in (faults or {}).items():
            if number == step:
                fault(params[name].grad)
        if guard is not None:
            guard.step()
        else:
            for optimizer in optimizers:
                optimizer.step()
    return traces(params, optimizers), guard


@pytest.mark.parametrize("name", ["muon.2", "normuon.0", "adam.1"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "at_once", [("cpu",), ()]
)  # reading the flag, and selecting by it as on a GPU
def test_a_run_with_a_bad_gradient_is_the_run_without_that_step(fault, name, at_once, monkeypatch):
    on_a_device(monkeypatch, at_once)
    for dtype in (torch.float32, torch.bfloat16):
        faults = {(step, name): FAULTS[fault] for step in (0, 3, 4)}
        faulty, guard = trained(range(7), faults, dtype=dtype)
        without, _ = trained([1, 2, 5, 6], dtype=dtype)
        assert faulty == without
        assert guard.report() == {
            "steps": 7, "nonfinite": 3, "spike": 0, "in_a_row": 0, "last_skip": 5,
            "last_tensor": name,
        }  # fmt: skip


def test_a_gradient_that_float16_holds_is_not_taken_for_an_overflow():
    param = torch.nn.Parameter(torch.ones(256, 256, dtype=torch.float16))
    for optimizer in (
        Adam([param], 1.0, betas=(0.9, 0.95), eps=1e-3),
        torch.optim.SGD([param], 1e-4),
    ):
        guard, before = Guard([optimizer]), bits(param)
        param.grad = torch.full_like(
            param, 300.0
        )  # the norm is 76,800, and the largest float16 65,504
        assert guard.explain(guard.step()) is None
        assert bits(param) != before


def test_a_verdict_gives_the_norm_and_the_first_bad_tensor():
    params, optimizers = model()
    guard = Guard(optimizers)
    give_gradients(params, 0)
    assert guard.explain(guard.step()) is None
    for name in ("adam.1", "normuon.2", "muon.1"):  # each comes before the last
        FAULTS["inf"](params[name].grad)
        assert guard.explain(guard.step()) == Skip("nonfinite", INF, name)
        assert guard.report()["last_tensor"] == name
    assert guard.report() | {"last_tensor": None} == {
        "steps": 4, "nonfinite": 3, "spike": 0, "in_a_row": 3, "last_skip": 4,
        "last_tensor": None,
    }  # fmt: skip


# ---- orthogonalizations gone wrong


@pytest.fixture
def spoil(monkeypatch):
    """Lets the last matrix of such a shape go wrong in every orthogonalization."""
    import optim.muon

    right = optim.muon.orthogonalized

    def start(shape, change):
        def wrong(G, choice):
            result = right(G, choice)
            if tuple(G.shape[-2:]) == shape:
                change(result)
            return result

        monkeypatch.setattr(optim.muon, "orthogonalized", wrong)

    return start


WRONG = {
    "nan": lambda result: result[-1, 0, :1].fill_(NAN),
    "inf": lambda result: result[-1, 0, :1].fill_(INF),
    "beyond": lambda result: result[-1].mul_(4 * LARGEST_SINGULAR_VALUE),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_matrix_whose_orthogonalization_went_wrong_stands_still_and_its_optimizer_falls_back(
    kind, spoil
):
    params, optimizers = model(("muon",), weight_decay=0.0)
    spoil((6, 12), WRONG[kind])
    guard, before = Guard(optimizers), bits(params)
    give_gradients(params, 0)
    verdict = guard.step()
    with pytest.warns(UserWarning, match="falls back to backend 'plain'"):
        assert guard.explain(verdict) is None
    assert [name for name in params if bits(params[name]) == before[name]] == ["muon.2"]
    assert {group["backend"] for group in optimizers[0].param_groups} == {"plain"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.explain(guard.step())  # said once


def test_without_the_guard_a_wrong_orthogonalization_is_in_the_weights(spoil):
    params, (optimizer,) = model(("muon",), nonfinite_guard=False)
    spoil((6, 12), WRONG["nan"])
    give_gradients(params, 0)
    optimizer.step()
    assert [name for name, param in params.items() if param.isnan().any()] == ["muon.2"]


# ---- gradients that are summed over several steps


def in_sums(steps, period, bad=(), dropped=(), guarded=True):
    """Traces of a run whose Adam steps every `period`-th step; bad: steps with a NaN for Muon.

    Unguarded, it leaves out the bad steps, and Adam's step where the sum is `dropped`.
    """
    params, optimizers = model(("muon", "adam"))
    muon, adam = optimizers
    guard = Guard(optimizers) if guarded else None
    for step in range(steps):
        last = step % period == period - 1
        if guarded or step not in bad:
            give_gradients(params, step, add=True)
        if guard is not None:
            if step in bad:
                FAULTS["nan"](params["muon.1"].grad)
            guard.step(only=optimizers if last else [muon])
        else:
            if step not in bad:
                muon.step()
            if last and step // period not in dropped:
                adam.step()
        muon.zero_grad()
        if last:
            adam.zero_grad()
    return traces(params, optimizers), guard


@pytest.mark.parametrize("period", [2, 3])
@pytest.mark.parametrize("bad", [(0,), (2,), (3,), (2, 3), (1, 6), (5, 6, 7)])
def test_a_sum_that_contains_a_skipped_step_is_dropped_whole_and_the_next_is_not(period, bad):
    faulty, guard = in_sums(12, period, bad)
    without, _ = in_sums(12, period, bad, dropped={step // period for step in bad}, guarded=False)
    assert faulty == without
    assert guard.report()["nonfinite"] == len(bad)
    clean, _ = in_sums(12, period)
    assert faulty != clean == in_sums(12, period, guarded=False)[0]


# ---- optimizers of torch

TORCH = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, amsgrad=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "adamw for": lambda params: torch.optim.AdamW(params, 0.01, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, 0.01),
    "sgd momentum": lambda params: torch.optim.SGD(
        params, 0.01, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "muon": lambda params: torch.optim.Muon(params, 0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.01, momentum=0.9, centered=True),
}


class Replacing(torch.optim.Optimizer):
    """Momentum that is a new tensor after every step."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.state[param]["mean"] = 0.9 * self.state[param].get("mean", 0) + param.grad
            param -= 0.1 * self.state[param]["mean"]


TORCH["replacing"] = Replacing


def foreign_run(build, steps, faults=(), guarded=True):
    """Traces after each step of an optimizer that is not ours, stepped beside our Adam."""
    generator = torch.Generator().manual_seed(0)
    theirs = {str(i): torch.nn.Parameter(torch.randn(6, 4, generator=generator)) for i in range(3)}
    ours = {"adam": torch.nn.Parameter(torch.ones(3))}
    optimizers = [build(list(theirs.values())), Adam(list(ours.values()), 0.1, betas=(0.9, 0.95))]
    params, seen = theirs | ours, []
    guard = Guard(optimizers) if guarded else None
    seen.append(traces(params, optimizers))
    for step in steps:
        give_gradients(params, step)
        if step in faults:
            FAULTS["nan"](params[faults[step]].grad)
        if guard is not None:
            guard.step()
        else:
            for optimizer in optimizers:
                optimizer.step()
        seen.append(traces(params, optimizers))
    return seen, guard


@pytest.mark.parametrize("at_once", [("cpu",), ()])  # reading the flag, and selecting by it
@pytest.mark.parametrize("name", TORCH)
def test_an_optimizer_of_torch_is_put_back_as_if_the_step_had_never_been(
    name, at_once, monkeypatch
):
    on_a_device(monkeypatch, at_once)
    guarded, guard = foreign_run(TORCH[name], range(7), {0: "1", 3: "2", 4: "adam"})
    alone, _ = foreign_run(TORCH[name], [1, 2, 5, 6], guarded=False)
    assert [guarded[step] for step in (0, 1, 3, 4, 5)] == [alone[step] for step in (0, 0, 2, 2, 2)]
    assert guarded[-1] == alone[-1]
    assert (guard.report()["nonfinite"], guard.report()["last_tensor"]) == (
        3,
        "0",
    )  # the fourth is Adam's first


def test_a_step_counter_on_the_host_beside_weights_on_a_device_is_refused():
    param = torch.nn.Parameter(torch.ones(3, device="meta"))  # the device that every machine has
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param])
    optimizer.step()
    with pytest.raises(TypeError, match="step of parameter 0 in AdamW is kept on the host"):
        Guard([optimizer]).step()


# ---- nothing waits for the device


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a value."""

    NAMES = (
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::is_nonzero",
        "aten::equal",
        "aten::nonzero",
    )

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.name().partition(".")[0] in self.NAMES:
            self.found.append(operation.name())
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch):
    """What the host has read, while this test runs: operations and methods."""
    mode = Reads()

    def counted(name):
        right = getattr(torch.Tensor, name)

        def method(tensor, *args, **kwargs):
            mode.found.append(name)
            return right(tensor, *args, **kwargs)

        return method

    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    with mode:
        yield mode.found


@pytest.mark.parametrize("rule", [None, SpikeRule()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_guarded_step_reads_nothing_on_the_host(reads, dtype, rule, monkeypatch):
    params, optimizers = model(dtype=dtype, cautious=True)
    guard, loss = Guard(optimizers, spike=rule), torch.tensor(3.0)
    on_a_device(monkeypatch)
    for step in range(2):
        give_gradients(params, step)
        reads.clear()
        for optimizer in optimizers:
            optimizer.step()
        guard.step(loss, only=optimizers[:1])
        verdict = guard.step(loss)
        assert reads == []
    assert guard.explain(verdict) is None
    assert reads != []  # reading is seen


@pytest.mark.parametrize("name", ["adamw", "adamw fused", "sgd momentum", "sgd"])
def test_an_optimizer_of_torch_is_read_at_its_first_step_alone(reads, name, monkeypatch):
    on_a_device(monkeypatch)
    param = torch.nn.Parameter(torch.ones(4, 4))
    guard, waits = Guard([TORCH[name]([param])]), []
    for _ in range(4):
        param.grad = torch.ones(4, 4)
        reads.clear()
        guard.step()
        waits.append("__bool__" in reads)
    assert waits == [name != "sgd", False, False, False]


@pytest.mark.parametrize("rule", [None, SpikeRule()])
def test_a_guarded_step_runs_on_a_device_that_holds_no_values(rule):
    params, _ = model()
    params = {
        name: torch.nn.Parameter(torch.empty_like(param, device="meta"))
        for name, param in params.items()
    }
    optimizers = [
        NorMuon([params["normuon.0"], params["normuon.1"]], 0.1, weight_decay=0.1, cautious=True),
        Muon([params["muon.0"]], 0.1, dtype=torch.float32),
        Adam([params["adam.0"], params["adam.2"]], 0.1, betas=(0.9, 0.95)),
        torch.optim.SGD([params["adam.1"]], 0.1, momentum=0.9),
    ]
    for param in params.values():
        param.grad = torch.empty_like(param)
    optimizers[-1].step()  # creates its state
    guard = Guard(optimizers, spike=rule)
    loss = torch.empty((), device="meta")
    guard.step(loss, only=optimizers[:1])
    assert guard.step(loss).device.type == "meta"
    with pytest.raises(RuntimeError, match="cannot be called on meta"):
        guard.report()


def addresses(guard, optimizers):
    tensors = [*guard._state().values()]
    tensors += [
        tensor
        for optimizer in optimizers
        for state in optimizer.state.values()
        for tensor in state.values()
    ]
    return [tensor.data_ptr() for tensor in tensors]


def test_all_state_stays_at_its_address_as_a_captured_graph_needs_it():
    params, optimizers = model()
    guard = Guard(optimizers, spike=SpikeRule())
    give_gradients(params, 0)
    before = addresses(guard, optimizers)
    guard.step(torch.tensor(3.0))
    guard.step(torch.tensor(3.0), only=optimizers[:1])
    assert addresses(guard, optimizers) == before


# ---- compiled and captured


@pytest.mark.parametrize("kinds", [("muon", "normuon"), ("adam",)])
def test_a_compiled_update_is_the_eager_one_and_a_new_rate_compiles_nothing(kinds, monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(update, dynamic=False, backend=counter)
    monkeypatch.setattr("optim.base.compiled_update", lambda: compiled)
    on_a_device(monkeypatch)
    seen = []
    for choice in (False, True):
        params, optimizers = model(kinds, compiled=choice)
        guard = Guard(optimizers, spike=TOLERANT)
        for step in range(5):
            give_gradients(params, step)
            if step == 2:
                FAULTS["inf"](params[f"{kinds[0]}.1"].grad)
            for group in optimizers[0].param_groups:
                group["lr"] = 0.01 * (step + 1)
            guard.step(torch.tensor(3.0))
            if step == 1 and choice:
                frames = counter.frame_count
        seen.append([params, [optimizer.state_dict()["state"] for optimizer in optimizers]])
    torch.testing.assert_close(seen[1], seen[0], rtol=2e-5, atol=2e-5)
    assert 0 < frames == counter.frame_count


@pytest.mark.parametrize(
    "kind", ["adam in two groups", "muon in two shapes with a rate on the device"]
)
def test_a_compiled_step_of_an_optimizer_is_its_eager_step(kind):
    trained = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        if kind.startswith("adam"):
            params = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
            groups = [{"params": [params[0]], "lr": 0.1}, {"params": [params[1]], "lr": 0.2}]
            optimizer = Adam(groups, 0.1)
        else:
            params = [
                torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 8), (8, 4), (4, 8), (6, 6))
            ]
            optimizer = Muon(params, 0.1, dtype=torch.float32)
            optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            for index, param in enumerate(params):
                param.grad = torch.randn(param.shape, generator=generator) * 10**index
            step()
        trained.append([params, optimizer.state_dict()["state"]])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-5, atol=1e-5)


def model_on_gpu():
    """As `model`, with a fused optimizer of torch too, and gradients that keep their addresses."""
    params, _ = model()
    params = {name: torch.nn.Parameter(param.detach().cuda()) for name, param in params.items()}
    named = {
        kind: [(name, param) for name, param in params.items() if name.startswith(kind)]
        for kind in SHAPES
    }
    adamw, named["adam"] = named["adam"][:1], named["adam"][1:]
    optimizers = [FACTORIES[kind](named[kind]) for kind in SHAPES]
    optimizers.append(
        torch.optim.AdamW([param for _, param in adamw], 0.01, fused=True, capturable=True)
    )
    for param in params.values():
        param.grad = torch.zeros_like(param)
    return params, optimizers


def fill_gradients(params, step):
    source = {name: torch.nn.Parameter(param.detach().cpu()) for name, param in params.items()}
    give_gradients(source, step)
    for name, param in params.items():
        param.grad.copy_(source[name].grad)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [SpikeRule()])
def test_a_guarded_step_never_waits_for_the_gpu(rule):
    params, optimizers = model_on_gpu()
    guard, loss = Guard(optimizers, spike=rule), torch.tensor(3.0, device="cuda")
    fill_gradients(params, 0)
    guard.step(loss)  # the state of torch's optimizer is created here, and kernels are loaded
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


# ---- state


def test_a_spoiled_sum_is_still_spoiled_after_a_resume():
    params, optimizers = model(("muon", "adam"))
    guard = Guard(optimizers)
    give_gradients(params, 0)
    FAULTS["nan"](params["muon.0"].grad)
    guard.step(only=optimizers[:1])
    resumed = Guard(optimizers)
    resumed.load_state_dict(load(save(guard.state_dict())))
    give_gradients(params, 1, add=False)
    before = bits(params)
    assert resumed.explain(resumed.step()) is None
    assert {name for name, value in bits(params).items() if value != before[name]} == {
        "muon.0",
        "muon.1",
        "muon.2",
    }
