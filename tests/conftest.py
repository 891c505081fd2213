"""What all tests share: one thread, fixed seeds, and a reason where a GPU test is skipped."""

import gc
import os
import random
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch reads it; processes that tests start inherit it

import numpy as np
import pytest
import torch
from hypothesis import settings

from runtime import machine, run

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # which a shell ignores in what it starts with &

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device and this machine has none")
            )


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Every test starts from the same random state, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _quick_collection() -> Iterator[None]:
    """A run collects all garbage first, which takes long in a process that imported all this."""
    names = ("disable", "enable", "freeze", "isenabled", "unfreeze")
    quick = SimpleNamespace(
        collect=lambda: gc.collect(0), **{name: getattr(gc, name) for name in names}
    )
    with mock.patch.object(machine, "gc", quick), mock.patch.object(run, "gc", quick):
        yield
