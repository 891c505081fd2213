"""Rotary position embedding, half-truncated: half of the frequencies are 0 (modded-nanogpt); YaRN as windows grow."""

import math

import torch
from torch import Tensor, nn

SLOWEST = 1 / 1024  # radians a token
FEW, MANY = 1, 32  # rotations within a window: a frequency with fewer is scaled with it, one with more is kept


class Rotary(nn.Module):
    """Turns queries and keys (B, T, H, D) by their position; `scale` is the factor on queries.

    positions: the largest T. block: tokens in a block, the unit of windows; 0 where there are none.
    """

    cos: Tensor  # (positions, 1, D / 2)
    sin: Tensor
    scale: Tensor
    frequency: Tensor  # (D / 2,) radians a token

    def __init__(
        self, positions: int, head_dim: int, scale: float, block: int, dtype: torch.dtype, device: torch.device
    ):
        super().__init__()
        self.block, self.pairs, self.base_scale = block, head_dim // 2, scale
        for name in ("cos", "sin"):
            table = torch.empty(positions, 1, self.pairs, dtype=dtype, device=device)
            self.register_buffer(name, table, persistent=False)
        self.register_buffer("scale", torch.empty((), device=device), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Back to the constructed state."""
        turning = (SLOWEST ** torch.linspace(0, 1, self.pairs // 2)).to(self.cos.device)  # the same bits on any device
        self.frequency = torch.cat([turning, turning.new_zeros(self.pairs - self.pairs // 2)])
        self.scale.fill_(self.base_scale)
        self.fill()

    def extend(self, old: int, new: int) -> None:
        """Adapt to a long window that grows from `old` to `new` blocks (YaRN, Peng et al., arXiv:2309.00071)."""
        if old == new or not self.block:
            return
        rotations = self.block * old * self.frequency / (2 * math.pi)
        kept = ((rotations - FEW) / (MANY - FEW)).clamp(0, 1)  # share of its frequency that a dimension keeps
        ratio = old / new
        self.frequency = self.frequency * (ratio + kept * (1 - ratio))
        self.scale.mul_(1 + 0.2 * math.log(new / old))
        self.fill()

    def fill(self) -> None:
        """The tables that follow from the frequencies."""
        angle = torch.outer(torch.arange(self.cos.size(0), device=self.cos.device), self.frequency).unsqueeze(1)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, x_BTHD: Tensor) -> Tensor:
        cos, sin = self.cos[: x_BTHD.size(1)], self.sin[: x_BTHD.size(1)]
        a, b = x_BTHD.chunk(2, dim=-1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)
