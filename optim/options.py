"""Which settings an optimizer takes: its own in their ranges, others' that do not change a step."""

from collections.abc import Mapping
from typing import Any

ANY = None
Same = Mapping[str, tuple[Any, ...] | None]  # values of an option that mean our step, or ANY

# What to do about a value that means another step.
FIXES = {
    "maximize": "negate the loss",
    "amsgrad": "torch.optim.AdamW does",
    "differentiable": "torch.optim.AdamW does",
    "decoupled_weight_decay": "torch.optim.Adam does; or take weight_decay=0",
    "use_muon": "give Muon's groups to Muon and the others to AdamW",
    "nesterov": "build it with that nesterov",
    "adjust_lr_fn": "scale='spectral' is None or 'original', scale='rms' is 'match_rms_adamw'",
    "ns_steps": "a method has its own steps: newton_schulz five, newton_schulz_12 twelve",
    "ns_coefficients": "a method has its own; those of torch are of method='newton_schulz'",
    "dampening": "torch.optim.SGD does; the momentum here is an average",
}


def require_same(given: Mapping[str, Any], same: Same, what: str, where: str) -> None:
    """ValueError if an option means another step: "{what} does not do option=value {where}"."""
    for option, value in given.items():
        values = same.get(option, ANY)
        if isinstance(value, list):
            value = tuple(value)
        if values is not ANY and value not in values:
            raise ValueError(f"{what} does not do {option}={value!r} {where}; {FIXES[option]}")


def require_ranges(
    group: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]], where: str
) -> None:
    """ValueError unless each setting, or each number of it, is in its range [least, bound)."""
    for setting, (least, bound) in ranges.items():
        given = group[setting]
        values = given if isinstance(given, (tuple, list)) else [given]
        if not all(least <= value < bound for value in values):
            raise ValueError(f"{setting} must be in [{least}, {bound}), got {given!r} {where}")
