"""The output head against torch's own loss in float64, and FP8 against its quantization."""

import functools
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import head
from kernels.head import choose_head, linear_cross_entropy, plain_cross_entropy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIGMOID, RSQRT = ("sigmoid", 30.0, 7.5), ("rsqrt", 15.0, 15.0)
CAPS = [SIGMOID, RSQRT, ("sigmoid", 23.0, 10.0), ("rsqrt", 20.0, 25.0)]
each_cap = pytest.mark.parametrize("cap", CAPS, ids=str)


def capped(z, cap):
    kind, height, width = cap
    if kind == "sigmoid":
        return height / (1 + torch.exp(-z / width))
    return height * z / (z**2 + width**2).sqrt()


def truth(x, weight, targets, cap, bias=0):
    """Loss, dx and dweight by torch's own functions and autograd, in float64."""
    x, weight = (y.detach().double().requires_grad_() for y in (x, weight))
    loss = F.cross_entropy(capped(x @ weight.T + bias, cap), targets, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def ours(x, weight, targets, cap, **options):
    """Loss, dx and dweight; the gradients are those of twice the loss, halved."""
    x, weight = (y.detach().clone().requires_grad_() for y in (x, weight))
    loss = linear_cross_entropy(x, weight, targets, softcap=cap, **options)
    dx, dweight = torch.autograd.grad(2 * loss, (x, weight))
    return loss.detach(), dx / 2, dweight / 2


def by_operator(inputs, chunk, precision, compiled):
    """Loss, dx and dweight; with compiled stages, though no compiled model is around them."""
    return head._linear_cross_entropy(*inputs, *SIGMOID, chunk, precision, compiled, True)


def problem(tokens, channels=32, vocabulary=64, dtype=torch.float64, device="cpu"):
    """Rows after an RMS norm, logits of every size; the last three tokens are never a target."""
    x = F.rms_norm(torch.randn(tokens, channels, dtype=torch.float64), (channels,))
    weight = 0.2 * torch.randn(vocabulary, channels, dtype=torch.float64)
    targets = torch.randint(0, vocabulary - 3, (tokens,))
    return x.to(device, dtype), weight.to(device, dtype), targets.to(device)


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


# ---- The same numbers


@each_cap
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 16), (16, 16), (50, 16), (50, 1), (50, 0)])
def test_loss_and_gradients_equal_torchs_own_in_float64(cap, tokens, chunk):
    inputs = problem(tokens)
    exact(ours(*inputs, cap, chunk=chunk), truth(*inputs, cap))


@each_cap
@pytest.mark.parametrize("bias", [None, 0.1 * torch.arange(64, dtype=torch.float64)])
def test_the_plain_head_gives_the_same_and_takes_a_bias(monkeypatch, cap, bias):
    monkeypatch.setattr(head, "PLAIN_CHUNK", 16)
    x, weight, targets = problem(50)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = plain_cross_entropy(*leaves, bias, targets, cap)
    found = loss.detach(), *torch.autograd.grad(loss, leaves)
    wanted = truth(x, weight, targets, cap, 0 if bias is None else bias)
    assert max(map(distance, found, wanted)) < 1e-6  # this head computes the loss in float32


@each_cap
@pytest.mark.parametrize("bias", [None, 0.1 * torch.arange(64, dtype=torch.float64)])
def test_the_plain_head_gives_the_loss_of_each_token(monkeypatch, cap, bias):
    monkeypatch.setattr(head, "EAGER_CHUNK", 16)
    x, weight, targets = problem(50)
    found = plain_cross_entropy(x, weight, bias, targets, cap, reduction="none")
    z = capped(x @ weight.T + (0 if bias is None else bias), cap)
    wanted = F.cross_entropy(z, targets, reduction="none")
    assert (found.dtype, found.shape) == (torch.float32, (50,))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@each_cap
def test_bf16_errs_by_a_few_roundings_and_a_float32_weight_keeps_a_float32_gradient(cap):
    x, weight, targets = problem(50, dtype=torch.bfloat16)
    expected = truth(x, weight, targets, cap)
    for weight_dtype in (torch.bfloat16, torch.float32):
        results = ours(x, weight.to(weight_dtype), targets, cap, chunk=16)
        assert [y.dtype for y in results] == [torch.float32, torch.bfloat16, weight_dtype]
        assert distance(results[0], expected[0]) < 1e-3
        assert max(map(distance, results[1:], expected[1:])) < 2**-7


