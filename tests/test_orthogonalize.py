"""Orthogonalization against float64 iterations and singular value decompositions."""

import pytest
import reference
import torch

from optim import symmetric_matmul as kernels
from optim.orthogonalize import METHODS, choose, orthogonalized

pytestmark = pytest.mark.core

SHAPES = [(1, 12), (6, 12), (12, 6), (16, 16), (31, 17), (48, 192), (192, 48), (1, 1)]
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def orthogonalize(G, method, dtype):
    """One matrix, or a stack of them."""
    short, long = sorted(G.shape[-2:])
    choice = choose(short, long, method, dtype, G.device, "auto")
    return orthogonalized(G.view(-1, *G.shape[-2:]), choice).view(G.shape)


def with_singular_values(values, cols):
    """A float64 matrix (len(values), cols) with random singular vectors."""
    values = torch.as_tensor(values, dtype=torch.float64)
    left = torch.linalg.qr(random(len(values), len(values), dtype=torch.float64)).Q
    right = torch.linalg.qr(random(cols, len(values), seed=1, dtype=torch.float64)).Q
    return left * values @ right.mT


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_follows_the_float64_iteration(method, shape):
    G = random(*shape)
    exact = reference.iterate(G, method)
    assert (orthogonalize(G, method, torch.float32) - exact).abs().max() < 2e-5
    assert (orthogonalize(G.double(), method, torch.float64) - exact).abs().max() < 1e-10
    # Five steps amplify a rounding of 2^-9 of the start.
    rounded = orthogonalize(G, method, torch.bfloat16)
    assert (rounded - exact).norm() < 0.06 * exact.norm()


# Spectra of 64 rows, and where the singular values along the input's own directions must end for
# each method: lowest, median at least, largest. The largest holds for all directions.
ROWS, COLS = 64, 256
GAUSS = random(ROWS, COLS, dtype=torch.float64)
SPECTRA = {
    "gauss": GAUSS,
    "one value stands out": with_singular_values([1.0] + [1e-3] * (ROWS - 1), COLS),
    "half zero": with_singular_values(torch.linspace(1, -1, ROWS).clamp_min(0), COLS),
    "rank 2": with_singular_values([1.0] * 2 + [0.0] * (ROWS - 2), COLS),
}
BANDS = {
    ("gauss", "polar_express"): (0.84, 0.98, 1.16),
    ("gauss", "newton_schulz"): (0.67, 0.74, 1.22),
    ("gauss", "newton_schulz_12"): (0.995, 0.995, 1.01),
    ("one value stands out", "polar_express"): (0.7, 0.83, 1.05),
    ("one value stands out", "newton_schulz"): (0.37, 0.46, 0.72),
    ("half zero", "polar_express"): (0.84, 0.97, 1.16),
    ("half zero", "newton_schulz"): (0.66, 0.77, 1.22),
    ("rank 2", "polar_express"): (1.11, 1.11, 1.16),
    ("rank 2", "newton_schulz"): (1.08, 1.09, 1.22),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spectrum", "method"), BANDS)
def test_singular_values_end_in_a_stated_band(spectrum, method, dtype):
    G, (low, median, high) = SPECTRA[spectrum], BANDS[spectrum, method]
    result = orthogonalize(G.float(), method, dtype).double()
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    rank = int((S / S[0] > 1e-12).sum())  # the rest are rounding errors
    U, Vh = U[:, :rank], Vh[:rank]
    inside = U.mT @ result @ Vh.mT
    values = torch.linalg.svdvals(inside)
    assert low <= values.min()
    assert median < values.median()
    assert torch.linalg.matrix_norm(result, ord=2) < high
    if dtype == torch.float32:  # nothing is spilled outside of G's own directions
        assert torch.linalg.matrix_norm(result - U @ inside @ Vh, ord=2) < 1e-3


# ---- scale, zeros


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_zero_stays_zero_beside_a_matrix_that_is_not(method, dtype):
    G = random(2, 8, 4)
    G[0] = 0
    result = orthogonalize(G, method, dtype)
    assert not result[0].any()
    assert torch.isfinite(result).all()
    assert result[1].norm() > 0.9


# ---- which backend


@pytest.mark.parametrize(("device", "shape", "obstacle", "backend"), [
    ("cpu", (768, 3072), "no GPU", "plain"),
    ("cuda", (1024, 4096), None, "triton"),
    ("cuda", (1024, 4096), "no compiler", "plain"),
    ("cuda", (64, 256), None, "plain"),
    ("cuda", (1001, 4096), None, "plain"),
])  # fmt: skip
def test_the_rule_takes_the_kernel_where_it_suits(device, shape, obstacle, backend, monkeypatch):
    monkeypatch.setattr(kernels, "obstacle", lambda device: obstacle)
    uncached = choose.__wrapped__
    choice = uncached(*shape, "polar_express", torch.bfloat16, torch.device(device), "auto")
    assert choice.backend == backend
