"""The output head against torch's own loss in float64, and FP8 against its quantization."""

import functools
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from kernels import head
from kernels.head import choose_head, linear_cross_entropy, plain_cross_entropy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIGMOID, RSQRT = ("sigmoid", 30.0, 7.5, 0.0), ("rsqrt", 15.0, 15.0, 0.0)
CAPS = [SIGMOID, RSQRT, ("sigmoid", 23.0, 7.5, 5.0), ("rsqrt", 20.0, 25.0, -3.0)]
each_cap = pytest.mark.parametrize("cap", CAPS, ids=str)
each_count = pytest.mark.parametrize("several", [False, True])  # targets of a token
BIAS = 0.1 * torch.arange(64, dtype=torch.float64)
each_bias = pytest.mark.parametrize("bias", [None, BIAS], ids=["no bias", "bias"])


def capped(z, cap):
    kind, height, width, shift = cap
    if kind == "sigmoid":
        return height / (1 + torch.exp(-(z + shift) / width))
    return height * (z + shift) / ((z + shift) ** 2 + width**2).sqrt()


def problem(tokens, several=False, channels=32, vocabulary=64, dtype=torch.float64, device="cpu"):
    """x, as after an RMS norm, a weight for logits of every size, targets, and None.

    several: four targets a token, some missing, some twice, none for the first token; and their
    weights instead of None. The last three tokens of the vocabulary are never a target.
    """
    x = F.rms_norm(torch.randn(tokens, channels, dtype=torch.float64), (channels,))
    weight = 0.2 * torch.randn(vocabulary, channels, dtype=torch.float64)
    targets, weights = torch.randint(0, vocabulary - 3, (tokens,)), None
    if several:
        targets = torch.randint(-1, vocabulary - 3, (tokens, 4))
        targets[0], targets[1:9:2, 1], targets[2:9:2, 2] = -1, -1, targets[2:9:2, 0]
        weights = torch.tensor([1.0, 0.5, 0.25, 0.0], device=device)
    return x.to(device, dtype), weight.to(device, dtype), targets.to(device), weights


def losses_of(y, targets, weights=None):
    """The loss of each token by torch's own function: with weights, a sum over its targets."""
    columns = [(targets, 1.0)]
    if weights is not None:
        columns = zip(targets.T, weights.tolist(), strict=True)
    each = partial(F.cross_entropy, ignore_index=-1, reduction="none")
    return sum(weight * each(y, column) for column, weight in columns)


def sums_of(y, targets, weights):
    """The loss; with weights, both: the weighted one, and the next token's, which is constant."""
    loss = losses_of(y, targets, weights).sum()
    if weights is None:
        return loss
    return torch.stack([loss, losses_of(y.detach(), targets[:, 0]).sum()])


def truth(x, weight, targets, weights, cap, bias=0):
    """Loss, dx and dweight by torch's own functions and autograd, in float64."""
    x, weight = (y.detach().double().requires_grad_() for y in (x, weight))
    loss = sums_of(capped(x @ weight.T + bias, cap), targets, weights)
    return loss.detach(), *torch.autograd.grad(loss.flatten()[0], (x, weight))


def ours(x, weight, targets, weights, cap, **options):
    """Loss, dx and dweight; the gradients are those of twice the loss, halved."""
    x, weight = (y.detach().clone().requires_grad_() for y in (x, weight))
    loss = linear_cross_entropy(x, weight, targets, weights, softcap=cap, **options)
    dx, dweight = torch.autograd.grad(2 * loss.flatten()[0], (x, weight))
    return loss.detach(), dx / 2, dweight / 2


def by_operator(inputs, chunk, precision, compiled):
    """Loss, dx and dweight; with compiled stages, though no compiled model is around them."""
    options = *SIGMOID, chunk, precision, compiled, True
    loss, dx, dw_CV = torch.ops.speedrun.linear_cross_entropy(*inputs, *options)
    return loss, dx, dw_CV.T.to(inputs[1].dtype)


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


# ---- The same numbers


@each_cap
@each_count
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 16), (16, 16), (50, 16), (50, 1), (50, 0)])
def test_loss_and_gradients_equal_torchs_own_in_float64(cap, several, tokens, chunk):
    inputs = problem(tokens, several)
    exact(ours(*inputs, cap, chunk=chunk), truth(*inputs, cap))


