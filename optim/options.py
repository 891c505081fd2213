"""What an optimizer takes: its settings in their ranges, others' that do not change a step, and
parameters.
"""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .buckets import READ_AT_ONCE

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
    """ValueError unless each setting is a number in its range [least, bound); betas are a pair."""
    for setting, (least, bound) in ranges.items():
        given, pair = group.get(setting), setting == "betas"
        values = given if pair and isinstance(given, (tuple, list)) else [given]
        if len(values) != 1 + pair or not all(is_within(value, least, bound) for value in values):
            what = f"{setting} must be in [{least}, {bound}), got {given!r} {where}"
            raise ValueError(f"{what}; give {'two numbers' if pair else 'a number'}")


def is_within(value: Any, least: float, bound: float) -> bool:
    """Whether this is a number in [least, bound). A tensor off the CPU is not read: it may wait."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.device.type not in READ_AT_ONCE:
            return value.numel() == 1
        value = value.item()
    return isinstance(value, Real) and least <= float(value) < bound


def require_steppable(name: str, param: Tensor) -> None:
    """ValueError unless a parameter holds real numbers in its own shape, one after another."""
    if not param.is_floating_point():
        raise ValueError(f"parameter {name} is {param.dtype}; only real numbers are stepped")
    if getattr(param, "_fsdp_flattened", False):
        fix = "use torch.distributed.fsdp.fully_shard, which keeps its shape"
        raise ValueError(f"parameter {name} was flattened by FullyShardedDataParallel; {fix}")
    if not param.is_contiguous():
        fix = "undo channels_last, or build it from .contiguous()"
        raise ValueError(f"parameter {name} is not contiguous; {fix}")


def require_no_capture(what: str, device: torch.device) -> None:
    """RuntimeError while a CUDA graph is captured: a replay would repeat its rates and its state.

    A step reads rates of the host and puts new state tensors in the place of the old.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        fix = "capture the model alone and call step outside the graph"
        raise RuntimeError(f"a step of {what} cannot be captured in a CUDA graph; {fix}")
