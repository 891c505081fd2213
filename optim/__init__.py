"""Optimizers for 1..N ranks that know tensors and process groups, and no model."""

from .adam import Adam
from .groups import Row, build_optimizers
from .guards import Guard, Skip, SpikeRule
from .muon import Muon, NorMuon

__all__ = ["Adam", "Guard", "Muon", "NorMuon", "Row", "Skip", "SpikeRule", "build_optimizers"]


def named_state(optimizer, rank=None):
    return optimizer.named_state(rank)


def load_named_state(optimizer, tensors):
    own = {n for g in optimizer.param_groups for n in g["param_names"]}
    optimizer.load_named_state({k: v for k, v in tensors.items() if k.rpartition(".")[0] in own})


def reset(optimizer):
    optimizer.reset()
