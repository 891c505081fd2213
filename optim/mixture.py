"""A mixture of two running means as momentum ("bi-Maxwell": track 3, pull request 340)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .hooks import MomentumHook


@dataclass(frozen=True)
class Mixture(MomentumHook):
    """A second, slower mean of the gradients has this share of the momentum.

    beta: its weight of the past; that of the first mean is the optimizer's momentum. It begins as
    zeros, which fades it in; the public run switches it on after a third of its steps.
    """

    beta: float = 0.99
    share: float = 0.5615

    def __post_init__(self) -> None:
        for name, value in (("beta", self.beta), ("share", self.share)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value!r}")

    def state(self) -> tuple[str, ...]:
        """The slow mean."""
        return ("slow",)

    def mix(self, gradients: Tensor, momentum: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """The mixed momentum, and the new slow mean."""
        slow = torch.lerp(state[0], gradients, 1 - self.beta)
        return torch.lerp(momentum, slow, self.share), slow
