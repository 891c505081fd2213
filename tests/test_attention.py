"""Attention: every backend against a dense masked softmax in float64, its cost, the choice of one.

Without a GPU, "flat" runs the flash backend on the CPU: torch's operators, with their real
signatures, compute densely.
"""

import math
import re
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from kernels import flash_attention, portable_attention
from kernels.attention import choose_attention
from kernels.flash_attention import KERNELS, FlashAttention, why_not_flash
from kernels.portable_attention import PortableAttention, document_starts

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def boundaries(rows, sequence, starts):
    """cu_seqlens as the loader makes it, filled up with empty documents at the end."""
    cuts = {row * sequence + start for row in range(rows) for start in (0, *starts)}
    inside = sorted(cut for cut in cuts if cut < rows * sequence)
    return torch.tensor(inside + [rows * sequence] * 3, dtype=torch.int32)


def visible(cu_seqlens, window):
    """(N, N) bool: the rule itself, in the flat stream. No document spans two rows."""
    token = torch.arange(int(cu_seqlens[-1]))
    document = torch.bucketize(token, cu_seqlens[1:].long(), right=True)
    distance = token.view(-1, 1) - token.view(1, -1)
    same_document = document.view(-1, 1) == document.view(1, -1)
    return same_document & (distance >= 0) & (distance <= window)


def dense(q_NHD, k_NHD, v_NHD, seen_NN):
    scores = torch.einsum("qhd,khd->hqk", q_NHD, k_NHD).masked_fill(~seen_NN, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_NHD), scores.logsumexp(-1)


def problem(rows, sequence, heads=2, head_dim=8, dtype=torch.float64):
    """Queries, keys and values as one projection gives them, (B, T, 3, H, D), and a gradient."""
    qkv = torch.randn(rows, sequence, 3, heads, head_dim, dtype=torch.float64)
    qkv[:, :, 0] *= 0.8 / head_dim**0.5
    grad = torch.randn(rows, sequence, heads, head_dim, dtype=torch.float64)
    return qkv.to(dtype), grad.to(dtype)


def by_backend(backend, qkv, grad, cu_seqlens, window, attend=None):
    """Output and gradient by qkv, in float64 on the CPU."""
    rows, sequence = qkv.shape[:2]
    longest = int(cu_seqlens.diff().max())
    documents = backend.documents(cu_seqlens.to(qkv.device), rows, sequence, longest)
    leaf = qkv.detach().clone().requires_grad_()
    y = (attend or backend)(*leaf.unbind(2), documents, backend.window(window))
    return [x.detach().double().cpu() for x in (y, *torch.autograd.grad(y, leaf, grad))]


def truth(qkv, grad, cu_seqlens, window):
    leaf = qkv.detach().double().cpu().requires_grad_()
    y = dense(*leaf.flatten(0, 1).unbind(1), visible(cu_seqlens, window))[0].view(grad.shape)
    return [y.detach(), *torch.autograd.grad(y, leaf, grad.double().cpu())]


def relative_error(found, wanted):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))


@pytest.fixture
def flat(monkeypatch):
    """The flash backend, over torch's operators made to compute on the CPU."""

    def seen(cu_seqlens, longest, dropout, causal, scale, window_size_left, window_size_right):
        assert (cu_seqlens.dtype, dropout, scale, window_size_right) == (torch.int32, 0.0, 1.0, 0)
        assert longest >= cu_seqlens.diff().max()
        assert causal == (window_size_left == -1)
        return visible(cu_seqlens, int(cu_seqlens[-1]) if causal else window_size_left)

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options):
        out, lse = dense(q, k, v, seen(cu_q, max_q, dropout, causal, **options))
        state = torch.zeros(2, dtype=torch.uint64)
        return out, lse.float(), state, torch.zeros((), dtype=torch.uint64), q.new_empty(0)

    def backward(
        grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, state, unused, **options
    ):
        hidden = ~seen(cu_q, max_q, dropout, causal, **options)
        scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(hidden, -math.inf)
        p = (scores - lse.unsqueeze(-1)).exp()  # from what the forward pass saved
        mean = (grad * out).sum(-1).T.unsqueeze(-1)
        ds = p * (torch.einsum("qhd,khd->hqk", grad, v) - mean)
        dk, dv = (torch.einsum("hqk,qhd->khd", a, b) for a, b in ((ds, q), (p, grad)))
        return torch.einsum("hqk,khd->qhd", ds, k), dk, dv

    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield FlashAttention("varlen")
    library._destroy()


