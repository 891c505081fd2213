"""The output head: loss and gradients against torch's own in float64, FP8 against its quantization in float32."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import head
from kernels.head import choose_head, fp8_obstacle, linear_cross_entropy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CAPS = {"sigmoid": ("sigmoid", 30.0, 7.5), "rsqrt": ("rsqrt", 15.0, 15.0)}
KINDS = [*CAPS]
both_caps = pytest.mark.parametrize("kind", KINDS)


def capped(z, kind):
    return 30 * torch.sigmoid(z / 7.5) if kind == "sigmoid" else 15 * z / (z**2 + 15**2).sqrt()


def truth(x, weight, targets, kind):
    """Loss, dx and dweight by torch's own functions and autograd, in float64."""
    x, weight = (y.detach().double().requires_grad_() for y in (x, weight))
    loss = F.cross_entropy(capped(F.linear(x, weight), kind), targets, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def ours(x, weight, targets, kind, **options):
    x, weight = (y.detach().clone().requires_grad_() for y in (x, weight))
    loss = linear_cross_entropy(x, weight, targets, softcap=CAPS[kind], **options)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def problem(tokens, channels=32, vocabulary=64, dtype=torch.float64, device="cpu"):
    """Rows from an RMS norm, a weight that gives logits of every size, targets; some rows are no token's target."""
    x = F.rms_norm(torch.randn(tokens, channels, dtype=torch.float64), (channels,))
    weight = 0.2 * torch.randn(vocabulary, channels, dtype=torch.float64)
    targets = torch.randint(0, vocabulary - 3, (tokens,))
    return x.to(device, dtype), weight.to(device, dtype), targets.to(device)


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers


@both_caps
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 16), (16, 16), (17, 16), (50, 16), (50, 1), (50, 8192)])
def test_loss_and_gradients_equal_torchs_own_in_float64(kind, tokens, chunk):
    inputs = problem(tokens)
    torch.testing.assert_close(ours(*inputs, kind, chunk=chunk), truth(*inputs, kind), rtol=1e-10, atol=1e-10)


@given(tokens=st.integers(1, 40), chunk=st.integers(1, 50), kind=st.sampled_from(KINDS))
def test_the_size_of_a_chunk_changes_no_result(tokens, chunk, kind):
    inputs = problem(tokens, channels=5, vocabulary=9)
    torch.testing.assert_close(ours(*inputs, kind, chunk=chunk), ours(*inputs, kind), rtol=1e-10, atol=1e-10)


@both_caps
def test_bf16_is_within_a_few_roundings_of_the_truth(kind):
    inputs = problem(50, dtype=torch.bfloat16)
    results, expected = ours(*inputs, kind, chunk=16), truth(*inputs, kind)
    assert [y.dtype for y in results] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert abs(results[0] - expected[0]) / expected[0] < 1e-3
    assert max(map(distance, results[1:], expected[1:])) < 2**-7


def test_a_float32_weight_under_bf16_gets_a_float32_gradient():
    x, weight, targets = problem(50, dtype=torch.bfloat16)
    results = ours(x, weight.float(), targets, "sigmoid", chunk=16)
    assert [y.dtype for y in results] == [torch.float32, torch.bfloat16, torch.float32]
    assert distance(results[2], truth(x, weight, targets, "sigmoid")[2]) < 2**-7


def test_rows_that_pad_the_vocabulary_take_part_in_the_softmax_and_get_their_gradient():
    x, weight, targets = problem(20)
    weight[-3:] = 0
    results = ours(x, weight, targets, "sigmoid", chunk=8)
    torch.testing.assert_close(results, truth(x, weight, targets, "sigmoid"), rtol=1e-10, atol=1e-10)
    assert results[2][-3:].abs().min() > 0


