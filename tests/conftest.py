"""What all tests share: one thread, fixed seeds, and a reason where a GPU test is skipped."""

import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; processes that tests start inherit it

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and this machine has none"))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Every test starts from the same random state, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