@each_cap
@each_count
@each_bias
def test_the_plain_head_gives_the_same_and_takes_a_bias(monkeypatch, cap, several, bias):
    for chunk in ("PLAIN_CHUNK", "SCORING_CHUNK"):
        monkeypatch.setattr(head, chunk, 16)
    inputs = x, weight, targets, weights = problem(50, several)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = plain_cross_entropy(*leaves, bias, targets, cap, weights=weights)
    found = loss.detach(), *torch.autograd.grad(loss.flatten()[0], leaves)
    added = 0 if bias is None else bias
    assert max(map(distance, found, truth(*inputs, cap, added))) < 1e-6  # its loss is float32
    if not several:  # and the loss of each token
        each = plain_cross_entropy(x, weight, bias, targets, cap, reduction="none")
        wanted = losses_of(capped(x @ weight.T + added, cap), targets).float()
        torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5)


@each_cap
def test_bf16_errs_by_a_few_roundings_and_a_float32_weight_keeps_a_float32_gradient(cap):
    x, weight, *targets = problem(50, dtype=torch.bfloat16)
    expected = truth(x, weight, *targets, cap)
    for weight_dtype in (torch.bfloat16, torch.float32):
        results = ours(x, weight.to(weight_dtype), *targets, cap, chunk=16)
        assert [y.dtype for y in results] == [torch.float32, torch.bfloat16, weight_dtype]
        assert results[2].stride() == weight.stride()  # else autograd would copy it
        assert distance(results[0], expected[0]) < 1e-3
        assert max(map(distance, results[1:], expected[1:])) < 2**-7


def test_weights_get_no_gradient_and_the_next_tokens_loss_gives_none():
    x, weight, targets, weights = problem(9, several=True)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    chunked = linear_cross_entropy(x, weight, targets, weights, softcap=SIGMOID)
    plain = plain_cross_entropy(x, weight, None, targets, SIGMOID, weights=weights)
    for losses in (chunked, plain):
        dx, dweights = torch.autograd.grad(losses[1], (x, weights), allow_unused=True)
        assert not dx.any()
        assert dweights is None


# ---- FP8


def dequantized(x, scale, dtype):
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype).float() * scale


def quantized_truth(x, weight, targets, weights, cap):
    """The three FP8 products in float32 on what their operands stand for, rounded as they round."""
    x8 = dequantized(x, x.size(1) ** 0.5 / 448, torch.float8_e4m3fn)
    weight8 = dequantized(weight, 2**-8, torch.float8_e4m3fn)
    z = (x8 @ weight8.T).bfloat16().float().requires_grad_()
    loss = sums_of(capped(z, cap), targets, weights)
    dz8 = dequantized(torch.autograd.grad(loss.flatten()[0], z)[0], 1 / 448, torch.float8_e5m2)
    return loss.detach(), (dz8 @ weight8).bfloat16(), dz8.T @ x8


def assert_equals_quantized(inputs, cap, results, loss_error, nearest, farthest):
    own, exact = quantized_truth(*inputs, cap), truth(*inputs, cap)
    assert distance(results[0], own[0]) < loss_error
    for result, of_own, of_exact in zip(results[1:], own[1:], exact[1:], strict=True):
        assert distance(result, of_own) < nearest
        assert distance(result, of_own) < distance(result, of_exact) < farthest


@pytest.mark.parametrize("cap", [SIGMOID, RSQRT], ids=str)
@each_count
@pytest.mark.parametrize("tokens", [64, 50])
def test_fp8_equals_its_own_quantization_in_float32_and_is_near_the_truth(cap, several, tokens):
    inputs = problem(tokens, several, dtype=torch.bfloat16)
    results = ours(*inputs, cap, chunk=16, precision="fp8")
    assert_equals_quantized(inputs, cap, results, 1e-4, 2**-7, 0.06)


@pytest.mark.gpu
@each_count
def test_fp8_on_a_gpu_equals_its_own_quantization_eager_and_compiled(several):
    if torch.cuda.get_device_capability() < head.FP8_CAPABILITY:
        pytest.skip("this GPU has no FP8")
    torch.compiler.reset()
    inputs = problem(2048 + 24, several, 768, 1024, torch.bfloat16, "cuda")
    for compiled in (False, True):
        results = by_operator(inputs, 1024, "fp8", compiled)
        # Fast accumulation keeps about 13 bits: a few logits round to the next bf16 value.
        assert_equals_quantized(inputs, SIGMOID, results, 1e-3, 0.04, 0.075)


# ---- What is made, and when


def products_of(call, name):
    """What a call returns, and how often it makes a matrix product of each shape."""
    with torch.profiler.profile(record_shapes=True) as profile:
        found = call()
    shapes = [event.input_shapes for event in profile.events() if event.name == f"aten::{name}"]
    return found, Counter((left[0], right[1]) for left, right, *_ in shapes)


