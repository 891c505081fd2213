"""Causal attention of plain tensor operations: blocks of queries against the span of keys they can see.

Cost grows with the window, not with the sequence. B rows, T tokens a row, H heads, D head dim, N blocks of `block`
consecutive queries; `back` is how many blocks before its own a block sees.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Small blocks waste fewer masked scores, large ones make better matrix products; measured at windows of 48 to 352.
SMALL_BLOCK, LARGE_BLOCK = 64, 128
# Scores that one slice of blocks may hold: its few temporaries then stay in a core's cache instead of streaming through
# memory, and the memory needed does not grow with the sequence.
SLICE_SCORES = 1 << 21
# Probabilities that a call may keep for its backward pass, which makes the others again: those of a long window would
# cost T * span numbers a head and layer.
KEPT_SCORES = 1 << 24


def document_starts(cu_seqlens: Tensor, rows: int, sequence: int) -> Tensor:
    """Where in its row each token's document starts, int64 (rows, sequence), from the boundaries in the flat stream."""
    position = torch.arange(rows * sequence, device=cu_seqlens.device)
    document = torch.bucketize(position, cu_seqlens[1:].to(torch.int64), right=True)
    return (cu_seqlens.to(torch.int64)[document] % sequence).view(rows, sequence)


def _blocks(x_BTHD: Tensor, block: int, back: int = 0) -> Tensor:
    """(B, T, H, D) -> (B, H, back + N, block, D): zeros fill the last block and `back` blocks before the first."""
    B, T, H, D = x_BTHD.shape
    before, after = back * block, -T % block
    padded = F.pad(x_BTHD, (0, 0, 0, 0, before, after)) if before or after else x_BTHD
    return padded.view(B, -1, block, H, D).permute(0, 3, 1, 2, 4)


def _rows(x_BHNbD: Tensor, length: int) -> Tensor:
    """The inverse of `_blocks`: (B, H, N, block, D) -> (B, T, H, D)."""
    B, H, N, block, D = x_BHNbD.shape
    return x_BHNbD.permute(0, 2, 3, 1, 4).reshape(B, N * block, H, D)[:, :length].contiguous()


def _spans(padded_BHNbD: Tensor, first: int, count: int, back: int) -> Tensor:
    """Blocks [first, first + count), each with the `back` before it: (B, H, count, (back + 1) * block, D)."""
    return torch.cat([padded_BHNbD[:, :, first + i : first + i + count] for i in range(back + 1)], dim=3)


def _add_spans(total_BHNbD: Tensor, grad_BHnsD: Tensor, first: int, back: int) -> None:
    """The adjoint of `_spans`: add what each span says of its blocks to the padded `total`, in place."""
    count, block = grad_BHnsD.size(2), total_BHNbD.size(3)
    for i in range(back + 1):
        total_BHNbD[:, :, first + i : first + i + count] += grad_BHnsD[..., i * block : (i + 1) * block, :]


def _hidden(starts_BT: Tensor, first: int, count: int, block: int, back: int, window: int) -> Tensor:
    """True where a key may not be seen, for blocks [first, first + count): bool (B, 1, count, block, span)."""
    B, T = starts_BT.shape
    starts = F.pad(starts_BT, (0, -T % block))[:, first * block : (first + count) * block].view(B, count, block, 1)
    origin = torch.arange(first, first + count, device=starts.device).mul_(block).view(count, 1, 1)
    query = origin + torch.arange(block, device=starts.device).view(1, block, 1)
    key = origin + torch.arange(-back * block, block, device=starts.device).view(1, 1, -1)
    return ((key > query) | (key < torch.maximum(starts, query - window))).unsqueeze(1)


def _probabilities(q: Tensor, k: Tensor, hidden: Tensor, out: Tensor | None = None) -> Tensor:
    scores = torch.matmul(q, k.mT)
    return torch.softmax(scores.masked_fill_(hidden, float("-inf")), dim=-1, out=out)


