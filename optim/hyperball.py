"""Hyperball: matrices of a fixed norm, steps of a fixed length (arXiv:2606.16899)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .hooks import UpdateHook


@dataclass(frozen=True)
class Hyperball(UpdateHook):
    """Each matrix keeps its Frobenius norm R and steps by lr x R. It replaces weight decay.

    A matrix whose entries have a root mean square below `rms`, say because it begins as zeros, may
    grow up to there; its R is what `rms` gives. With rms=0 a matrix of zeros never moves.
    """

    rms: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.rms < math.inf:
            raise ValueError(f"rms must be in [0, inf), got {self.rms!r}; 0 keeps every norm")

    def move(self, weights: Tensor, moved: Tensor, lr: Any, *state: Tensor) -> tuple[Tensor, ...]:
        """The weights after a step of length lr x R, brought back to norm R."""
        norm, full = norms(weights), self.rms * math.prod(weights.shape[-2:]) ** 0.5
        radius = norm.clamp_min(full)
        step = moved - weights
        target = weights + step * (lr * radius / norms(step).clamp_min(1e-12))
        length = norms(target)
        return (target * (torch.clamp(length, norm, radius) / length.clamp_min(1e-12)),)


def norms(stack: Tensor) -> Tensor:
    """Frobenius norm of each matrix, (k, 1, 1)."""
    return torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True)
