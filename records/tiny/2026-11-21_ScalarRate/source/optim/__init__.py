"""Optimizers for 1..N ranks that know tensors and process groups, and no model."""

from .adam import Adam
from .groups import Row, build_optimizers
from .guards import Guard, Skip, SpikeRule
from .muon import Muon, NorMuon

__all__ = ["Adam", "Guard", "Muon", "NorMuon", "Row", "Skip", "SpikeRule", "build_optimizers"]