RUNGS = [
    # name, dtype, tolerance: exact, or a few roundings of 2^-24 or 2^-8
    ("portable", torch.float64, 1e-11),
    ("portable", torch.float32, 2e-6),
    ("portable", torch.bfloat16, 1.5e-2),
    ("flat", torch.float64, 1e-5),  # keeps the log-sum-exp in float32
    *(pytest.param((name, torch.bfloat16, 1.5e-2), marks=pytest.mark.gpu) for name in KERNELS),
]


@pytest.fixture(params=RUNGS, ids=str)
def rung(request):
    """A backend, with device, dtype and tolerance; skips where it cannot run."""
    name, dtype, tolerance = request.param
    if name == "portable":
        return PortableAttention(), CPU, dtype, tolerance
    if name == "flat":
        return request.getfixturevalue("flat"), CPU, dtype, tolerance
    if obstacle := why_not_flash(name, CUDA, dtype, 64):
        pytest.skip(f"{name}: {obstacle}")
    return FlashAttention(name), CUDA, dtype, tolerance


# ---- The same numbers


@pytest.mark.parametrize("window", [0, 64, 130, 5000])
@pytest.mark.parametrize(("rows", "sequence", "starts"), [(1, 257, ()), (2, 385, (30, 100, 384))])
def test_every_backend_equals_dense_masked_softmax(rung, rows, sequence, starts, window):
    backend, device, dtype, tolerance = rung
    cu_seqlens = boundaries(rows, sequence, starts)
    qkv, grad = problem(rows, sequence, head_dim=64, dtype=dtype)
    found = by_backend(backend, qkv.to(device), grad.to(device), cu_seqlens, window)
    assert relative_error(found, truth(qkv, grad, cu_seqlens, window)) < tolerance


@given(
    rows=st.integers(1, 3), sequence=st.integers(1, 220), window=st.integers(0, 260),
    starts=st.sets(st.integers(1, 219), max_size=6),
    piece_scores=st.sampled_from([1, 30_000, portable_attention.PIECE_SCORES]),
)  # fmt: skip
def test_portable_attention_is_exact_at_any_size(rows, sequence, window, starts, piece_scores):
    cuts = [start for start in starts if start < sequence]
    cu_seqlens, (qkv, grad) = boundaries(rows, sequence, cuts), problem(rows, sequence)
    with mock.patch.object(portable_attention, "PIECE_SCORES", piece_scores):
        found = by_backend(PortableAttention(), qkv, grad, cu_seqlens, window)
    torch.testing.assert_close(found, truth(qkv, grad, cu_seqlens, window), rtol=1e-11, atol=1e-11)


# ---- Cost and compilation


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("window", [30, 300])
def test_cost_grows_with_the_window_and_linearly_with_the_sequence(monkeypatch, window, kept):
    def counting(a, b, bmm=torch.bmm):
        product = bmm(a, b)
        multiply_adds[sequence] += product.numel() * a.size(-1)
        return product

    monkeypatch.setattr(torch, "bmm", counting)
    monkeypatch.setattr(portable_attention, "KEPT_SCORES", 1 << 30 if kept else 0)
    multiply_adds = {1024: 0, 2048: 0, 4096: 0}
    for sequence in multiply_adds:
        qkv, grad = problem(1, sequence, heads=1, head_dim=4)
        by_backend(PortableAttention(), qkv, grad, boundaries(1, sequence, ()), window)
    # The first blocks of a row see fewer keys; every later token costs the same.
    short, middle, long = multiply_adds.values()
    assert long - middle == 2 * (middle - short)
    products = 2 + 4 + (not kept)  # forward, backward, and scores computed again
    of_a_key = products * 4 * 4096  # head_dim, sequence
    assert of_a_key * window <= long <= of_a_key * (window + 2 * portable_attention.LARGE_BLOCK)


