"""Causal windowed attention in plain tensor operations: any device, any float dtype.

Each block of queries is multiplied with the keys that its windows reach, so the cost grows with
T * window, not with T^2. B rows, T tokens a row, H heads, D head dim. A piece is a block of b
queries in some rows, with the s keys that they reach; m counts its heads in all its rows.
"""

import math

import torch
from torch import Tensor

# Small blocks mask fewer scores, large ones multiply faster: measured at windows of 48 to 352.
SMALL_BLOCK, LARGE_BLOCK = 64, 128
GRAIN = 16  # a piece's first key is a multiple of it: other lengths multiply slower
# Scores of one piece, so that its few temporaries fit a core's cache.
PIECE_SCORES = 1 << 21
# A call keeps at most this many probabilities for its backward pass, which else recomputes them: a
# long window would keep T * window numbers for each head and layer.
KEPT_SCORES = 1 << 24


def document_starts(cu_seqlens: Tensor, rows: int, sequence: int) -> Tensor:
    """For each token, where in its row its document starts: (rows, sequence) int32."""
    boundaries = cu_seqlens.to(torch.int64)
    position = torch.arange(rows * sequence, device=cu_seqlens.device)
    document = torch.bucketize(position, boundaries[1:], right=True)
    return (boundaries[document] % sequence).int().view(rows, sequence)


# What is multiplied at once: rows, queries, keys; and where its probabilities are kept.
Piece = tuple[slice, slice, slice, slice]