def _room(q_BTHD: Tensor, longest: int, keep: bool) -> int:
    """How many probabilities are kept: enough for any window, as one graph serves all, or none if that is too many."""
    B, T, H, _ = q_BTHD.shape
    queries, keys = (-(-tokens // LARGE_BLOCK) * LARGE_BLOCK for tokens in (T, min(longest, T)))
    room = B * H * queries * (keys + LARGE_BLOCK)
    return room if keep and room <= KEPT_SCORES else 0


def _kept(kept: Tensor, q_BHNbD: Tensor, first: int, count: int, back: int) -> Tensor | None:
    """Where the probabilities of blocks [first, first + count) lie, (B, H, count, block, span), if any are kept."""
    B, H, _, block, _ = q_BHNbD.shape
    size = B * H * block * (back + 1) * block
    return kept[first * size : (first + count) * size].view(B, H, count, block, -1) if kept.numel() else None


def _slices(q_BHNbD: Tensor, back: int) -> list[tuple[int, int]]:
    """(first, count) of runs of blocks whose scores are few enough to be held at once."""
    B, H, N, block, _ = q_BHNbD.shape
    step = max(1, SLICE_SCORES // (B * H * block * (back + 1) * block))
    return [(first, min(step, N - first)) for first in range(0, N, step)]


def _geometry(window: Tensor, longest: int) -> tuple[int, int, int]:
    """Tokens of the window, tokens in a block, and blocks before its own that a block sees."""
    tokens = min(int(window), longest)
    block = SMALL_BLOCK if tokens <= LARGE_BLOCK else LARGE_BLOCK
    return tokens, block, -(-tokens // block)


@torch.library.custom_op("speedrun::windowed_attention", mutates_args=())
def _windowed_attention(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, starts_BT: Tensor, window: Tensor, longest: int, keep: bool
) -> tuple[Tensor, Tensor]:
    T = q_BTHD.size(1)
    tokens, block, back = _geometry(window, min(longest, T))
    q, k, v = _blocks(q_BTHD, block), _blocks(k_BTHD, block, back), _blocks(v_BTHD, block, back)
    parts, kept = [], q.new_empty(_room(q_BTHD, longest, keep))
    for first, count in _slices(q, back):
        hidden, out = _hidden(starts_BT, first, count, block, back, tokens), _kept(kept, q, first, count, back)
        p = _probabilities(q[:, :, first : first + count], _spans(k, first, count, back), hidden, out)
        parts.append(torch.matmul(p, _spans(v, first, count, back)))
    return _rows(torch.cat(parts, dim=2), T), kept


@torch.library.custom_op("speedrun::windowed_attention_backward", mutates_args=())
def _windowed_attention_backward(
    grad_BTHD: Tensor, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, starts_BT: Tensor, window: Tensor,
    kept: Tensor, longest: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    T = q_BTHD.size(1)
    tokens, block, back = _geometry(window, min(longest, T))
    grads, q = _blocks(grad_BTHD, block), _blocks(q_BTHD, block)
    k, v = _blocks(k_BTHD, block, back), _blocks(v_BTHD, block, back)
    dq, dk, dv = [], k.new_zeros(k.shape), v.new_zeros(v.shape)
    for first, count in _slices(q, back):
        here = slice(first, first + count)
        k_spans, v_spans = _spans(k, first, count, back), _spans(v, first, count, back)
        p = _kept(kept, q, first, count, back)
        if p is None:
            p = _probabilities(q[:, :, here], k_spans, _hidden(starts_BT, first, count, block, back, tokens))
        dp = torch.matmul(grads[:, :, here], v_spans.mT)
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
        dq.append(torch.matmul(ds, k_spans))
        _add_spans(dk, torch.matmul(ds.mT, q[:, :, here]), first, back)
        _add_spans(dv, torch.matmul(p.mT, grads[:, :, here]), first, back)
    return _rows(torch.cat(dq, dim=2), T), _rows(dk[:, :, back:], T), _rows(dv[:, :, back:], T)


@_windowed_attention.register_fake
def _(q, k, v, starts, window, longest, keep):
    return q.new_empty(q.shape), q.new_empty(_room(q, longest, keep))


@_windowed_attention_backward.register_fake
def _(grad, q, k, v, starts, window, kept, longest):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output):
    *tensors, ctx.longest, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx, grad, _):
    return *_windowed_attention_backward(grad, *ctx.saved_tensors, ctx.longest), None, None, None, None


_windowed_attention.register_autograd(_differentiate, setup_context=_save)


class PortableAttention:
    """Plain tensor operations on any device and dtype."""

    name = "portable"
    window = staticmethod(torch.tensor)
    documents = staticmethod(document_starts)

    def __call__(
        self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, documents: Tensor, window: Tensor, longest: int
    ) -> Tensor:
        keep = torch.is_grad_enabled()
        return _windowed_attention(q_BTHD, k_BTHD, v_BTHD, documents, window, longest, keep)[0]
