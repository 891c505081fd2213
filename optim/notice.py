"""Warns once of something that happened on the device, without waiting for the device."""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import RankGroup

HEARD = ("cpu", "cuda")  # devices whose copies to the host arrive without a wait


class Notice:
    """One warning on rank 0 as soon as a tensor that is given step by step is not zero.

    On a GPU it comes some steps late.
    """

    def __init__(self, like: Tensor):
        self._first, self._said = torch.zeros_like(like), False
        pinned = like.device.type == "cuda"  # to be copied into without a wait
        self._heard = torch.zeros(like.shape, dtype=like.dtype, pin_memory=pinned)

    def hear(self, values: Tensor, ranks: RankGroup, text: Callable[[Tensor], str]) -> None:
        """Warn with the text of the first values, ever given, that are not all zero."""
        if self._said or values.device.type not in HEARD:
            return
        first = self._first.to(values.device)
        self._first = torch.where(first.any(), first, values)
        self._heard.copy_(self._first, non_blocking=True)  # read whatever has arrived
        if not self._heard.any():
            return
        self._said = True
        alone = ranks.size == 1 and dist.is_available() and dist.is_initialized()
        if (dist.get_rank() if alone else ranks.rank) == 0:  # alone: DDP has equal ranks
            warnings.warn(text(self._heard), stacklevel=2)
