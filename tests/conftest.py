"""What all tests share: one thread, fixed seeds, small layers, and why a GPU test is skipped."""

import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before torch reads them. Processes that tests start inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if cpu := os.environ.get("ATEN_CPU_CAPABILITY"):
    # Trap: torch's cache of compiled graphs would hand out those of another capability.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/inductor_{cpu}")

import numpy as np
import pytest
import small_run
import torch
from hypothesis import settings

from data import own

# A shell ignores the first in what it starts with &, nohup the second.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Every test starts from the same random state, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _quick_collection() -> Iterator[None]:
    with small_run.quick_collection():
        yield


@pytest.fixture(scope="module")
def kept_state() -> Iterator[None]:
    """Runs keep what they could resume from, to be compared; small_run.py says how."""
    with small_run.kept_state():
        yield


@pytest.fixture(scope="module")
def two_layers() -> Iterator[None]:
    """Runs of the `tiny` track are quick; small_run.py says how."""
    with small_run.two_layers():
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards for small runs. No test changes them."""
    return small_run.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def plays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of real text in the vocabulary of the prose, 2,048 tokens. No test changes them."""
    folder = tmp_path_factory.mktemp("plays") / "shards"
    assert own.main([str(small_run.ROOT / "tests/data/plays.txt"), "--out", str(folder)]) == 0
    return folder