def test_the_gradient_of_a_multiple_of_the_loss_is_that_multiple():
    x, weight, targets = problem(20)
    x.requires_grad_()
    loss = linear_cross_entropy(x, weight, targets, softcap=CAPS["rsqrt"], chunk=8)
    (dx,) = torch.autograd.grad(-3 * loss, x)
    torch.testing.assert_close(dx, -3 * truth(x, weight, targets, "rsqrt")[1], rtol=1e-10, atol=1e-10)


@both_caps
@pytest.mark.parametrize("precision", ["plain", "fp8"])
def test_logits_of_any_size_give_finite_results(kind, precision):
    x, weight, targets = problem(20, dtype=torch.bfloat16)
    results = ours(100 * x, 1e4 * weight, targets, kind, chunk=8, precision=precision)
    assert all(y.isfinite().all() for y in results)


@both_caps
def test_the_gradient_by_a_logit_never_exceeds_one_which_its_fp8_scale_takes_for_granted(kind):
    z = torch.cat([torch.linspace(-90, 90, 401).repeat(2, 1), torch.randn(40, 401) * 30])
    loss, dz = head._cross_entropy(z, torch.arange(42) % 401, CAPS[kind], gradient=True)
    assert 0.9 < dz.abs().max() <= 1
    assert loss.isfinite()


@both_caps
def test_the_cap_equals_its_formula(kind):
    z = torch.linspace(-100, 100, 101, dtype=torch.float64)
    torch.testing.assert_close(head.capped_logits(z, CAPS[kind]), capped(z, kind), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# FP8


def dequantized(x, scale, dtype):
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype).float() * scale


def quantized_truth(x, weight, targets, kind):
    """The FP8 head's three products in float32 on what its operands stand for, rounded where it rounds."""
    x8 = dequantized(x, x.size(1) ** 0.5 / 448, torch.float8_e4m3fn)
    weight8 = dequantized(weight, 2**-9, torch.float8_e4m3fn)
    z = (x8 @ weight8.T).bfloat16().float().requires_grad_()
    loss = F.cross_entropy(capped(z, kind), targets, reduction="sum")
    dz8 = dequantized(torch.autograd.grad(loss, z)[0], 1 / 448, torch.float8_e5m2)
    return loss.detach(), (dz8 @ weight8).bfloat16(), dz8.T @ x8


def assert_equals_quantized(inputs, kind, results):
    # Fast accumulation on a GPU keeps some 13 bits: a few logits are rounded otherwise, and their gradients with them.
    loss_error, nearest, farthest = (1e-3, 0.04, 0.075) if inputs[0].is_cuda else (1e-4, 2**-7, 0.06)
    own, exact = quantized_truth(*inputs, kind), truth(*inputs, kind)
    assert abs(results[0] - own[0]) / own[0] < loss_error
    for result, of_own, of_exact in zip(results[1:], own[1:], exact[1:], strict=True):
        near, far = distance(result, of_own), distance(result, of_exact)
        assert near < nearest
        assert near < far < farthest


@both_caps
@pytest.mark.parametrize("tokens", [64, 50])
def test_fp8_equals_its_own_quantization_in_float32_and_is_near_the_truth(kind, tokens):
    inputs = problem(tokens, dtype=torch.bfloat16)
    assert_equals_quantized(inputs, kind, ours(*inputs, kind, chunk=16, precision="fp8"))


@pytest.fixture
def scaled_products(monkeypatch):
    """Operands, output dtype and kind of accumulation of every FP8 product made."""
    made, product = [], torch._scaled_mm

    def record(a, b, scale_a, scale_b, *, out_dtype, use_fast_accum):
        made.append((a, b, out_dtype, use_fast_accum))
        return product(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum)

    monkeypatch.setattr(torch, "_scaled_mm", record)
    return made


def test_operands_of_fp8_products_lie_in_memory_as_cuda_demands(scaled_products):
    ours(*problem(50, dtype=torch.bfloat16), "sigmoid", chunk=32, precision="fp8")  # the last chunk has 18 tokens
    for a, b, _, _ in scaled_products:
        assert a.stride() == (a.size(1), 1)
        assert b.stride() == (1, b.size(0))
        assert not any(size % 16 for size in (a.size(1), *b.shape))


