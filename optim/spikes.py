"""Which losses and gradient norms are spikes: a rule, and the windows it judges by."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SpikeRule:
    """A value is a spike if it is above centre + sigma * spread of its window, or not finite.

    Centre and spread are the median and 1.4826 MAD of the latest accepted values. Norms are judged
    by their logarithms. Mean and deviation would not do: one spike hides the next. The spread is at
    least `least_spread` times the centre, or `least_log_spread` for norms.
    A window with fewer than `start` values judges nothing. After `patience` spikes in a row it
    starts anew; for a norm, only the steps of its own optimizer count.
    """

    window: int = 128
    sigma: float = 6.0
    start: int = 32
    least_spread: float = 0.01
    least_log_spread: float = 0.05
    patience: int = 10

    def __post_init__(self) -> None:
        if not (self.sigma > 0 and 3 <= self.start <= self.window and self.patience >= 1):
            rule = "sigma > 0, 3 <= start <= window and patience >= 1"
            raise ValueError(f"a spike rule needs {rule}, got {self}")


class Spikes:
    """The windows of a loss (value 0) and of norms (the other values), all on the device."""

    def __init__(self, rule: SpikeRule, values: int, device: torch.device):
        self.rule = rule
        self.window = torch.full((values, rule.window), torch.nan, device=device)  # NaN: empty
        self.entered = torch.zeros(values, dtype=torch.int64, device=device)
        self.in_a_row = torch.zeros(values, dtype=torch.int64, device=device)

    def judge(self, values: Tensor, present: Tensor, fault: Tensor) -> Tensor:
        """Which of the `present` values are spikes (values,). Sound values then enter the windows.

        fault: whether the step is skipped anyway.
        """
        # Norms have a long upper tail; their logarithms hardly have one.
        values = torch.cat([values[:1], values[1:].clamp_min(0).log()])
        finite = values.isfinite()
        unsound = values.isnan() | (values == torch.inf)
        over = present & ~(values <= self.limits())
        restart = over & finite & (self.in_a_row >= self.rule.patience)
        spikes = (present & unsound) | (over & ~restart)
        ended = torch.where(present, 0, self.in_a_row)
        self.in_a_row.copy_(torch.where(spikes, self.in_a_row + 1, ended))
        # Spikes would widen the window, so values of skipped steps do not enter it.
        self.enter(values, present & finite & ~(spikes.any() | fault), restart)
        return spikes

    def limits(self) -> Tensor:
        """The largest values (values,) that are not spikes; infinite while nothing is judged."""
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
    """Median of the filled places of each row, (rows, 1): of two middle values the lower."""
    ordered = torch.where(filled, values, torch.inf).sort(dim=1).values
    return ordered.gather(1, (count - 1).clamp_min(0) // 2)
