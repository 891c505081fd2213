"""Causal windowed attention in plain tensor operations: any device, any float dtype.

Each block of queries is multiplied with the span of keys in its window, so the cost grows with
T * window, not with T^2. B rows, T tokens a row, H heads, D head dim, N blocks of b consecutive
queries, n of them in a slice, s keys in a span. A block sees itself and `back` blocks before it, so
s = (back + 1) * b.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Small blocks mask fewer scores, large ones multiply faster: measured at windows of 48 to 352.
SMALL_BLOCK, LARGE_BLOCK = 64, 128
# Scores in one slice of blocks, so that its few temporaries fit a core's cache.
SLICE_SCORES = 1 << 21
# A call keeps at most this many probabilities for its backward pass, which else recomputes them: a
# long window would keep T * span numbers for each head and layer.
KEPT_SCORES = 1 << 24


def document_starts(cu_seqlens: Tensor, rows: int, sequence: int) -> Tensor:
    """For each token, where in its row its document starts: (rows, sequence) int64."""
    boundaries = cu_seqlens.to(torch.int64)
    position = torch.arange(rows * sequence, device=cu_seqlens.device)
    document = torch.bucketize(position, boundaries[1:], right=True)
    return (boundaries[document] % sequence).view(rows, sequence)


def _blocks(x_BTHD: Tensor, block: int, back: int = 0) -> Tensor:
    """(B, T, H, D) -> (B, H, back + N, b, D); zeros before the first block and after the last."""
    B, T, H, D = x_BTHD.shape
    before, after = back * block, -T % block
    padded = F.pad(x_BTHD, (0, 0, 0, 0, before, after)) if before or after else x_BTHD
    return padded.view(B, -1, block, H, D).permute(0, 3, 1, 2, 4)


def _rows(x_BHNbD: Tensor, length: int) -> Tensor:
    """(B, H, N, b, D) -> (B, T, H, D), the inverse of `_blocks` without padding before."""
    B, H, N, block, D = x_BHNbD.shape
    return x_BHNbD.permute(0, 2, 3, 1, 4).reshape(B, N * block, H, D)[:, :length].contiguous()


def _spans(padded_BHNbD: Tensor, first: int, count: int, back: int) -> Tensor:
    """Keys or values that `count` blocks from `first` on see, (B, H, n, s, D)."""
    shifted = [padded_BHNbD[:, :, first + i : first + i + count] for i in range(back + 1)]
    return torch.cat(shifted, dim=3)


def _add_spans(total_BHNbD: Tensor, grad_BHnsD: Tensor, first: int, back: int) -> None:
    """Add gradients of spans to those of blocks, in place: the adjoint of `_spans`."""
    count, block = grad_BHnsD.size(2), total_BHNbD.size(3)
    for i in range(back + 1):
        part = grad_BHnsD[..., i * block : (i + 1) * block, :]
        total_BHNbD[:, :, first + i : first + i + count] += part


def _hidden(starts: Tensor, first: int, count: int, block: int, back: int, window: int) -> Tensor:
    """True where a query must not see a key, (B, 1, n, b, s) bool."""
    device = starts.device
    starts = F.pad(starts, (0, -starts.size(1) % block))
    starts = starts[:, first * block : (first + count) * block].view(-1, count, block, 1)
    origin = torch.arange(first, first + count, device=device).mul_(block).view(count, 1, 1)
    query = origin + torch.arange(block, device=device).view(1, block, 1)
    key = origin + torch.arange(-back * block, block, device=device).view(1, 1, -1)
    return ((key > query) | (key < torch.maximum(starts, query - window))).unsqueeze(1)


def _probabilities(q: Tensor, k: Tensor, hidden: Tensor, out: Tensor | None = None) -> Tensor:
    scores = torch.matmul(q, k.mT)
    return torch.softmax(scores.masked_fill_(hidden, float("-inf")), dim=-1, out=out)


def _room(q_BTHD: Tensor, longest: int) -> int:
    """Size of the kept probabilities; enough for any window, as one graph serves all. 0: none."""
    B, T, H, _ = q_BTHD.shape
    queries, keys = (-(-tokens // LARGE_BLOCK) * LARGE_BLOCK for tokens in (T, min(longest, T)))
    room = B * H * queries * (keys + LARGE_BLOCK)
    return room if room <= KEPT_SCORES else 0


def _slices(q_BHNbD: Tensor, back: int, kept: Tensor) -> Iterator[tuple[int, int, Tensor | None]]:
    """Yield slices of at most SLICE_SCORES scores: first block, count, kept (B, H, n, b, s)."""
    B, H, N, block, _ = q_BHNbD.shape
    scores = B * H * block * (back + 1) * block  # of one block
    step = max(1, SLICE_SCORES // scores)
    for first in range(0, N, step):
        count, place = min(step, N - first), None
        if kept.numel():
            place = kept[first * scores : (first + count) * scores].view(B, H, count, block, -1)
        yield first, count, place


def _geometry(window: Tensor, longest: int) -> tuple[int, int, int]:
    """Tokens of the window, tokens of a block, and blocks before its own that a block sees."""
    tokens = min(int(window), longest)
    block = SMALL_BLOCK if tokens <= LARGE_BLOCK else LARGE_BLOCK
    return tokens, block, -(-tokens // block)


# An operator, so that one compiled graph takes any window and the loop is not unrolled into it.
@torch.library.custom_op("speedrun::windowed_attention", mutates_args=())
def _windowed_attention(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, starts_BT: Tensor, window: Tensor, longest: int,
    room: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    T = q_BTHD.size(1)
    tokens, block, back = _geometry(window, min(longest, T))
    q, k, v = _blocks(q_BTHD, block), _blocks(k_BTHD, block, back), _blocks(v_BTHD, block, back)
    parts, kept = [], q.new_empty(room)
    for first, count, place in _slices(q, back, kept):
        hidden = _hidden(starts_BT, first, count, block, back, tokens)
        k_spans, v_spans = _spans(k, first, count, back), _spans(v, first, count, back)
        p = _probabilities(q[:, :, first : first + count], k_spans, hidden, place)
        parts.append(torch.matmul(p, v_spans))
    return _rows(torch.cat(parts, dim=2), T), kept


@torch.library.custom_op("speedrun::windowed_attention_backward", mutates_args=())
def _windowed_attention_backward(
    dout_BTHD: Tensor, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, starts_BT: Tensor,
    window: Tensor, kept: Tensor, longest: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    T = q_BTHD.size(1)
    tokens, block, back = _geometry(window, min(longest, T))
    q, dout = _blocks(q_BTHD, block), _blocks(dout_BTHD, block)
    k, v = _blocks(k_BTHD, block, back), _blocks(v_BTHD, block, back)
    dq, dk, dv = [], k.new_zeros(k.shape), v.new_zeros(v.shape)
    for first, count, p in _slices(q, back, kept):
        q_part, dout_part = (x[:, :, first : first + count] for x in (q, dout))
        k_spans, v_spans = _spans(k, first, count, back), _spans(v, first, count, back)
        if p is None:
            hidden = _hidden(starts_BT, first, count, block, back, tokens)
            p = _probabilities(q_part, k_spans, hidden)
        dp = torch.matmul(dout_part, v_spans.mT)
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
        dq.append(torch.matmul(ds, k_spans))
        _add_spans(dk, torch.matmul(ds.mT, q_part), first, back)
        _add_spans(dv, torch.matmul(p.mT, dout_part), first, back)
    return _rows(torch.cat(dq, dim=2), T), _rows(dk[:, :, back:], T), _rows(dv[:, :, back:], T)


@_windowed_attention.register_fake
def _(q, k, v, starts, window, longest, room):
    return q.new_empty(q.shape), q.new_empty(room)


@_windowed_attention_backward.register_fake
def _(dout, q, k, v, starts, window, kept, longest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    *tensors, ctx.longest, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx, dout, _):
    grads = _windowed_attention_backward(dout, *ctx.saved_tensors, ctx.longest)
    return *grads, None, None, None, None


_windowed_attention.register_autograd(_differentiate, setup_context=_save)


class PortableAttention:
    """The backend "portable": runs everywhere."""

    name = "portable"
    window = staticmethod(torch.tensor)
    documents = staticmethod(document_starts)

    def __call__(
        self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, documents: Tensor, window: Tensor,
        longest: int,
    ) -> Tensor:  # fmt: skip
        room = _room(q_BTHD, longest) if torch.is_grad_enabled() else 0
        return _windowed_attention(q_BTHD, k_BTHD, v_BTHD, documents, window, longest, room)[0]
