"""Copies of everything a run may change, and their comparison bit for bit."""

from typing import Any

import torch
from torch import Tensor


def copy_to_host(value: Any) -> Any:
    """Tensors, in dicts and lists to any depth, as copies on the CPU; other values as they are."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: copy_to_host(item) for key, item in value.items()}
    return [copy_to_host(item) for item in value] if isinstance(value, list | tuple) else value


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results of `copy_to_host` are equal in structure, dtypes, shapes and every bit."""
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
