"""Compiled FlexAttention: any GPU that Triton compiles for, in any dtype; blocks without a visible pair are left out.

B rows, T tokens a row, H heads, D head dim, N blocks of BLOCK consecutive tokens.
"""

import importlib.util

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kernels.portable_attention import document_starts

BLOCK = 128


def block_mask(starts_BT: Tensor, window: Tensor) -> BlockMask:
    """Which blocks of keys each block of queries sees in full and which in part, by arithmetic."""
    T, device = starts_BT.size(1), starts_BT.device
    # The first key that a query sees, which grows along a row; int32 and the same for all heads.
    first_B1T = torch.maximum(starts_BT, torch.arange(T, device=device) - window).unsqueeze(1).int()
    block = torch.arange(-(-T // BLOCK), device=device, dtype=torch.int32)
    last = (block * BLOCK + BLOCK - 1).clamp(max=T - 1)
    # Block i of queries sees keys of blocks `low` to i; in full those from `full` on, but not i itself.
    low = first_B1T[..., ::BLOCK] // BLOCK
    full = torch.minimum((first_B1T[..., last] + BLOCK - 1) // BLOCK, block)
    in_part = torch.where(block < (full - low).unsqueeze(-1), low.unsqueeze(-1) + block, block.unsqueeze(-1))
    in_full = (full.unsqueeze(-1) + block).clamp(max=len(block) - 1)

    first_BT = first_B1T.squeeze(1)

    def visible(row, head, query, key):
        return (key <= query) & (key >= first_BT[row, query])

    return BlockMask.from_kv_blocks(full - low + 1, in_part, block - full, in_full, BLOCK, visible, (T, T))


def why_not_flex(device: torch.device) -> str | None:
    """What keeps it from running here, or None."""
    if device.type != "cuda":
        return "it has a backward pass only on CUDA devices"
    if importlib.util.find_spec("triton") is None:
        return "No module named 'triton'; pip install triton (triton-windows on Windows)"
    return None


class FlexAttention:
    """Of the masks that its layers ask for, the compiler makes one for each window of a training step."""

    name = "flex"
    window = staticmethod(torch.tensor)
    documents = staticmethod(document_starts)

    def __init__(self) -> None:
        self.kernel = torch.compile(flex_attention, dynamic=False)

    def __call__(
        self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, documents: Tensor, window: Tensor, longest: int
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
        return self.kernel(q, k, v, block_mask=block_mask(documents, window), scale=1.0).transpose(1, 2)
