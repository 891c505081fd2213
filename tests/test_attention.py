"""Attention: every backend against dense masked softmax in float64, its cost, and what the compiler makes of it.

What needs a GPU and a package to run is held to its interface by stand-ins that compute densely on the CPU.
"""

import inspect
import math
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from functorch.compile import min_cut_rematerialization_partition as min_cut
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from kernels import flex_attention, portable_attention
from kernels.attention import ATTENTIONS, BACKENDS, choose_attention, why_not
from kernels.flash_attention import KERNELS, FlashAttention, Kernel
from kernels.flex_attention import FlexAttention
from kernels.portable_attention import PortableAttention, document_starts

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


@pytest.mark.parametrize("slice_scores", [1, portable_attention.SLICE_SCORES])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("sequence", "window"),
    [(1, 0), (1, 9), (63, 5), (64, 64), (65, 1000), (129, 0), (200, 63), (200, 65), (257, 128), (300, 129), (300, 299)],
)
def test_portable_attention_equals_dense_masked_softmax_forward_and_backward(
    monkeypatch, sequence, window, rows, slice_scores
):
    monkeypatch.setattr(portable_attention, "SLICE_SCORES", slice_scores)  # 1: every block is a slice of its own
    assert_equals_dense(rows, sequence, window, starts_in_row=(1, 40, 41, 130, 256))


@given(
    rows=st.integers(1, 3),
    sequence=st.integers(1, 220),
    window=st.integers(0, 260),
    starts=st.sets(st.integers(1, 219), max_size=6),
    slice_scores=st.sampled_from([1, 30_000, portable_attention.SLICE_SCORES]),
)
def test_portable_attention_equals_dense_masked_softmax_at_any_size(rows, sequence, window, starts, slice_scores):
    with mock.patch.object(portable_attention, "SLICE_SCORES", slice_scores):
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


GPU_ONLY = [pytest.param(name, marks=pytest.mark.gpu) for name in (*KERNELS, "flex")]
TOLERANCE = {torch.float64: 1e-10, torch.bfloat16: 1.5e-2}


def chosen(name):
    """The backend where it runs, with the device and dtype to run it in; skips where it does not."""
    device, dtype = (CUDA, torch.bfloat16) if name in (*KERNELS, "flex") else (CPU, torch.float64)
    if obstacle := why_not(name, device, dtype):
        pytest.skip(f"{name}: {obstacle}")
    restore_flash_attention_impl()  # what an earlier "flash3" has put in the place of the framework's own
    return choose_attention(name, device, dtype)[0], device, dtype


def assert_near(found, wanted, dtype):
    """By the largest of all parts: a gradient may be nothing but rounding."""
    for found_part, wanted_part in zip(found, wanted, strict=True):
        error = (found_part.cpu() - wanted_part.cpu()).norm() / max(part.norm() for part in wanted)
        assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [0, 1, 64, 130, 512, 5000])
@pytest.mark.parametrize(
    ("rows", "sequence", "starts_in_row"), [(1, 257, ()), (2, 700, (30, 100, 513)), (3, 385, (384,))]
)
@pytest.mark.parametrize("name", ["portable", *GPU_ONLY])
def test_every_backend_equals_dense_masked_softmax_forward_and_backward(name, rows, sequence, starts_in_row, window):
    backend, device, dtype = chosen(name)
    cu_seqlens = boundaries(rows, sequence, starts_in_row)
    q, k, v, grad = inputs(rows, sequence, head_dim=64, dtype=dtype)
    q, longest = q * 0.1, int(cu_seqlens.diff().max())
    documents = backend.documents(cu_seqlens.to(device), rows, sequence)
    found = with_gradients(
        lambda q, k, v: backend(q, k, v, documents, backend.window(window), longest),
        *(x.to(device) for x in (q, k, v, grad)),
    )
    assert_near(found, with_gradients(reference(cu_seqlens, rows, sequence, window), q, k, v, grad.double()), dtype)


