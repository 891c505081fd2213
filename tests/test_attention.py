"""Attention: every backend against dense masked softmax in float64, its cost, and what the compiler makes of it."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from kernels import attention
from kernels.attention import PortableAttention, VarlenAttention, choose_attention, document_starts, why_not_varlen

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def dense(q_BTHD, k_BTHD, v_BTHD, starts_BT, window):
    """All scores of all tokens, then a mask: query t sees max(its document's start, t - window) <= s <= t."""
    t, s = torch.arange(q_BTHD.size(1)).view(-1, 1), torch.arange(q_BTHD.size(1)).view(1, -1)
    seen = (s <= t) & (s >= t - window) & (s >= starts_BT.unsqueeze(-1))
    scores = torch.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD).masked_fill(~seen.unsqueeze(1), -math.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v_BTHD)


def boundaries(rows, sequence, starts_in_row):
    """cu_seqlens as the loader makes it: row starts and document starts, then filled up with the number of tokens."""
    cuts = sorted({row * sequence + start for row in range(rows) for start in (0, *starts_in_row) if start < sequence})
    return torch.tensor(cuts + [rows * sequence] * 3, dtype=torch.int32)


def inputs(rows, sequence, heads=2, head_dim=6, dtype=torch.float64):
    q, k, v, grad = (torch.randn(rows, sequence, heads, head_dim, dtype=torch.float64) for _ in range(4))
    return [x.to(dtype) for x in (q, k, v, grad)]