def test_fp8_products_have_the_formats_the_scales_and_the_accumulation_of_the_record(scaled_products):
    e4m3, e5m2, bf16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
    x, weight, targets = problem(32, dtype=bf16)
    ours(x, weight, targets, "sigmoid", chunk=32, precision="fp8")
    formats = [(a.dtype, b.dtype, out, fast) for a, b, out, fast in scaled_products]
    assert formats == [(e4m3, e4m3, bf16, True), (e4m3, e5m2, torch.float32, False), (e5m2, e4m3, bf16, False)]
    of_x, of_weight = (operand.float() for operand in scaled_products[0][:2])
    torch.testing.assert_close(of_x, x.float() * 448 / 32**0.5, rtol=2**-4, atol=2**-9)
    torch.testing.assert_close(of_weight.T, weight.float() * 512, rtol=2**-4, atol=2**-9)


def test_the_weight_is_quantized_once_a_call(monkeypatch):
    shapes, quantize = Counter(), head._quantize
    monkeypatch.setattr(head, "_quantize", lambda x, scale: shapes.update([x.shape]) or quantize(x, scale))
    x, weight, targets = problem(48, dtype=torch.bfloat16)
    ours(x, weight, targets, "sigmoid", chunk=16, precision="fp8")
    assert shapes == {weight.shape: 1, (16, 32): 3}


# ---------------------------------------------------------------------------------------------------------------------
# What is made, and when