@pytest.mark.parametrize(("window", "longest"), [(0, 1), (63, 100), (64, 129), (128, 700), (129, 500), (600, 700)])
def test_probabilities_that_are_kept_give_the_bits_of_those_that_are_made_again(monkeypatch, window, longest):
    cu_seqlens = boundaries(2, 700, range(longest, 700, longest))
    tensors = inputs(2, 700, heads=3, head_dim=16, dtype=torch.bfloat16)
    monkeypatch.setattr(portable_attention, "SLICE_SCORES", 1 << 17)  # several slices
    backend, results = PortableAttention(), []
    for most in (1 << 30, 0):
        monkeypatch.setattr(portable_attention, "KEPT_SCORES", most)
        documents, size = backend.documents(cu_seqlens, 2, 700), backend.window(window)
        results.append(with_gradients(lambda *qkv: backend(*qkv, documents, size, longest), *tensors))  # noqa: B023
    assert all(torch.equal(kept, again) for kept, again in zip(*results, strict=True))


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


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("window", [30, 64, 300])
def test_cost_grows_with_the_window_and_only_linearly_with_the_sequence(monkeypatch, window, kept):
    monkeypatch.setattr(portable_attention, "KEPT_SCORES", 1 << 30 if kept else 0)
    short, long = (multiply_adds(monkeypatch, sequence, window) for sequence in (1024, 4096))
    assert long == 4 * short
    products, head_dim = 2 + 4 + (not kept), 4  # forward, and backward, where the scores may be made again
    largest_block = 128
    assert long <= products * head_dim * 4096 * (window + 2 * largest_block)
    assert long >= products * head_dim * 4096 * window


# ---------------------------------------------------------------------------------------------------------------------
# The compiler


def test_the_operators_keep_every_promise_that_the_compiler_relies_on():
    q, k, v, grad = inputs(2, 256)  # at this length and window the kept numbers fill all of their place
    starts, window = document_starts(boundaries(2, 256, (9, 50)), 2, 256), torch.tensor(200)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    tensors = [x.detach() for x in (grad, *leaves)]
    for keep in (True, False):
        torch.library.opcheck(torch.ops.speedrun.windowed_attention.default, (*leaves, starts, window, 256, keep))
        kept = torch.ops.speedrun.windowed_attention(*tensors[1:], starts, window, 256, keep)[1]
        torch.library.opcheck(
            torch.ops.speedrun.windowed_attention_backward.default, (*tensors, starts, window, kept, 256))


@pytest.mark.parametrize("name", ["portable", *GPU_ONLY])
def test_one_compiled_graph_serves_every_window(name):
    backend, device, dtype = chosen(name)
    assert_one_graph(backend, device, dtype, "aot_eager" if device == CPU else "inductor")


def assert_one_graph(backend, device, dtype, compiler):
    """Documents, and attention to them, compiled; the same numbers as without."""

    def attend(q, k, v, cu_seqlens, window):
        return backend(q, k, v, backend.documents(cu_seqlens, 2, 150), window, 117)

    counter = CompileCounterWithBackend(compiler)
    torch.compiler.reset()
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=False)
    q, k, v, grad = (x.to(device) for x in inputs(2, 150, head_dim=64, dtype=dtype))
    cu_seqlens = boundaries(2, 150, (33,)).to(device)
    for tokens in (10, 70, 140):
        window = backend.window(tokens)
        found, wanted = (
            with_gradients(lambda *qkv, f=f, window=window: f(*qkv, cu_seqlens, window), 0.1 * q, k, v, grad)
            for f in (compiled, attend)
        )
        assert_near(found, wanted, dtype)
    assert counter.frame_count == 1


# ---------------------------------------------------------------------------------------------------------------------
# The flat stream: three kernels behind one operator, with stand-ins that compute densely


def visible(cu_seqlens, window, tokens):
    """(N, N) bool, from the boundaries of documents in the flat stream."""
    token = torch.arange(tokens)
    document = torch.bucketize(token, cu_seqlens[1:].long(), right=True)
    distance = token.view(-1, 1) - token.view(1, -1)
    seen = (document.view(-1, 1) == document.view(1, -1)) & (distance >= 0)
    return seen if window is None else seen & (distance <= window)


def flat_forward(q, k, v, cu_seqlens, window, longest):
    assert cu_seqlens.dtype == torch.int32
    assert longest >= cu_seqlens.diff().max()
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~visible(cu_seqlens, window, len(q)), -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).float()