@each_cap
@pytest.mark.parametrize("precision", ["plain", "fp8"])
def test_logits_of_any_size_give_finite_results(cap, precision):
    x, weight, targets = problem(20, dtype=torch.bfloat16)
    results = ours(100 * x, 1e4 * weight, targets, cap, chunk=8, precision=precision)
    assert all(y.isfinite().all() for y in results)


@pytest.mark.parametrize("cap", [SIGMOID, RSQRT], ids=str)
def test_gradients_by_logits_lie_in_the_range_that_their_fp8_scale_assumes(cap):
    z = torch.cat([torch.linspace(-90, 90, 401).repeat(2, 1), torch.randn(40, 401) * 30])
    _, dz = head._cross_entropy(z, torch.arange(42) % 401, cap, gradient=True)
    assert 0.9 < dz.abs().max() <= 1


# ---- FP8


def dequantized(x, scale, dtype):
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype).float() * scale


def quantized_truth(x, weight, targets, cap):
    """The three FP8 products in float32 on what their operands stand for, rounded as they round."""
    x8 = dequantized(x, x.size(1) ** 0.5 / 448, torch.float8_e4m3fn)
    weight8 = dequantized(weight, 2**-9, torch.float8_e4m3fn)
    z = (x8 @ weight8.T).bfloat16().float().requires_grad_()
    loss = F.cross_entropy(capped(z, cap), targets, reduction="sum")
    dz8 = dequantized(torch.autograd.grad(loss, z)[0], 1 / 448, torch.float8_e5m2)
    return loss.detach(), (dz8 @ weight8).bfloat16(), dz8.T @ x8


def assert_equals_quantized(inputs, cap, results, loss_error, nearest, farthest):
    own, exact = quantized_truth(*inputs, cap), truth(*inputs, cap)
    assert distance(results[0], own[0]) < loss_error
    for result, of_own, of_exact in zip(results[1:], own[1:], exact[1:], strict=True):
        assert distance(result, of_own) < nearest
        assert distance(result, of_own) < distance(result, of_exact) < farthest


@pytest.mark.parametrize("cap", [SIGMOID, RSQRT], ids=str)
@pytest.mark.parametrize("tokens", [64, 50])
def test_fp8_equals_its_own_quantization_in_float32_and_is_near_the_truth(cap, tokens):
    inputs = problem(tokens, dtype=torch.bfloat16)
    results = ours(*inputs, cap, chunk=16, precision="fp8")
    assert_equals_quantized(inputs, cap, results, 1e-4, 2**-7, 0.06)


@pytest.mark.gpu
def test_fp8_on_a_gpu_equals_its_own_quantization_eager_and_compiled():
    if torch.cuda.get_device_capability() < head.FP8_CAPABILITY:
        pytest.skip("this GPU has no FP8")
    torch.compiler.reset()
    inputs = problem(2048 + 24, 768, 1024, torch.bfloat16, "cuda")
    for compiled in (False, True):
        results = by_operator(inputs, 1024, "fp8", compiled)
        # Fast accumulation keeps about 13 bits: a few logits round to the next bf16 value.
        assert_equals_quantized(inputs, SIGMOID, results, 1e-3, 0.04, 0.075)


def test_fp8_products_have_the_layout_that_cuda_demands_and_the_formats_of_the_record(monkeypatch):
    e4m3, e5m2, bf16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
    formats, product = [], torch._scaled_mm

    def record(a, b, *scales, out_dtype, use_fast_accum):
        assert (a.stride(), b.stride()) == ((a.size(1), 1), (1, b.size(0)))
        assert not any(size % 16 for size in (a.size(1), *b.shape))
        formats.append((a.dtype, b.dtype, out_dtype, use_fast_accum))
        return product(a, b, *scales, out_dtype=out_dtype, use_fast_accum=use_fast_accum)

    monkeypatch.setattr(torch, "_scaled_mm", record)
    ours(*problem(50, dtype=bf16), SIGMOID, chunk=32, precision="fp8")  # a last chunk of 18 tokens
    logits, dweight = (e4m3, e4m3, bf16, True), (e4m3, e5m2, torch.float32, False)
    assert formats == 2 * [logits, dweight, (e5m2, e4m3, bf16, False)]


# ---- What is made, and when


aten = torch.ops.aten
PRODUCTS = aten.mm.default, aten.matmul.default, aten._scaled_mm.default


