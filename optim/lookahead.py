"""EMA-Nesterov: gradients are taken ahead of the weights, along their mean change."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .hooks import UpdateHook


@dataclass(frozen=True)
class Lookahead(UpdateHook):
    """The parameters lie `share` x drift ahead of the weights that are trained (arXiv:2605.25395).

    drift: running mean of how those weights change in a step; beta: weight of the past. In track 3
    (result 39) a schedule takes the share to 0 before the end; here it is constant.
    """

    beta: float = 0.99
    share: float = 0.6

    def __post_init__(self) -> None:
        for name, value in (("beta", self.beta), ("share", self.share)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value!r}")

    def state(self) -> tuple[str, ...]:
        """The mean change."""
        return ("drift",)

    def move(self, weights: Tensor, moved: Tensor, lr: Any, *state: Tensor) -> tuple[Tensor, ...]:
        """The parameters ahead of where the step led, and the new drift."""
        (drift,) = state
        before = weights - self.share * drift
        drift = torch.lerp(drift, moved - before, 1 - self.beta)
        return moved + self.share * drift, drift
