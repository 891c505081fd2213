"""Orthogonalization against float64 iterations and singular value decompositions."""

import pytest
import reference
import torch

from optim import symmetric_matmul as kernels
from optim.orthogonalize import METHODS, choose, orthogonalized

CPU = torch.device("cpu")
SHAPES = [(1, 12), (6, 12), (12, 6), (16, 16), (31, 17), (48, 192), (192, 48), (1, 1)]
DTYPES = [torch.float32, torch.bfloat16]
on_every_cpu_backend = pytest.mark.parametrize("backend", ["plain", "gram"])


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def orthogonalize(G, method, dtype, backend="auto"):
    """One matrix, or a stack of them."""
    short, long = sorted(G.shape[-2:])
    choice = choose(short, long, method, dtype, G.device, backend)
    return orthogonalized(G.view(-1, *G.shape[-2:]), choice).view(G.shape)


def with_singular_values(values, cols):
    """A float64 matrix (len(values), cols) with random singular vectors."""
    values = torch.as_tensor(values, dtype=torch.float64)
    left = torch.linalg.qr(random(len(values), len(values), dtype=torch.float64)).Q
    right = torch.linalg.qr(random(cols, len(values), seed=1, dtype=torch.float64)).Q
    return left * values @ right.mT


@on_every_cpu_backend
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_follows_the_float64_iteration(method, shape, backend):
    G = random(*shape)
    exact = reference.iterate(G, method)
    slack = 2e-5 if backend == "plain" else 2e-4  # iterations on one Gram matrix cost a digit
    assert (orthogonalize(G, method, torch.float32, backend) - exact).abs().max() < slack
    assert (orthogonalize(G.double(), method, torch.float64, backend) - exact).abs().max() < 1e-10
    # Five steps amplify a rounding of 2^-9 of the start, and two on one Gram matrix once more.
    tolerance = 0.06 if backend == "plain" else 0.10
    rounded = orthogonalize(G, method, torch.bfloat16, backend)
    assert (rounded - exact).norm() < tolerance * exact.norm()


# Spectra of 64 rows, and where the singular values along the input's own directions must end for
# each method: lowest, median at least, largest. The largest holds for all directions.
ROWS, COLS = 64, 256
GAUSS = random(ROWS, COLS, dtype=torch.float64)
SPECTRA = {
    "gauss": GAUSS,
    "linear": with_singular_values(torch.linspace(1, 1 / ROWS, ROWS), COLS),
    "condition 1e4": with_singular_values(torch.logspace(0, -4, ROWS), COLS),
    "one value stands out": with_singular_values([1.0] + [1e-3] * (ROWS - 1), COLS),
    "half zero": with_singular_values(torch.linspace(1, -1, ROWS).clamp_min(0), COLS),
    "rank 2": with_singular_values([1.0] * 2 + [0.0] * (ROWS - 2), COLS),
    "rank 8 in noise": with_singular_values([1.0] * 8 + [0.0] * (ROWS - 8), COLS) + 6e-5 * GAUSS,
}
BANDS = {
    ("gauss", "polar_express"): (0.84, 0.98, 1.16),
    ("gauss", "newton_schulz"): (0.67, 0.74, 1.22),
    ("linear", "polar_express"): (0.84, 0.98, 1.16),
    ("linear", "newton_schulz"): (0.67, 0.74, 1.22),
    ("condition 1e4", "polar_express"): (0.01, 0.88, 1.16),
    ("condition 1e4", "newton_schulz"): (0.005, 0.70, 1.22),
    ("one value stands out", "polar_express"): (0.7, 0.83, 1.05),
    ("one value stands out", "newton_schulz"): (0.37, 0.46, 0.72),
    ("half zero", "polar_express"): (0.84, 0.97, 1.16),
    ("half zero", "newton_schulz"): (0.66, 0.77, 1.22),
    ("rank 2", "polar_express"): (1.11, 1.11, 1.16),
    ("rank 2", "newton_schulz"): (1.08, 1.09, 1.22),
    ("rank 8 in noise", "polar_express"): (0.1, 0.25, 1.16),
    ("rank 8 in noise", "newton_schulz"): (0.05, 0.12, 1.22),
}