class Made(TorchDispatchMode):
    """Size of the largest tensor made, and shapes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.largest, self.products = 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
            if func in PRODUCTS:
                self.products[tuple(result.shape)] += 1
        return result


@pytest.mark.parametrize("precision", ["plain", "fp8"])
def test_no_tensor_exceeds_a_chunks_logits_and_no_product_is_made_twice_or_unasked(precision):
    inputs = problem(256, channels=16, vocabulary=128, dtype=torch.bfloat16)
    run = head._linear_cross_entropy._init_fn  # a mode sees nothing inside an operator
    with Made() as made:
        run(*inputs, *SIGMOID, 64, precision, False, True)
    assert made.largest == 64 * 128
    assert made.products == {(64, 128): 4, (64, 16): 4, (16, 128): 4}  # logits, dx, dweight^T
    with Made() as made:
        _, dx, dweight = run(*inputs, *SIGMOID, 64, precision, False, False)
    assert made.products == {(64, 128): 4}
    assert dx.numel() == dweight.numel() == 0


# ---- Compilation


@pytest.mark.parametrize("precision", ["plain", "fp8"])
@pytest.mark.parametrize("gradients", [True, False])
def test_the_operator_keeps_the_rules_of_operators(precision, gradients):
    x, weight, targets = problem(20, dtype=torch.bfloat16)
    x = x.T.contiguous().T  # no layout is taken for granted
    args = x.requires_grad_(gradients), weight.float().requires_grad_(gradients), targets
    options = *SIGMOID, 8, precision, False, gradients
    torch.library.opcheck(head._linear_cross_entropy, (*args, *options))


def test_a_compiled_model_is_one_graph_and_each_stage_another(monkeypatch):
    of_head, of_model = (CompileCounterWithBackend("aot_eager") for _ in range(2))
    compile_stage = partial(torch.compile, backend=of_head, dynamic=False, fullgraph=True)
    monkeypatch.setattr(head, "_compiled", functools.cache(compile_stage))
    torch.compiler.reset()

    @partial(torch.compile, backend=of_model)
    def model(x, *args):
        return linear_cross_entropy(2 * x, *args, softcap=SIGMOID, chunk=8)

    x, weight, targets = problem(32)
    inputs = x.requires_grad_(), weight.requires_grad_(), targets
    for _ in range(3):
        loss = model(*inputs)
        (dx,) = torch.autograd.grad(loss, x)
    expected = truth(2 * x, weight, targets, SIGMOID)
    exact((loss.detach(), dx), (expected[0], 2 * expected[1]))
    # `_gradients` has two: the first chunk finds no sum to add to.
    assert (of_model.frame_count, of_head.frame_count) == (1, 5)


@pytest.mark.parametrize("precision", ["plain", "fp8"])
def test_compiled_chunks_equal_eager_ones_within_a_rounding(precision):
    torch.compiler.reset()
    dtype = torch.bfloat16 if precision == "fp8" else torch.float32
    inputs = problem(32, dtype=dtype)
    eager, compiled = (by_operator(inputs, 16, precision, mode) for mode in (False, True))
    assert max(map(distance, compiled, eager)) < 2 * torch.finfo(dtype).eps


@pytest.mark.gpu
def test_compiled_chunks_on_a_gpu_are_as_near_to_the_truth_as_torchs_own_bf16():
    torch.compiler.reset()
    inputs = x, weight, targets = problem(2048, 768, 1024, torch.bfloat16, "cuda")
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
    ((9, 0), {"dim": 760}, "dim 760"),
    ((9, 0), {"vocab": 50_257}, "vocabulary 50257"),
    ((9, 0), {"bias": True}, "no bias"),
])  # fmt: skip
def test_auto_takes_fp8_where_it_runs_and_says_why_not_elsewhere(
    monkeypatch, capability, change, reason
):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    given = {"device": CUDA, "dtype": torch.bfloat16, "dim": 768, "vocab": 50_304} | change
    name, why = choose_head("auto", **given)
    assert name == ("plain" if "bias" in change else "chunked")
    assert reason in why
    assert choose_head("plain", **given) == ("plain", "as asked")
    refused = ("fp8", "chunked") if "bias" in change else ("fp8",)
    for asked in refused:
        with pytest.raises(ValueError, match=f"--head {asked} cannot run here: .*{reason}"):
            choose_head(asked, **given)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    can = {"device": CUDA, "dtype": torch.bfloat16, "dim": 768, "vocab": 50_304}
    assert choose_head("auto", **can) == ("fp8", "the fastest here")
    assert choose_head("fp8", **can) == ("fp8", "as asked")
