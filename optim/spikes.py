"""Which losses and gradient norms are spikes: a rule, and the windows that it judges by."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SpikeRule:
    """A value is a spike above centre + sigma * spread of its window, or where it is not finite.

    Centre and spread are the median and 1.4826 MAD of the latest accepted values; norms are judged
    by their logarithms. Mean and deviation would not do: one spike hides the next. The spread is at
    least `least_spread` of the centre, of norms `least_log_spread`.
    Nothing is judged before `start` values are in a window. After `patience` spikes of a value in a
    row its window starts anew. A norm's row consists of its own optimizer's steps.
    """

    window: int = 128
    sigma: float = 6.0
    start: int = 32
    least_spread: float = 0.01
    least_log_spread: float = 0.05
    patience: int = 10

    def __post_init__(self) -> None:
        rules = {
            "window": (self.window >= 4, "at least 4"),
            "sigma": (self.sigma > 0, "positive"),
            "start": (3 <= self.start <= self.window, f"between 3 and window ({self.window})"),
            "least_spread": (self.least_spread >= 0, "0 or more, a share of the centre"),
            "least_log_spread": (self.least_log_spread >= 0, "0 or more"),
            "patience": (self.patience >= 1, "at least 1"),
        }
        for name, (kept, rule) in rules.items():
            if not kept:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")


class Spikes:
    """The windows of a loss (value 0) and of norms (the other values), all on the device."""

    def __init__(self, rule: SpikeRule, values: int, device: torch.device):
        self.rule = rule
        self.window = torch.full((values, rule.window), torch.nan, device=device)  # NaN: empty
        self.entered = torch.zeros(values, dtype=torch.int64, device=device)
        self.in_a_row = torch.zeros(values, dtype=torch.int64, device=device)

    def judge(self, values: Tensor, present: Tensor, fault: Tensor) -> Tensor:
        """Which of the `present` values are spikes (values,); the values then enter the windows.

        fault: the step is skipped in any case.
        """
        # Norms are skewed, their logarithms nearly not.
        values = torch.cat([values[:1], values[1:].clamp_min(0).log()])
        finite = values.isfinite()
        unsound = values.isnan() | (values == torch.inf)
        over = present & ~(values <= self.limits())
        restart = over & finite & (self.in_a_row >= self.rule.patience)
        spikes = (present & unsound) | (over & ~restart)
        ended = torch.where(present, 0, self.in_a_row)
        self.in_a_row.copy_(torch.where(spikes, self.in_a_row + 1, ended))
        # Spikes would widen their window, so it takes no values of skipped steps.
        self.enter(values, present & finite & ~(spikes.any() | fault), restart)
        return spikes

    def limits(self) -> Tensor:
        """The largest values (values,) that are no spikes; infinite while nothing is judged."""
        filled = ~self.window.isnan()
        count = filled.sum(dim=1, keepdim=True)
        centre = lower_median(self.window, filled, count)
        mad = lower_median((self.window - centre).abs(), filled, count)
        least = torch.full_like(centre, self.rule.least_log_spread)
        least[:1] = self.rule.least_spread * centre[:1].abs()
        limits = centre + self.rule.sigma * torch.maximum(1.4826 * mad, least)
        return torch.where(count >= self.rule.start, limits, torch.inf).squeeze(1)

    def enter(self, values: Tensor, wanted: Tensor, restart: Tensor) -> None:
        """Add the wanted values, after emptying the windows that restart."""
        self.window.masked_fill_(restart.unsqueeze(1), torch.nan)
        place = torch.arange(self.rule.window, device=values.device)
        here = (place == (self.entered % self.rule.window).unsqueeze(1)) & wanted.unsqueeze(1)
        torch.where(here, values.unsqueeze(1), self.window, out=self.window)
        self.entered += wanted


def lower_median(values: Tensor, filled: Tensor, count: Tensor) -> Tensor:
    """Medians (rows, 1) of the filled places of (rows, columns), the lower one of two."""
    ordered = torch.where(filled, values, torch.inf).sort(dim=1).values
    return ordered.gather(1, (count - 1).clamp_min(0) // 2)