def _pieces(q_BTHD: Tensor, starts_BT: Tensor, window: int) -> list[Piece]:
    """All pieces of a call, in the order of their rows and queries."""
    B, T, H, _ = q_BTHD.shape
    block = SMALL_BLOCK if window <= LARGE_BLOCK else LARGE_BLOCK
    rows = min(B, max(1, PIECE_SCORES // (H * block * (window + block))))
    grains, pieces, end = math.ceil(window / GRAIN), [], 0
    for row in range(0, B, rows):
        begun = [0] * T  # where the documents of a block begin; a GPU would have to be waited for
        if starts_BT.device.type == "cpu":
            begun = starts_BT[row : row + rows].amin(0).tolist()
        for first in range(0, T, block):
            last = min(first + block, T)
            reach = max(first - grains * GRAIN, begun[first] // GRAIN * GRAIN)
            begin, end = end, end + H * min(rows, B - row) * (last - first) * (last - reach)
            spans = slice(row, row + rows), slice(first, last), slice(reach, last)
            pieces.append((*spans, slice(begin, end)))
    return pieces


def _room(q_BTHD: Tensor, longest: int) -> int:
    """Size of the kept probabilities; enough for any window, as one graph serves all. 0: none."""
    B, T, H, _ = q_BTHD.shape
    room = B * H * T * min(T, math.ceil(longest / GRAIN) * GRAIN + LARGE_BLOCK)
    return room if room <= KEPT_SCORES else 0


def _cut(x_BTHD: Tensor, rows: slice, tokens: slice) -> Tensor:
    """(m, tokens, D), contiguous: a transposed view of anything else multiplies far slower."""
    return x_BTHD[rows, tokens].transpose(1, 2).flatten(0, 1).contiguous()


def _like(x_mtD: Tensor, part_BTHD: Tensor) -> Tensor:
    """The inverse of `_cut`: a view in the shape of the part that was cut."""
    B, t, H, D = part_BTHD.shape
    return x_mtD.view(B, H, t, D).transpose(1, 2)


def _probabilities(
    q_mbD: Tensor, k_msD: Tensor, starts_BT: Tensor, piece: Piece, window: int, kept: Tensor
) -> Tensor:
    """(m, b, s), in their place in `kept` if there is room."""
    rows, queries, keys, place = piece
    scores = torch.bmm(q_mbD, k_msD.mT)
    key = torch.arange(keys.start, keys.stop, dtype=torch.int32, device=scores.device)
    query = key[queries.start - keys.start :]  # the keys end where the queries end
    first = torch.maximum(starts_BT[rows, queries], query - window).unsqueeze(-1)
    # -1 where a key is hidden, else 0: a CPU makes and converts booleans three times as slowly.
    hidden_Bbs = torch.minimum(key - first, query.unsqueeze(-1) - key).clamp_(-1, 0)
    # Added, as a CPU fills under a mask far slower. Half: a score may be negative too.
    mask_Bbs = hidden_Bbs.to(scores.dtype).mul_(torch.finfo(scores.dtype).max / 2)
    scores.view(len(mask_Bbs), -1, *mask_Bbs.shape[1:]).add_(mask_Bbs.unsqueeze(1))
    out = kept[place].view_as(scores) if kept.numel() else None
    return torch.softmax(scores, dim=-1, out=out)


# An operator, so that one compiled graph takes any window and the loop is not unrolled into it.
@torch.library.custom_op("speedrun::windowed_attention", mutates_args=())
def _windowed_attention(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, starts_BT: Tensor, window: Tensor, longest: int,
    room: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens = min(int(window), longest)
    y_BTHD, kept = torch.empty_like(q_BTHD), q_BTHD.new_empty(room)
    for piece in _pieces(q_BTHD, starts_BT, tokens):
        rows, queries, keys, _ = piece
        q, k, v = _cut(q_BTHD, rows, queries), _cut(k_BTHD, rows, keys), _cut(v_BTHD, rows, keys)
        p = _probabilities(q, k, starts_BT, piece, tokens, kept)
        y = y_BTHD[rows, queries]
        y.copy_(_like(torch.bmm(p, v), y))
    return y_BTHD, kept


@torch.library.custom_op("speedrun::windowed_attention_backward", mutates_args=())
def _windowed_attention_backward(
    dout_BTHD: Tensor, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, starts_BT: Tensor,
    window: Tensor, kept: Tensor, longest: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens = min(int(window), longest)
    dq_BTHD = torch.empty_like(q_BTHD)
    dk_BTHD, dv_BTHD = torch.zeros_like(k_BTHD), torch.zeros_like(v_BTHD)
    for piece in reversed(_pieces(q_BTHD, starts_BT, tokens)):
        rows, queries, keys, place = piece
        q, k, v = _cut(q_BTHD, rows, queries), _cut(k_BTHD, rows, keys), _cut(v_BTHD, rows, keys)
        dout = _cut(dout_BTHD, rows, queries)
        if kept.numel():
            p = kept[place].view(len(q), q.size(1), k.size(1))
        else:
            p = _probabilities(q, k, starts_BT, piece, tokens, kept)
        dp = torch.bmm(dout, v.mT)
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
        dq, dk, dv = dq_BTHD[rows, queries], dk_BTHD[rows, keys], dv_BTHD[rows, keys]
        dq.copy_(_like(torch.bmm(ds, k), dq))
        dk.add_(_like(torch.bmm(ds.mT, q), dk))
        dv.add_(_like(torch.bmm(p.mT, dout), dv))
    return dq_BTHD, dk_BTHD, dv_BTHD


@_windowed_attention.register_fake
def _(q, k, v, starts, window, longest, room):
    return torch.empty_like(q), q.new_empty(room)


@_windowed_attention_backward.register_fake
def _(dout, q, k, v, starts, window, kept, longest):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output):
    *tensors, ctx.longest, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else zeros as large as the kept probabilities are filled
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx, dout, _):
    grads = _windowed_attention_backward(dout, *ctx.saved_tensors, ctx.longest)
    return *grads, None, None, None, None


_windowed_attention.register_autograd(_differentiate, setup_context=_save)


class PortableAttention:
    """The backend "portable": runs everywhere."""

    name = "portable"
    window = staticmethod(torch.tensor)

    def documents(
        self, cu_seqlens: Tensor, rows: int, sequence: int, longest: int
    ) -> tuple[Tensor, int]:
        return document_starts(cu_seqlens, rows, sequence), longest

    def __call__(
        self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, documents: tuple[Tensor, int],
        window: Tensor,
    ) -> Tensor:  # fmt: skip
        starts_BT, longest = documents
        room = _room(q_BTHD, longest) if torch.is_grad_enabled() else 0
        return _windowed_attention(q_BTHD, k_BTHD, v_BTHD, starts_BT, window, longest, room)[0]
