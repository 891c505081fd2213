"""What a guarded step costs the host, and that its compiled judge decides as the eager one."""

import itertools

import pytest
import torch
from test_guards import FAULTS, give_gradients, model
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import optim.guards
import optim.update
from optim import AdamW, Guard, NorMuon, SpikeRule

RULE = SpikeRule(window=6, start=3, patience=2)
VIEWS = {
    "view", "detach", "slice", "split", "split_with_sizes", "select", "expand", "unsqueeze",
    "unbind", "as_strided", "empty", "empty_like", "lift_fresh", "_local_scalar_dense",
    "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Operations that launch a kernel, by name, and the elements that `_foreach_copy_` copies."""

    def __init__(self):
        super().__init__()
        self.names, self.copied = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        if name not in VIEWS:
            self.names.append(name)
        if name == "_foreach_copy_":
            self.copied += sum(tensor.numel() for tensor in args[0])
        return func(*args, **(kwargs or {}))


def apart(function):
    """A stand-in for a compiled function: what it launches is not counted."""

    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Steps are compiled, and flags are not read by the host."""
    monkeypatch.setattr("optim.base.READ_AT_ONCE", ())
    monkeypatch.setattr("optim.base.compiled_values", lambda: apart(optim.update.new_values))
    monkeypatch.setattr("optim.guards.compiled", apart)


def guarded(kind, shapes, compiled=True):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = kind(params, 0.1, weight_decay=0.1, compiled=compiled)
    for param in params:
        param.grad = torch.ones_like(param)
    return params, Guard([optimizer], spike=RULE)


GPT2S = ([(4, 4)] * 4 + [(16, 4), (4, 16)]) * 12  # the hidden matrices of GPT-2 small, in number


def second_step(kind):
    """Parameters, and what their second guarded step launched: the first one compiles."""
    params, guard = guarded(kind, GPT2S)
    guard.step(torch.tensor(3.0))
    with Launches() as seen:
        guard.step(torch.tensor(3.0))
    return params, seen


@pytest.mark.parametrize("kind", [NorMuon, AdamW])
def test_a_guarded_step_launches_few_kernels_beside_the_compiled_ones(kind, as_on_a_gpu):
    _, seen = second_step(kind)
    assert len(seen.names) <= 40, seen.names


@pytest.mark.parametrize("kind", [NorMuon, AdamW])
def test_a_compiled_step_copies_weights_alone_and_no_state(kind, as_on_a_gpu):
    params, seen = second_step(kind)
    assert seen.copied == sum(param.numel() for param in params)


def test_all_rates_of_a_compiled_step_travel_in_one_copy(monkeypatch, as_on_a_gpu):
    copies = []
    monkeypatch.setattr("optim.update.sent", lambda tensor, device: copies.append(tensor) or tensor)
    _, guard = guarded(NorMuon, GPT2S)
    guard.step(torch.tensor(3.0))
    (rates,) = copies
    assert rates.stride(0) * rates.element_size() % 16 == 0, "compiled kernels expect that"


@pytest.mark.parametrize("only", [False, True])
def test_the_compiled_judge_is_the_eager_one_and_writes_to_no_input(only, monkeypatch):
    torch._dynamo.reset()
    judge = torch.compile(optim.guards.judge, dynamic=False, backend="aot_eager", fullgraph=True)

    def watched(*args, **kwargs):
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        before = [tensor._version for tensor in tensors]
        found = judge(*args, **kwargs)
        assert [tensor._version for tensor in tensors] == before
        return found

    monkeypatch.setattr("optim.guards.compiled", lambda function: watched)
    monkeypatch.setattr("optim.base.compiled_values", lambda: optim.update.new_values)
    seen = []
    for compiled in (False, True):
        params, optimizers = model(compiled=compiled)
        guard, told = Guard(optimizers, spike=RULE, clip=1.0), []
        for step in range(14):
            give_gradients(params.values(), step)
            if step in (5, 9):
                FAULTS["nan"](params["normuon.1"].grad)
            loss = torch.tensor(30.0 if step in (6, 11, 12, 13) else 3.0 + step % 3 / 100)
            verdict = guard.step(loss, only=optimizers[:2] if only and step % 2 else None)
            told += [verdict, *guard.state_dict().values()]
        seen.append(told)
        codes = {int(verdict[0]) for verdict in itertools.islice(told, 0, None, 5)}
        assert codes == {0, 1, 2}, "steps were taken, and skipped for both reasons"
    for eager, found in zip(*seen, strict=True):
        torch.testing.assert_close(found, eager, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_on_a_gpu_the_compiled_judge_is_the_eager_one():
    windows = optim.guards.Windows(
        torch.rand(3, 6, device="cuda"), *torch.zeros(2, 3, dtype=torch.int64, device="cuda")
    )
    norms = [torch.rand(40, device="cuda"), torch.rand(9, device="cuda")]
    totals = torch.stack(torch._foreach_norm(norms))
    given = (0, 1), norms, totals, torch.tensor(9.0, device="cuda")
    given = *given, torch.zeros(2, dtype=torch.bool, device="cuda"), windows
    strict = torch.compile(optim.guards.judge, dynamic=False, fullgraph=True)
    found, expected = (
        tree_leaves(judge(*given, rule=RULE, nonfinite=True))
        for judge in (strict, optim.guards.judge)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, equal_nan=True)


def test_a_step_in_the_capture_of_a_cuda_graph_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _, guard = guarded(AdamW, [(4,)], compiled=False)
    guard.step()  # of the CPU: nothing is captured
    (optimizer,) = guard.optimizers
    optimizer._device = torch.device("cuda")
    with pytest.raises(RuntimeError, match=r"AdamW cannot be captured .* step outside the graph"):
        optimizer.step()