@pytest.mark.parametrize(("precision", "name"), [("plain", "mm"), ("fp8", "_scaled_mm")])
def test_logits_are_made_in_chunks_and_no_product_is_made_twice_or_unasked(precision, name):
    x, weight, targets, _ = problem(256, channels=16, vocabulary=128, dtype=torch.bfloat16)
    loss_of = partial(linear_cross_entropy, softcap=SIGMOID, chunk=64, precision=precision)
    _, products = products_of(lambda: loss_of(x, weight, targets), name)
    assert products == {(64, 128): 4}  # logits alone, as nothing asks for gradients
    leaves = x.requires_grad_(), weight.requires_grad_()
    loss, products = products_of(lambda: loss_of(*leaves, targets), name)
    assert products == {(64, 128): 4, (64, 16): 4, (16, 128): 4}  # logits, dx, dweight^T
    assert not products_of(loss.backward, name)[1]


# ---- Compilation


@pytest.mark.parametrize("precision", ["plain", "fp8"])
@pytest.mark.parametrize("gradients", [True, False])
@each_count
def test_the_operator_keeps_the_rules_of_operators(precision, gradients, several):
    x, weight, *targets = problem(20, several, dtype=torch.bfloat16)
    x = x.T.contiguous().T  # no layout is taken for granted
    leaves = x.requires_grad_(gradients), weight.float().requires_grad_(gradients)
    given = *leaves, *targets, *SIGMOID, 8, precision, False, gradients
    torch.library.opcheck(torch.ops.speedrun.linear_cross_entropy.default, given)


def test_a_compiled_model_is_one_graph_and_each_stage_another_whatever_the_weights(monkeypatch):
    of_head, of_model = (CompileCounterWithBackend("aot_eager") for _ in range(2))
    compile_stage = partial(torch.compile, backend=of_head, dynamic=False, fullgraph=True)
    monkeypatch.setattr(head, "compile_stage", functools.cache(compile_stage))
    torch.compiler.reset()

    @partial(torch.compile, backend=of_model)
    def model(x, *args):
        return linear_cross_entropy(2 * x, *args, softcap=SIGMOID, chunk=8)

    x, weight, targets, weights = problem(32, several=True)
    inputs = x.requires_grad_(), weight.requires_grad_(), targets
    for step in range(3):
        now = weights / 2**step
        loss = model(*inputs, now)
        (dx,) = torch.autograd.grad(loss[0], x)
        expected = truth(2 * x, weight, targets, now, SIGMOID)
        exact((loss.detach(), dx), (expected[0], 2 * expected[1]))
    # Operands, losses, and gradients twice: the first chunk finds no sum to add to.
    assert (of_model.frame_count, of_head.frame_count) == (1, 4)


@pytest.mark.gpu
def test_compiled_chunks_on_a_gpu_are_as_near_to_the_truth_as_torchs_own_bf16():
    torch.compiler.reset()
    inputs = x, weight, targets, _ = problem(2048, False, 768, 1024, torch.bfloat16, "cuda")
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = F.cross_entropy(capped(F.linear(*leaves).float(), SIGMOID), targets, reduction="sum")
    results, torchs = by_operator(inputs, 1024, "plain", True), torch.autograd.grad(loss, leaves)
    for result, own, wanted in zip(results[1:], torchs, truth(*inputs, SIGMOID)[1:], strict=True):
        assert distance(result, wanted) < 1.5 * distance(own, wanted)


# ---- The choice


@pytest.mark.parametrize(("capability", "change", "reason"), [
    ((8, 0), {}, "capability 8.9"),
    ((9, 0), {"device": CPU}, "capability 8.9"),
    ((9, 0), {"dtype": torch.float32}, "bf16, not torch.float32"),
    ((9, 0), {"bias": True}, "no bias"),
])  # fmt: skip
def test_auto_takes_fp8_where_it_runs_and_says_why_not_elsewhere(
    monkeypatch, capability, change, reason
):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    can = {"device": CUDA, "dtype": torch.bfloat16, "dim": 768, "vocab": 50_304}
    given = can | change
    name, why = choose_head("auto", **given)
    assert name == ("plain" if "bias" in change else "chunked")
    assert reason in why
    assert choose_head("plain", **given) == ("plain", "as asked")
    refused = ("fp8", "chunked") if "bias" in change else ("fp8",)
    for asked in refused:
        with pytest.raises(ValueError, match=f"--loss-kernel {asked} cannot run here: .*{reason}"):
            choose_head(asked, **given)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert choose_head("auto", **can) == ("fp8", "the fastest here")
    assert choose_head("fp8", **can) == ("fp8", "as asked")