def flat_backward(grad, q, k, v, out, lse, cu_seqlens, window, longest):
    """From what the forward pass saved: the probabilities are exp(scores - lse)."""
    seen = visible(cu_seqlens, window, len(q))
    p = (torch.einsum("qhd,khd->hqk", q, k) - lse.unsqueeze(-1)).exp().masked_fill(~seen, 0)
    mean = (grad * out).sum(-1).T.unsqueeze(-1)
    ds = p * (torch.einsum("qhd,khd->hqk", grad, v) - mean)
    einsum = torch.einsum
    return einsum("hqk,khd->qhd", ds, k), einsum("hqk,qhd->khd", ds, q), einsum("hqk,qhd->khd", p, grad)


@pytest.fixture
def stand_in(monkeypatch):
    """A kernel of the table that runs anywhere."""
    kernel = Kernel(flat_forward, flat_backward, lambda: True, "", range(100))
    monkeypatch.setitem(KERNELS, "stand-in", kernel)
    return FlashAttention("stand-in")


@pytest.fixture
def aten_on_cpu():
    """The framework's operators, with their real schemas, compute on the CPU."""

    def forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right
    ):
        assert cu_q is cu_k
        assert (max_q, scale, window_size_right, dropout, debug) == (max_k, 1.0, 0, 0.0, False)
        assert causal == (window_size_left == -1)
        out, lse = flat_forward(q, k, v, cu_q, None if causal else window_size_left, max_q)
        return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_empty(0)

    def backward(
        grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, state, unused,
        *, scale, window_size_left, window_size_right,
    ):  # fmt: skip
        assert (state.shape, state.dtype, unused.numel()) == ((2,), torch.uint64, 0)
        assert (max_q, scale, window_size_right, dropout) == (max_k, 1.0, 0, 0.0)
        assert causal == (window_size_left == -1)
        return flat_backward(grad, q, k, v, out, lse, cu_q, None if causal else window_size_left, max_q)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


# The parameters of flash-attn-4 4.0.0b36, names and order, all that follow the tensors optional there.
CUTE_FORWARD = """qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k min_seqlen_k page_table
    softmax_scale causal softcap window_size_left window_size_right learnable_sink tile_mn mma_pv_is_rs intra_wg_overlap
    num_threads num_splits pack_gqa _arch score_mod mask_mod block_sparse_tensors return_lse out lse aux_tensors
    aux_scalars q_descale k_descale v_descale gather_kv_indices scheduler_metadata seqlen_k_per_split
    disable_scheduler_metadata gather_bwd_recompute_p"""
CUTE_BACKWARD = """softmax_scale causal softcap window_size_left window_size_right m_block_size n_block_size num_threads
    pack_gqa num_stages_Q num_stages_dO SdP_swapAB dKV_swapAB dQ_swapAB AtomLayoutMSdP AtomLayoutNdKV AtomLayoutMdQ
    V_in_regs cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k deterministic dq dk dv score_mod
    score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors dlse learnable_sink"""


def with_signature(tensors, options):
    """Makes a function take its arguments as that signature binds them, and refuse what it does not have."""
    either, optional = inspect.Parameter.POSITIONAL_OR_KEYWORD, {"default": None}
    signature = inspect.Signature(
        [inspect.Parameter(name, either) for name in tensors.split()]
        + [inspect.Parameter(name, either, **optional) for name in options.split()]
    )

    def decorate(function):
        def bound(*args, **kwargs):
            return function(SimpleNamespace(**signature.bind(*args, **kwargs).arguments))

        return bound

    return decorate


@pytest.fixture
def cute_on_cpu(monkeypatch):
    """A package `flash_attn.cute` that has the real one's parameters and computes on the CPU."""

    def check(a):
        assert a.cu_seqlens_q is a.cu_seqlens_k
        assert (a.max_seqlen_q, a.softmax_scale, a.causal) == (a.max_seqlen_k, 1.0, True)

    @with_signature("q k v", CUTE_FORWARD)
    def forward(a):
        check(a)
        assert a.return_lse  # without it there is none where no gradient is asked for
        return *flat_forward(a.q, a.k, a.v, a.cu_seqlens_q, a.window_size_left, a.max_seqlen_q), None, None, None

    @with_signature("q k v out dout lse", CUTE_BACKWARD)
    def backward(a):
        check(a)
        reach = a.cu_seqlens_q, a.window_size_left, a.max_seqlen_q
        return flat_backward(a.dout, a.q, a.k, a.v, a.out, a.lse, *reach)

    install(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)


