"""Optimizers for one or many ranks. They know tensors and process groups, but no model."""

from .adam import Adam
from .groups import Row, build_optimizers
from .guards import Guard, Skip
from .muon import Muon, NorMuon
from .spikes import SpikeRule
from .state import load_named_state, named_state, reset

__all__ = [
    "Adam", "Guard", "Muon", "NorMuon", "Row", "Skip", "SpikeRule", "build_optimizers",
    "load_named_state", "named_state", "reset",
]  # fmt: skip