def with_gradients(attend, q, k, v, grad):
    """Output and the gradients of its product with `grad`, in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    y = attend(*leaves)
    return [x.double() for x in (y, *torch.autograd.grad(y, leaves, grad))]


def portable(cu_seqlens, rows, sequence, window):
    backend = PortableAttention()
    documents, window = backend.documents(cu_seqlens, rows, sequence), backend.window(window)
    return lambda q, k, v: backend(q, k, v, documents, window, sequence)


def reference(cu_seqlens, rows, sequence, window):
    starts = document_starts(cu_seqlens, rows, sequence)
    return lambda q, k, v: dense(q.double(), k.double(), v.double(), starts, window)


def assert_equals_dense(rows, sequence, window, starts_in_row):
    cu_seqlens = boundaries(rows, sequence, starts_in_row)
    q, k, v, grad = inputs(rows, sequence)
    ours = with_gradients(portable(cu_seqlens, rows, sequence, window), q, k, v, grad)
    truth = with_gradients(reference(cu_seqlens, rows, sequence, window), q, k, v, grad)
    torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-11)


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers


@pytest.mark.parametrize("slice_scores", [1, attention.SLICE_SCORES])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("sequence", "window"),
    [(1, 0), (1, 9), (63, 5), (64, 64), (65, 1000), (129, 0), (200, 63), (200, 65), (257, 128), (300, 129), (300, 299)],
)
def test_portable_attention_equals_dense_masked_softmax_forward_and_backward(
    monkeypatch, sequence, window, rows, slice_scores
):
    monkeypatch.setattr(attention, "SLICE_SCORES", slice_scores)  # 1: every block is a slice of its own
    assert_equals_dense(rows, sequence, window, starts_in_row=(1, 40, 41, 130, 256))


@given(
    rows=st.integers(1, 3),
    sequence=st.integers(1, 220),
    window=st.integers(0, 260),
    starts=st.sets(st.integers(1, 219), max_size=6),
    slice_scores=st.sampled_from([1, 30_000, attention.SLICE_SCORES]),
)
def test_portable_attention_equals_dense_masked_softmax_at_any_size(rows, sequence, window, starts, slice_scores):
    with mock.patch.object(attention, "SLICE_SCORES", slice_scores):
        assert_equals_dense(rows, sequence, window, starts)


# Rounding unit 2^-24 in fp32, 2^-8 in bf16: a few units, on outputs and gradients of size about 1.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("window", [20, 150])
def test_portable_attention_in_a_low_precision_errs_by_few_roundings(dtype, tolerance, window):
    rows, sequence = 2, 200
    cu_seqlens = boundaries(rows, sequence, (30, 100))
    q, k, v, grad = inputs(rows, sequence, head_dim=32, dtype=dtype)
    q = q * 0.12  # the scale that the model's queries have
    ours = with_gradients(portable(cu_seqlens, rows, sequence, window), q, k, v, grad)
    truth = with_gradients(reference(cu_seqlens, rows, sequence, window), q, k, v, grad.double())
    for name, found, wanted in zip(("output", "dq", "dk", "dv"), ours, truth, strict=True):
        error = (found - wanted).norm() / wanted.norm()
        assert error < tolerance, f"{name}: relative error {error:.2g}"


@pytest.mark.gpu
@pytest.mark.parametrize("window", [64, 256, 5000])
def test_the_fused_kernel_equals_dense_masked_softmax(window):
    rows, sequence = 2, 700
    cu_seqlens = boundaries(rows, sequence, (30, 100, 513))
    q, k, v, grad = inputs(rows, sequence, head_dim=128, dtype=torch.bfloat16)
    q = q * 0.1
    backend = VarlenAttention()
    fused = with_gradients(
        lambda q, k, v: backend(q, k, v, cu_seqlens.cuda(), backend.window(window), sequence),
        *(x.cuda() for x in (q, k, v, grad)),
    )
    truth = with_gradients(reference(cu_seqlens, rows, sequence, window), q, k, v, grad.double())
    for found, wanted in zip(fused, truth, strict=True):
        assert (found.cpu() - wanted).norm() / wanted.norm() < 1.5e-2


@given(rows=st.integers(1, 4), sequence=st.integers(1, 30), starts=st.sets(st.integers(1, 29), max_size=8))
def test_document_starts_are_those_that_a_loop_over_tokens_finds(rows, sequence, starts):
    cu_seqlens = boundaries(rows, sequence, starts)
    expected, start, cuts = [], 0, set(cu_seqlens.tolist())
    for position in range(rows * sequence):
        start = position % sequence if position in cuts else start
        expected.append(start)
    assert document_starts(cu_seqlens, rows, sequence).flatten().tolist() == expected


# ---------------------------------------------------------------------------------------------------------------------
# The cost


def multiply_adds(monkeypatch, sequence, window):
    """Of all matrix products in one forward and backward."""
    counted, matmul = [], torch.matmul

    def counting(a, b):
        product = matmul(a, b)
        counted.append(product.numel() * a.size(-1))
        return product

    cu_seqlens = boundaries(1, sequence, ())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "matmul", counting)
        with_gradients(portable(cu_seqlens, 1, sequence, window), *inputs(1, sequence, 1, 4))
    return sum(counted)


@pytest.mark.parametrize("window", [30, 64, 300])
def test_cost_grows_with_the_window_and_only_linearly_with_the_sequence(monkeypatch, window):
    short, long = (multiply_adds(monkeypatch, sequence, window) for sequence in (1024, 4096))
    assert long == 4 * short
    products, head_dim = 2 + 5, 4  # forward, and backward, where the scores are made again
    largest_block = 128
    assert long <= products * head_dim * 4096 * (window + 2 * largest_block)
    assert long >= products * head_dim * 4096 * window


# ---------------------------------------------------------------------------------------------------------------------
# The compiler


def test_the_operators_keep_every_promise_that_the_compiler_relies_on():
    q, k, v, grad = inputs(2, 70)
    starts, window = document_starts(boundaries(2, 70, (9, 50)), 2, 70), torch.tensor(12)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.speedrun.windowed_attention.default, (*leaves, starts, window))
    tensors = [x.detach() for x in (grad, *leaves)]
    torch.library.opcheck(torch.ops.speedrun.windowed_attention_backward.default, (*tensors, starts, window))


def test_one_compiled_graph_serves_every_window():
    counter, backend = CompileCounterWithBackend("aot_eager"), PortableAttention()
    torch.compiler.reset()
    compiled = torch.compile(backend, backend=counter, fullgraph=True, dynamic=False)
    q, k, v, grad = inputs(2, 150)
    starts = backend.documents(boundaries(2, 150, (33,)), 2, 150)
    for tokens in (10, 70, 140):
        window = backend.window(tokens)
        found, wanted = (
            with_gradients(lambda *qkv, attend=attend, window=window: attend(*qkv, starts, window, 150), q, k, v, grad)
            for attend in (compiled, backend)
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert counter.frame_count == 1


# ---------------------------------------------------------------------------------------------------------------------
# The choice


@pytest.mark.parametrize(
    ("name", "device", "dtype", "reason"),
    [
        ("varlen", CPU, torch.bfloat16, "it needs a CUDA device"),
        ("varlen", CUDA, torch.float32, "it needs bf16 or fp16, not torch.float32"),
        ("flash", CPU, torch.bfloat16, "unknown backend"),
    ],
)
def test_a_backend_that_cannot_run_is_an_error_that_says_why(name, device, dtype, reason):
    with pytest.raises(ValueError, match=f"--attention {name}.*{reason}.*(Use|Choose)"):
        choose_attention(name, device, dtype)


def test_a_fused_kernel_without_a_sliding_window_names_the_version_to_install(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, k, v, scale: None)
    assert "install torch 2.11 or newer" in why_not_varlen(CUDA, torch.bfloat16)
    monkeypatch.delattr("torch.nn.attention.varlen.varlen_attn")
    assert "install torch 2.11 or newer" in why_not_varlen(CUDA, torch.bfloat16)


def test_auto_takes_the_portable_form_where_the_fused_one_cannot_run_and_says_what_is_lost():
    backend, reason = choose_attention("auto", CPU, torch.float32)
    assert backend.name == "portable"
    assert "varlen would be faster but it needs a CUDA device" in reason


def test_auto_takes_the_fused_kernel_where_it_runs(monkeypatch):
    monkeypatch.setattr(attention, "why_not_varlen", lambda device, dtype: None)
    assert choose_attention("auto", CUDA, torch.bfloat16)[0].name == "varlen"
    assert choose_attention("portable", CUDA, torch.bfloat16)[0].name == "portable"
