"""Optimizers for 1..N ranks that know tensors and process groups, and no model."""

from .adam import Adam
from .groups import Row, build_optimizers
from .muon import Muon, NorMuon

__all__ = ["Adam", "Muon", "NorMuon", "Row", "build_optimizers"]