class Made(TorchDispatchMode):
    """Size of the largest tensor made, the operations called, and the shapes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.largest, self.calls, self.products = 0, Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.calls[func] += 1
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
            if func in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default):
                self.products[tuple(result.shape)] += 1
        return result


def made_by(precision, gradients):
    """What one call of 4 chunks makes; N = 256, n = 64, C = 16, V = 128."""
    inputs = problem(256, channels=16, vocabulary=128, dtype=torch.bfloat16)
    run = head._linear_cross_entropy._init_fn  # inside an operator a mode sees nothing
    with Made() as made:
        _, dx, dweight = run(*inputs, *CAPS["sigmoid"], 64, precision, False, gradients)
    return made, dx, dweight


@pytest.mark.parametrize("precision", ["plain", "fp8"])
def test_no_tensor_is_larger_than_the_logits_of_a_chunk_and_these_are_made_once(precision):
    made, _, _ = made_by(precision, gradients=True)
    assert made.largest == 64 * 128
    assert made.products == {(64, 128): 4, (64, 16): 4, (16, 128): 4}  # logits, dx and dweight^T


@pytest.mark.parametrize("precision", ["plain", "fp8"])
def test_without_gradients_no_product_but_the_logits_is_made(precision):
    made, dx, dweight = made_by(precision, gradients=False)
    assert made.products == {(64, 128): 4}
    assert torch.ops.aten.where.self not in made.calls  # nor the gradient by the logits
    assert dx.numel() == dweight.numel() == 0


def test_the_backward_pass_does_nothing_but_scale():
    x, weight, targets = problem(20)
    leaves = x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(*leaves, targets, softcap=CAPS["sigmoid"])
    scale = torch.full_like(loss, 3)
    with Made() as made:
        torch.autograd.grad(loss, leaves, scale)
    assert made.calls == {torch.ops.aten.mul.Tensor: 2}


@pytest.mark.parametrize(
    ("wanted", "enabled", "gradients"),
    [
        ((False, False), True, False),
        ((True, True), False, False),
        ((True, False), True, True),
        ((False, True), True, True),
    ],
)
def test_gradients_are_made_where_autograd_wants_one(monkeypatch, wanted, enabled, gradients):
    asked, run = [], head._linear_cross_entropy
    monkeypatch.setattr(head, "_linear_cross_entropy", lambda *args: asked.append(args[-1]) or run(*args))
    x, weight, targets = problem(20)
    x.requires_grad_(wanted[0])
    weight.requires_grad_(wanted[1])
    with torch.set_grad_enabled(enabled):
        loss = linear_cross_entropy(x, weight, targets, softcap=CAPS["sigmoid"])
    assert asked == [gradients]
    assert loss.requires_grad == gradients
    torch.testing.assert_close(loss.detach(), truth(x, weight, targets, "sigmoid")[0])


# ---------------------------------------------------------------------------------------------------------------------
# What the compiler makes of it


@pytest.mark.parametrize("precision", ["plain", "fp8"])
@pytest.mark.parametrize("gradients", [True, False])
def test_the_operator_keeps_the_rules_of_operators(precision, gradients):
    x, weight, targets = problem(20, dtype=torch.bfloat16)
    x = x.T.contiguous().T  # no layout is taken for granted
    args = (x.requires_grad_(gradients), weight.float().requires_grad_(gradients), targets)
    torch.library.opcheck(head._linear_cross_entropy, (*args, *CAPS["sigmoid"], 8, precision, False, gradients))


@pytest.fixture
def counted(monkeypatch):
    """`torch.compile` itself, and the counter of the graphs that the head has it compile."""
    compile_, counter = torch.compile, CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(compile_, backend=counter))
    torch._dynamo.reset()
    head._compiled.cache_clear()
    yield compile_, counter
    head._compiled.cache_clear()


def test_a_compiled_model_has_one_graph_and_the_head_one_a_stage_and_two_where_the_first_chunk_differs(counted):
    compile_, of_head = counted
    of_model = CompileCounterWithBackend("aot_eager")
    model = compile_(lambda x, *args: linear_cross_entropy(2 * x, *args, softcap=CAPS["sigmoid"], chunk=8), backend=of_model)
    x, weight, targets = problem(32)
    inputs = x.requires_grad_(), weight.requires_grad_(), targets
    for _ in range(3):
        loss = model(*inputs)
        (dx,) = torch.autograd.grad(loss, x)
    expected = truth(2 * x, weight, targets, "sigmoid")
    torch.testing.assert_close((loss.detach(), dx), (expected[0], 2 * expected[1]), rtol=1e-10, atol=1e-10)
    assert (of_model.frame_count, of_head.frame_count) == (1, 5)


def through_operator(inputs, precision, compiled):
    return head._linear_cross_entropy(*inputs, *CAPS["sigmoid"], 16, precision, compiled, True)


@pytest.mark.parametrize(("precision", "dtype"), [("plain", torch.float32), ("fp8", torch.bfloat16)])
def test_compiled_chunks_equal_eager_ones_within_a_rounding(precision, dtype):
    torch._dynamo.reset()
    inputs = problem(32, dtype=dtype)
    compiled, eager = (through_operator(inputs, precision, compiled) for compiled in (True, False))
    assert max(map(distance, compiled, eager)) < 2 * torch.finfo(dtype).eps


# ---------------------------------------------------------------------------------------------------------------------
# The choice

H100 = {"device": CUDA, "dtype": torch.bfloat16, "channels": 768, "vocabulary": 50_304}


@pytest.fixture
def capability(monkeypatch):
    """Sets what a pretended NVIDIA GPU can do."""
    monkeypatch.setattr(torch.version, "hip", None)
    return lambda *version: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)


@pytest.mark.parametrize(("version", "usable"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_fp8_needs_compute_capability_8_9(capability, version, usable):
    capability(*version)
    assert (fp8_obstacle(**H100) is None) == usable


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": CPU}, "capability 8.9"),
        ({"dtype": torch.float32}, "bf16, not torch.float32"),
        ({"channels": 760}, "dim 760"),
        ({"vocabulary": 50_257}, "vocabulary 50257"),
    ],
)
def test_what_keeps_fp8_from_running_is_named(capability, change, reason):
    capability(9, 0)
    assert reason in fp8_obstacle(**H100 | change)


def test_a_gpu_of_another_maker_has_other_fp8_formats(capability, monkeypatch):
    capability(9, 4)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "NVIDIA" in fp8_obstacle(**H100)


def test_auto_takes_fp8_where_it_runs_and_else_chunks_and_says_why(capability):
    capability(9, 0)
    assert choose_head("auto", **H100) == ("fp8", "the fastest here")
    name, reason = choose_head("auto", **H100 | {"device": CPU})
    assert (name, "8.9" in reason) == ("chunked", True)


def test_a_model_with_a_bias_has_the_plain_head(capability):
    capability(9, 0)
    with_bias = H100 | {"bias": True}
    assert choose_head("auto", **with_bias)[0] == choose_head("plain", **with_bias)[0] == "plain"
    for name in ("chunked", "fp8"):
        with pytest.raises(ValueError, match=f"--head {name} cannot run here: it has no bias. Use --head auto"):
            choose_head(name, **with_bias)


@pytest.mark.parametrize("name", ["chunked", "plain"])
def test_a_head_that_runs_anywhere_is_taken_as_asked(name):
    assert choose_head(name, **H100 | {"device": CPU}) == (name, "as asked")


@pytest.mark.parametrize(("name", "cure"), [("fp8", "Use --head auto"), ("fp4", "fp8, chunked, plain")])
def test_a_head_that_cannot_run_is_refused_with_the_ones_that_can(name, cure):
    with pytest.raises(ValueError, match=rf"--head {name}.*{cure}"):
        choose_head(name, **H100 | {"device": CPU})


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU

needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < head.FP8_CAPABILITY,
    reason="this GPU has no FP8",
)


@pytest.mark.gpu
@needs_fp8
@both_caps
def test_fp8_on_a_gpu_equals_its_own_quantization(kind):
    inputs = problem(2048 + 24, channels=768, vocabulary=1024, dtype=torch.bfloat16, device="cuda")
    assert_equals_quantized(inputs, kind, ours(*inputs, kind, chunk=1024, precision="fp8"))


@pytest.mark.gpu
@needs_fp8
def test_compiled_fp8_on_a_gpu_equals_its_own_quantization():
    torch._dynamo.reset()
    inputs = problem(2048 + 24, channels=768, vocabulary=1024, dtype=torch.bfloat16, device="cuda")
    results = head._linear_cross_entropy(*inputs, *CAPS["sigmoid"], 1024, "fp8", True, True)
    assert_equals_quantized(inputs, "sigmoid", results)


@pytest.mark.gpu
def test_compiled_chunks_on_a_gpu_are_as_near_to_the_truth_as_torchs_own_bf16():
    torch._dynamo.reset()
    inputs = x, weight, targets = problem(2048, channels=768, vocabulary=1024, dtype=torch.bfloat16, device="cuda")
    results = through_operator(inputs, "plain", compiled=True)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = F.cross_entropy(capped(F.linear(*leaves).float(), "sigmoid"), targets, reduction="sum")
    exact = truth(*inputs, "sigmoid")
    for result, own, expected in zip(results[1:], torch.autograd.grad(loss, leaves), exact[1:], strict=True):
        assert distance(result, expected) < 1.5 * distance(own, expected)


@pytest.mark.gpu
def test_compiled_chunks_on_a_gpu_keep_the_logits_of_one_chunk():
    torch._dynamo.reset()
    inputs = problem(16_384, channels=128, vocabulary=50_304, dtype=torch.bfloat16, device="cuda")
    head._linear_cross_entropy(*inputs, *CAPS["sigmoid"], 2048, "plain", True, True)  # compiles
    torch.cuda.reset_peak_memory_stats()
    before, logits = torch.cuda.memory_allocated(), 2048 * 50_304 * 2
    head._linear_cross_entropy(*inputs, *CAPS["sigmoid"], 2048, "plain", True, True)
    assert torch.cuda.max_memory_allocated() - before < 3 * logits  # with their gradient and the weight's