def test_the_operators_keep_the_promises_that_the_compiler_relies_on(flat):
    ops, cu_seqlens = torch.ops.speedrun, boundaries(2, 256, ())
    qkv, grad = problem(2, 256)
    starts, window = document_starts(cu_seqlens, 2, 256), torch.tensor(200)
    leaves = [x.clone().requires_grad_() for x in qkv.unbind(2)]
    for room in (0, 2 * 2 * 128 * (128 + 256)):  # filled whole, as each row is one document
        torch.library.opcheck(ops.windowed_attention.default, (*leaves, starts, window, 256, room))
        inputs = *(x.detach() for x in leaves), starts, window
        kept = ops.windowed_attention(*inputs, 256, room)[1]
        torch.library.opcheck(ops.windowed_attention_backward.default, (grad, *inputs, kept, 256))
    leaves = [x.flatten(0, 1).clone().requires_grad_() for x in qkv.unbind(2)]
    documents = cu_seqlens, window, torch.tensor(256)
    torch.library.opcheck(ops.flash_attention.default, (*leaves, *documents))
    inputs = [x.detach() for x in leaves]
    saved = *inputs, *ops.flash_attention(*inputs, *documents), *documents
    backward = ops.flash_attention_backward.default
    torch.library.opcheck(backward, (grad.flatten(0, 1), *saved))


def test_one_compiled_graph_serves_every_window(rung):
    backend, device, dtype, tolerance = rung
    counter = CompileCounterWithBackend("aot_eager" if device == CPU else "inductor")
    torch.compiler.reset()
    compiled = torch.compile(backend, backend=counter, fullgraph=True, dynamic=False)
    cu_seqlens = boundaries(2, 150, (9, 33, 100))
    qkv, grad = (x.to(device) for x in problem(2, 150, dtype=dtype))
    for window in (10, 60, 140):
        found = by_backend(backend, qkv, grad, cu_seqlens, window, attend=compiled)
        assert relative_error(found, truth(qkv, grad, cu_seqlens, window)) < tolerance
    assert counter.frame_count == 1


# ---- The choice


@pytest.fixture
def gpu(monkeypatch):
    """Pretends a GPU of a compute capability, with these implementations and torch installed."""

    def pretend(capability, *installed, version="2.13.0"):
        def activate(impl):
            if impl not in installed:
                raise OSError(f"undefined symbol in {impl}")  # packages fail in many ways

        monkeypatch.setattr(flash_attention, "activate", activate)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch, "__version__", version)

    return pretend


@pytest.mark.parametrize(("name", "changed", "reason"), [
    ("varlen", {"device": CPU}, "it needs an NVIDIA GPU with CUDA"),
    ("varlen", {"dtype": torch.float32}, "it needs bf16 or fp16, not torch.float32"),
    ("varlen", {"capability": 7}, "it runs on .* 8.x to .*, not 7.x"),
    ("flash3", {"capability": 10}, "it runs on .* 9.x to 9.x, not 10.x"),
    ("flash4", {"capability": 9, "version": "2.9.1+cu128"}, "it needs torch 2.13 or newer"),
])  # fmt: skip
def test_a_backend_that_cannot_run_is_refused_by_name_and_passed_over_by_auto(
    gpu, name, changed, reason
):
    given = {"device": CUDA, "dtype": torch.bfloat16, "head_dim": 128, "capability": 8} | changed
    gpu(given.pop("capability"), version=given.pop("version", "2.13.0"))
    refusal = f"--attention {name} cannot run here: {reason}.*Use --attention portable"
    with pytest.raises(ValueError, match=refusal):
        choose_attention(name, **given)
    for other in ("auto", "portable"):
        assert choose_attention(other, **given)[0].name == "portable"


@pytest.mark.parametrize(("capability", "installed", "torchs", "choice", "reason"), [
    (7, (None,), "2.13.0", "portable", "varlen may be faster but it runs on"),
    (9, (None, "FA3", "FA4"), "2.13.0", "flash3", "the fastest here"),
    (9, (None,), "2.13.0", "varlen", "flash3 may be .*; flash4 may be .*pip install flash-attn-4"),
    (10, (None, "FA3", "FA4"), "2.13.0", "flash4", "the fastest here"),
    (10, (None, "FA4"), "2.100.0", "flash4", "the fastest here"),
    (12, (None, "FA4"), "2.13.0", "varlen", "the fastest here"),
])  # fmt: skip
def test_auto_takes_the_fastest_installed_and_names_what_may_be_faster(
    gpu, capability, installed, torchs, choice, reason
):
    gpu(capability, *installed, version=torchs)
    backend, why = choose_attention("auto", CUDA, torch.bfloat16)
    assert backend.name == choice
    assert re.match(reason, why)
