"""RowFloor: no row changes by less than a share of its norm (track 3, results 9 and 46)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .hooks import UpdateHook


@dataclass(frozen=True)
class RowFloor(UpdateHook):
    """The change of each stored row, decay included, is at least lr x share x the row's norm.

    The public run also scales each matrix back to the norm that it would have had.
    """

    share: float = 0.3825

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be in [0, 1], got {self.share!r}; 0 is no floor")

    def move(self, weights: Tensor, moved: Tensor, lr: Any, *state: Tensor) -> tuple[Tensor, ...]:
        """The new weights: rows that changed too little go further the same way."""
        change = moved - weights
        least = lr * self.share * torch.linalg.vector_norm(weights, dim=-1, keepdim=True)
        length = torch.linalg.vector_norm(change, dim=-1, keepdim=True)
        raised = weights + change * (least / length.clamp_min(1e-12))
        return (torch.where(length < least, raised, moved),)
