"""Optimizers for one or many ranks. They know tensors and process groups, but no model."""

from .adam import AdamW
from .buckets import widest
from .groups import Row, build_optimizers, group_table, groups_for
from .guards import Guard, Held, Skip, SpikeRule
from .muon import Muon, NorMuon
from .muon_with_adamw import MuonWithAdamW
from .rowwise import RowAdam
from .state import copy_state, gather_state, load_named_state, named_state, reset, spread_state

__all__ = [
    "AdamW", "Guard", "Held", "Muon", "MuonWithAdamW", "NorMuon", "Row", "RowAdam", "Skip",
    "SpikeRule", "build_optimizers", "copy_state", "gather_state", "group_table", "groups_for",
    "load_named_state", "named_state", "reset", "spread_state", "widest",
]  # fmt: skip