def install(monkeypatch, name, **contents):
    """A module of that name, and the packages that it is in."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    vars(sys.modules[name]).update(contents)


@pytest.fixture
def flash3_installed(monkeypatch):
    install(monkeypatch, "flash_attn_interface")
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=flat_forward, bwd=flat_backward))
    yield
    restore_flash_attention_impl()


@pytest.mark.parametrize("window", [0, 5, 69, 70, 1000])
@pytest.mark.parametrize("name", ["stand-in", "varlen", "flash4"])
@pytest.mark.usefixtures("stand_in", "aten_on_cpu", "cute_on_cpu")
def test_a_kernel_is_asked_for_what_the_interface_promises(name, window):
    rows, sequence = 2, 70
    backend, cu_seqlens = FlashAttention(name), boundaries(rows, sequence, (9, 50))
    documents = backend.documents(cu_seqlens, rows, sequence)
    q, k, v, grad = inputs(rows, sequence)
    found = with_gradients(
        lambda *qkv: backend(*qkv, documents, backend.window(window), int(cu_seqlens.diff().max())), q, k, v, grad
    )
    truth = with_gradients(reference(cu_seqlens, rows, sequence, window), q, k, v, grad)
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)  # lse is kept in fp32


@pytest.mark.parametrize(("window", "seen"), [(0, 0), (40, 40), (41, None), (1000, None)])
def test_a_window_as_long_as_the_longest_document_is_no_window(monkeypatch, stand_in, window, seen):
    asked = []

    def forward(*args):
        asked.append(args[-2:])
        return flat_forward(*args)

    monkeypatch.setitem(KERNELS, "stand-in", KERNELS["stand-in"]._replace(forward=forward))
    q, k, v, _ = inputs(1, 70)
    stand_in(q, k, v, boundaries(1, 70, (29,)), stand_in.window(window), 41)
    assert asked == [(seen, 41)]


@pytest.mark.usefixtures("flash3_installed")
def test_flash3_takes_the_place_of_the_framework_s_own_kernel():
    assert KERNELS["flash3"][:2] == KERNELS["varlen"][:2]
    FlashAttention("varlen")
    assert current_flash_attention_impl() is None
    FlashAttention("flash3")
    assert current_flash_attention_impl() == "FA3"


def test_the_flat_operators_keep_every_promise_that_the_compiler_relies_on(stand_in):
    q, k, v, grad = (x.flatten(0, 1) for x in inputs(2, 35))
    rest = boundaries(2, 35, (9,)), torch.tensor(12), 35, "stand-in"
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.speedrun.flash_attention.default, (*leaves, *rest))
    q, k, v = (x.detach() for x in leaves)
    saved = q, k, v, *torch.ops.speedrun.flash_attention(q, k, v, *rest)
    torch.library.opcheck(torch.ops.speedrun.flash_attention_backward.default, (grad, *saved, *rest))


def test_one_compiled_graph_of_the_flat_operator_serves_every_window(stand_in):
    assert_one_graph(stand_in, CPU, torch.float64, "aot_eager")


def test_the_flat_operator_takes_what_is_cut_from_a_product_of_all_three(stand_in):
    cu_seqlens, window, grad = boundaries(2, 70, (9,)), stand_in.window(12), torch.randn(2, 70, 2, 6)
    qkv = torch.randn(2, 70, 6, 6, requires_grad=True)
    y = torch.compile(stand_in, backend="aot_eager", fullgraph=True)(*qkv.chunk(3, dim=2), cu_seqlens, window, 70)
    truth = reference(cu_seqlens, 2, 70, 12)(*qkv.chunk(3, dim=2))
    found, wanted = (torch.autograd.grad(out, qkv, grad.to(out))[0] for out in (y, truth))
    torch.testing.assert_close((y, found), (truth.float(), wanted), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# FlexAttention


@given(
    rows=st.integers(1, 2),
    sequence=st.integers(1, 700),
    window=st.integers(0, 800),
    starts=st.sets(st.integers(1, 699), max_size=5),
)
def test_the_blocks_of_flex_hold_every_visible_pair_and_full_ones_no_other(rows, sequence, window, starts):
    starts_BT = document_starts(boundaries(rows, sequence, starts), rows, sequence)
    mask = flex_attention.block_mask(starts_BT, torch.tensor(window))
    t, s = torch.arange(sequence).view(-1, 1), torch.arange(sequence).view(1, -1)
    seen = (s <= t) & (s >= t - window) & (s >= starts_BT.unsqueeze(-1))
    in_part = listed(mask.kv_num_blocks, mask.kv_indices)
    in_full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert torch.equal(mask.mask_mod(torch.arange(rows).view(-1, 1, 1), 0, t, s), seen)
    assert not (in_part & in_full).any()
    seen_blocks, whole_blocks = (tiles(seen, padded_with=value) for value in (False, True))
    assert torch.equal(in_part | in_full, seen_blocks.any(-1).any(-1))
    assert not (in_full & ~whole_blocks.all(-1).all(-1)).any()
    assert mask.seq_lengths == (sequence, sequence)


def tiles(seen, padded_with):
    """(B, T, T) -> (B, N, N, 128, 128)."""
    padding = -seen.size(1) % flex_attention.BLOCK
    padded = torch.nn.functional.pad(seen, (0, padding, 0, padding), value=padded_with)
    return padded.unfold(1, 128, 128).unfold(2, 128, 128)


def listed(counts, indices):
    """(B, 1, N) counts and (B, 1, N, N) lists of blocks as a table of booleans, (B, N, N)."""
    used = torch.arange(indices.size(-1)) < counts.unsqueeze(-1)
    table = torch.zeros(indices.shape, dtype=torch.int64).scatter_add_(-1, indices.long(), used.long())
    assert (table <= 1).all()  # none twice
    return table.squeeze(1).bool()


@pytest.mark.parametrize("window", [0, 5, 200, 5000])
def test_flex_attention_equals_dense_masked_softmax(monkeypatch, window):
    rows, sequence = 2, 300
    backend, cu_seqlens = FlexAttention(), boundaries(rows, sequence, (30, 100))
    backend.kernel = torch.nn.attention.flex_attention.flex_attention  # not compiled
    documents = backend.documents(cu_seqlens, rows, sequence)
    q, k, v, _ = inputs(rows, sequence, head_dim=16)
    found = backend(q, k, v, documents, backend.window(window), sequence)
    torch.testing.assert_close(found, reference(cu_seqlens, rows, sequence, window)(q, k, v), rtol=1e-10, atol=1e-10)


def test_a_compiled_step_makes_each_window_s_mask_of_flex_once_for_all_layers(monkeypatch):
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *qkv: None)  # no backward on CPUs
    backend, sorts = FlexAttention(), []

    def layers(q, k, v, cu_seqlens, *windows):
        documents = backend.documents(cu_seqlens, 1, 130)
        for window in 2 * windows:
            q = backend(q, k, v, documents, window, 130)
        return q

    def count(graph, _):
        sorts.append(sum("sort" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    q, k, v, grad = inputs(1, 130, head_dim=16)
    compiled = torch.compile(layers, backend=aot_autograd(fw_compiler=count, partition_fn=min_cut), fullgraph=True)
    for window in (20, 40):  # one graph for both
        windows = backend.window(window), backend.window(2 * window)
        compiled(q.requires_grad_(), k, v, boundaries(1, 130, (33,)), *windows).backward(grad)
    assert sorts == [2 * 2, 0]  # a mask has two lists to transpose: of blocks in part, and in full


# ---------------------------------------------------------------------------------------------------------------------
# The choice


def pretend_gpu(monkeypatch, capability, built=True):
    """A GPU of that compute capability and no packages."""
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setitem(KERNELS, "varlen", KERNELS["varlen"]._replace(load=lambda: built))


@pytest.mark.parametrize(
    ("name", "device", "dtype", "capability", "reason"),
    [
        ("varlen", CPU, torch.bfloat16, 8, "it needs an NVIDIA GPU with CUDA"),
        ("flash4", CPU, torch.bfloat16, 9, "it needs an NVIDIA GPU with CUDA"),
        ("flex", CPU, torch.float32, 9, "it has a backward pass only on CUDA devices"),
        ("varlen", CUDA, torch.float32, 8, "it needs bf16 or fp16, not torch.float32"),
        ("varlen", CUDA, torch.float16, 7, r"it has no kernel for compute capability 7.x \(the oldest: 8.0\)"),
        ("flash4", CUDA, torch.bfloat16, 8, r"it has no kernel for compute capability 8.x \(the oldest: 9.0\)"),
        ("flash3", CUDA, torch.bfloat16, 10, r"it has no kernel for compute capability 10.x \(the oldest: 9.0\)"),
        ("flash3", CUDA, torch.bfloat16, 9, ".*flash_attn_interface.*; build FlashAttention 3"),
        ("flash4", CUDA, torch.bfloat16, 12, ".*flash_attn.*; pip install flash-attn-4 .* 95 MB"),
    ],
)
def test_a_backend_that_cannot_run_is_an_error_that_says_why(monkeypatch, name, device, dtype, capability, reason):
    pretend_gpu(monkeypatch, capability)
    with pytest.raises(ValueError, match=f"--attention {name} cannot run here: {reason}.*Use --attention portable"):
        choose_attention(name, device, dtype)


@pytest.mark.parametrize("head_dim", [20, 264])
def test_a_head_dim_that_fused_kernels_lack_is_an_error_by_name_and_portable_by_auto(monkeypatch, head_dim):
    pretend_gpu(monkeypatch, 8)
    with pytest.raises(ValueError, match=f"--attention varlen .*multiples of 8 up to 256, not {head_dim}"):
        choose_attention("varlen", CUDA, torch.bfloat16, head_dim)
    backend, reason = choose_attention("auto", CUDA, torch.bfloat16, head_dim)
    assert (backend.name, f"not {head_dim}" in reason) == ("portable", True)
    assert choose_attention("auto", CUDA, torch.bfloat16, 64)[0].name == "varlen"


def test_a_package_that_is_there_but_broken_is_a_reason_and_no_crash(monkeypatch, tmp_path):
    pretend_gpu(monkeypatch, 9)
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('undefined symbol: at_print')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    assert why_not("flash3", CUDA, torch.bfloat16).startswith("undefined symbol: at_print; build FlashAttention 3")
    install(monkeypatch, "flash_attn_interface")
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=flat_forward))
    assert "object has no attribute 'bwd'; build FlashAttention 3" in why_not("flash3", CUDA, torch.bfloat16)


def test_a_build_without_flash_attention_is_a_reason(monkeypatch):
    pretend_gpu(monkeypatch, 8, built=False)
    assert "this build of torch was made without it" in why_not("varlen", CUDA, torch.bfloat16)
    assert choose_attention("auto", CUDA, torch.bfloat16)[0].name == "portable"


def test_flex_without_triton_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in why_not("flex", CUDA, torch.float32)


@pytest.mark.parametrize(
    ("capability", "installed", "choice", "reason"),
    [
        (7, (), "portable", "varlen may be faster but it has no kernel for compute capability 7.x"),
        (8, ("flash3", "flash4"), "varlen", "the fastest here"),
        (9, ("flash3", "flash4"), "flash3", "the fastest here"),
        (9, ("flash4",), "flash4", "flash3 may be faster but .*build FlashAttention 3"),
        (9, (), "varlen", "flash3 may be faster but .*; flash4 may be faster but .*pip install flash-attn-4"),
        (10, ("flash3", "flash4"), "flash4", "the fastest here"),
        (10, (), "varlen", "flash4 may be faster but .*pip install flash-attn-4"),
        (12, ("flash4",), "varlen", "the fastest here"),
    ],
)
def test_auto_takes_the_fastest_that_is_installed_and_says_what_would_be_faster(
    request, monkeypatch, capability, installed, choice, reason
):
    pretend_gpu(monkeypatch, capability)
    for name in installed:
        request.getfixturevalue({"flash3": "flash3_installed", "flash4": "cute_on_cpu"}[name])
    backend, why = choose_attention("auto", CUDA, torch.bfloat16)
    assert backend.name == choice
    assert re.fullmatch(f"{reason}.*", why)


def test_auto_on_a_cpu_takes_the_portable_form_and_says_what_is_lost():
    backend, reason = choose_attention("auto", CPU, torch.float32)
    assert (backend.name, reason) == ("portable", "varlen may be faster but it needs an NVIDIA GPU with CUDA")


@pytest.mark.usefixtures("flash3_installed")
def test_each_name_makes_the_backend_of_that_name():
    assert ATTENTIONS == ("auto", "flash4", "flash3", "varlen", "flex", "portable")
    assert [BACKENDS[name]().name for name in ATTENTIONS[1:]] == list(ATTENTIONS[1:])


def test_only_the_portable_form_runs_on_a_cpu():
    assert [name for name in ATTENTIONS[1:] if why_not(name, CPU, torch.float32) is None] == ["portable"]


def test_nothing_optional_is_imported_with_the_module():
    code = "import sys, kernels.attention; print([name for name in sys.modules if name.startswith('flash_attn')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
