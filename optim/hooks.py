"""The two places where Muon and NorMuon let a technique change their step.

A hook is part of the method: pure, on float32 stacks (k, rows, cols). So a guard, several ranks,
checkpoints and torch.compile treat what it keeps as they treat the momentum.
"""

from typing import Any

from torch import Tensor


class Hook:
    """What a hook keeps: nothing, unless it says so."""

    def state(self) -> tuple[str, ...]:
        """Names of state tensors, each as large as the parameter. They begin as zeros."""
        return ()


class MomentumHook(Hook):
    """For `momentum_hook=`. This one changes nothing."""

    def mix(self, gradients: Tensor, momentum: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """The momentum to use before orthogonalization, then the new state."""
        return momentum, *state


class UpdateHook(Hook):
    """For `update_hook=`. This one changes nothing."""

    def move(self, weights: Tensor, moved: Tensor, lr: Any, *state: Tensor) -> tuple[Tensor, ...]:
        """The new weights, then the new state. moved: where step and decay led from `weights`.

        lr: learning rate times lr_mul, without the factor of the shape.
        """
        return moved, *state