@on_every_cpu_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spectrum", "method"), BANDS)
def test_singular_values_end_in_a_stated_band(spectrum, method, dtype, backend):
    G, (low, median, high) = SPECTRA[spectrum], BANDS[spectrum, method]
    result = orthogonalize(G.float(), method, dtype, backend).double()
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(2, 12), (6, 24), (64, 256)])
def test_few_rows_and_near_equal_directions_do_not_make_the_gram_form_explode_in_bf16(
    shape, method
):
    """Few strong directions average no rounding out: sharing earlier ends far above 10."""
    generator = torch.Generator().manual_seed(0)
    rows, cols = shape
    count = 30_000 // (rows * cols) + 10
    for noise in (0.01, 0.1, 0.3, 1.0):
        left = torch.randn(count, rows, 1, generator=generator)
        right = torch.randn(count, 1, cols, generator=generator)
        G = left @ right + noise * torch.randn(count, rows, cols, generator=generator)
        G[:, 3:] *= 1e-3 * noise  # and where there are more rows, three that matter
        result = orthogonalize(G, method, torch.bfloat16, "gram")
        assert torch.linalg.matrix_norm(result.double(), ord=2).max() < 1.27


# ---- batches, scale, zeros


@on_every_cpu_backend
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_its_matrices_one_by_one(method, backend):
    G = random(40, 20, 12)
    result = orthogonalize(G, method, torch.float32, backend)
    for one, matrix in zip(result, G, strict=True):
        alone = orthogonalize(matrix, method, torch.float32, backend)
        torch.testing.assert_close(one, alone, rtol=1e-5, atol=2e-6)


@on_every_cpu_backend
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_extreme_scales_give_the_result_of_ordinary_ones(method, dtype, scale, backend):
    G = random(12, 40)
    scaled, ordinary = (orthogonalize(X, method, dtype, backend).float() for X in (G * scale, G))
    atol = 0.01 if backend == "plain" else 0.02
    torch.testing.assert_close(scaled, ordinary, rtol=0.02, atol=atol)


@on_every_cpu_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_zero_stays_zero_beside_a_matrix_that_is_not(method, dtype, backend):
    G = random(2, 8, 4)
    G[0] = 0
    result = orthogonalize(G, method, dtype, backend)
    assert not result[0].any()
    assert torch.isfinite(result).all()
    assert result[1].norm() > 0.9


# ---- which backend


@pytest.mark.parametrize(
    ("device", "shape", "method", "obstacle", "backend", "runs"),
    [
        ("cpu", (768, 3072), "polar_express", "no GPU", "gram", (1, 1, 1, 2)),
        ("cpu", (768, 3072), "newton_schulz", "no GPU", "gram", (1, 2, 2)),
        ("cpu", (768, 768), "polar_express", "no GPU", "plain", (1,) * 5),  # all cost the same here
        ("cuda", (1024, 4096), "polar_express", None, "triton", (1, 1, 1, 2)),
        ("cuda", (1024, 4096), "polar_express", "no compiler", "gram", (1, 1, 1, 2)),
        ("cuda", (64, 256), "polar_express", None, "gram", (1, 1, 1, 2)),
        ("cuda", (1001, 4096), "polar_express", None, "gram", (1, 1, 1, 2)),
    ],
)
def test_the_rule_takes_the_kernel_where_it_suits_and_shares_products_where_that_saves_work(
    device, shape, method, obstacle, backend, runs, monkeypatch
):
    monkeypatch.setattr(kernels, "obstacle", lambda device: obstacle)
    uncached = choose.__wrapped__
    choice = uncached(*shape, method, torch.bfloat16, torch.device(device), "auto")
    assert (choice.backend, choice.runs) == (backend, runs)
    assert sum(runs) == len(METHODS[method].coefficients)


@pytest.mark.skipif(kernels.obstacle(CPU) is None, reason="Triton's interpreter is on")
def test_a_forced_kernel_that_cannot_run_says_why_and_what_would_help():
    with pytest.raises(ValueError, match=r"'triton' cannot run on cpu: .*; or choose auto"):
        choose(4, 4, "polar_express", torch.float32, CPU, "triton")
