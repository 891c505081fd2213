"""Orthogonalization against float64 iterations and singular value decompositions."""

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim import symmetric_matmul as kernels
from optim.orthogonalize import (
    LARGEST_SINGULAR_VALUE,
    METHODS,
    choose,
    orthogonalize,
    spectral_norm,
)

CPU = torch.device("cpu")
SHAPES = [(1, 12), (6, 12), (12, 6), (16, 16), (31, 17), (48, 192), (192, 48), (1, 1)]
DTYPES = [torch.float32, torch.bfloat16]
ITERATIVE = [method for method, steps in METHODS.items() if steps.coefficients]
on_every_cpu_backend = pytest.mark.parametrize("backend", ["plain", "gram"])


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_singular_values(values, cols, seed=0):
    """A float64 matrix (len(values), cols) with random singular vectors."""
    values = torch.as_tensor(values, dtype=torch.float64)
    left = torch.linalg.qr(random(len(values), len(values), seed=seed, dtype=torch.float64)).Q
    right = torch.linalg.qr(random(cols, len(values), seed=seed + 1, dtype=torch.float64)).Q
    return left * values @ right.mT


def cosine(X, Y):
    return torch.cosine_similarity(X.double().flatten(), Y.double().flatten(), dim=0)


def polar_factor(G):
    """U V^T of the singular value decomposition, over the values that are not zero."""
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    nonzero = S.gt(1e-12 * S[0])
    return U[:, nonzero] @ Vh[nonzero]


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
    assert (
        orthogonalize(G, method, torch.bfloat16, backend) - exact
    ).norm() < tolerance * exact.norm()


# Spectra of 64 rows, and where the singular values along the input's own directions must end:
# lowest, median at least,
# largest, for each method. The largest holds for all directions.
ROWS, COLS = 64, 256
GAUSS = random(ROWS, COLS, dtype=torch.float64)
SPECTRA = {
    "gauss": GAUSS,
    "tiny": GAUSS * 1e-12,
    "huge": GAUSS * 1e30,
    "linear": with_singular_values(torch.linspace(1, 1 / ROWS, ROWS), COLS),
    "condition 1e4": with_singular_values(torch.logspace(0, -4, ROWS), COLS),
    "condition 1e9": with_singular_values(torch.logspace(0, -9, ROWS), COLS),
    "one value stands out": with_singular_values([1.0] + [1e-3] * (ROWS - 1), COLS),
    "half zero": with_singular_values(torch.linspace(1, -1, ROWS).clamp_min(0), COLS),
    "rank 8": with_singular_values([1.0] * 8 + [0.0] * (ROWS - 8), COLS),
    "rank 2": with_singular_values([1.0] * 2 + [0.0] * (ROWS - 2), COLS),
    "rank 8 in noise": with_singular_values([1.0] * 8 + [0.0] * (ROWS - 8), COLS) + 6e-5 * GAUSS,
}
FULL = {"polar_express": (0.84, 0.98, 1.16), "newton_schulz": (0.67, 0.74, 1.22)}
BANDS = {
    "gauss": FULL,
    "tiny": FULL,
    "huge": FULL,
    "linear": FULL,
    "condition 1e4": {"polar_express": (0.01, 0.88, 1.16), "newton_schulz": (0.005, 0.70, 1.22)},
    "condition 1e9": {"polar_express": (0.0, 0.01, 1.16), "newton_schulz": (0.0, 0.005, 1.22)},
    "one value stands out": {
        "polar_express": (0.7, 0.83, 1.05),
        "newton_schulz": (0.37, 0.46, 0.72),
    },
    "half zero": {"polar_express": (0.84, 0.97, 1.16), "newton_schulz": (0.66, 0.77, 1.22)},
    "rank 8": {"polar_express": (1.08, 1.10, 1.16), "newton_schulz": (1.02, 1.05, 1.22)},
    "rank 2": {"polar_express": (1.11, 1.11, 1.16), "newton_schulz": (1.08, 1.09, 1.22)},
    "rank 8 in noise": {"polar_express": (0.1, 0.25, 1.16), "newton_schulz": (0.05, 0.12, 1.22)},
}


def real_directions(G):
    """U, Vh of the singular values that are not rounding errors."""
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    rank = int((S / S[0] > 1e-12).sum())
    return U[:, :rank], Vh[:rank]


def spill(result, G):
    """The largest singular value of the result outside G's own directions."""
    U, Vh = real_directions(G)
    inside = U @ (U.mT @ result.double() @ Vh.mT) @ Vh
    return torch.linalg.matrix_norm(result.double() - inside, ord=2)


@on_every_cpu_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", FULL)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_singular_values_end_in_a_stated_band(spectrum, method, dtype, backend):
    G, (low, median, high) = SPECTRA[spectrum], BANDS[spectrum][method]
    result = orthogonalize(G.float(), method, dtype, backend).double()
    U, Vh = real_directions(G)
    values = torch.linalg.svdvals(U.mT @ result @ Vh.mT)
    assert low <= values.min()
    assert median < values.median()
    assert torch.linalg.matrix_norm(result, ord=2) < high
    if dtype == torch.float32:
        assert spill(result, G) < 1e-3


# Two iterations share one Gram matrix, and this must cost nothing but the last digits.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", FULL)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_gram_form_is_as_good_as_the_plain_one(spectrum, method, dtype):
    G = SPECTRA[spectrum]
    exact = polar_factor(G)
    plain, gram = (
        orthogonalize(G.float(), method, dtype, backend).double() for backend in ("plain", "gram")
    )
    assert not torch.equal(plain, gram)
    assert (
        abs(torch.linalg.matrix_norm(gram, ord=2) - torch.linalg.matrix_norm(plain, ord=2)) < 0.04
    )
    assert cosine(gram, exact) > cosine(plain, exact) - 0.02


# ---- batches, scale, zeros


@on_every_cpu_backend
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [(3,), (2, 5), (1,), (0,), (40,)])
def test_a_batch_is_its_matrices_one_by_one(method, batch, backend):
    G = random(*batch, 20, 12)
    result = orthogonalize(G, method, torch.float32, backend)
    assert result.shape == G.shape
    for one, matrix in zip(result.reshape(-1, 20, 12), G.reshape(-1, 20, 12), strict=True):
        torch.testing.assert_close(
            one, orthogonalize(matrix, method, torch.float32, backend), rtol=1e-5, atol=2e-6
        )


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3)])
def test_an_empty_matrix_stays_empty(shape):
    assert orthogonalize(torch.zeros(shape)).shape == shape


@on_every_cpu_backend
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_extreme_scales_give_the_result_of_ordinary_ones(method, dtype, scale, backend):
    G = random(12, 40)
    scaled, ordinary = (orthogonalize(X, method, dtype, backend).float() for X in (G * scale, G))
    torch.testing.assert_close(
        scaled, ordinary, rtol=0.02, atol=0.01 if backend == "plain" else 0.02
    )


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


matrices = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31)).map(
    lambda spec: random(spec[0], spec[1], seed=spec[2], dtype=torch.float64)
)


# ---- which backend, and what it costs


@pytest.fixture
def fresh_choices():
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.mark.parametrize(
    ("shape", "method", "expected"),
    [
        ((768, 3072), "polar_express", ("gram", (1, 1, 1, 2))),
        ((768, 3072), "newton_schulz", ("gram", (1, 2, 2))),
        ((768, 3072), "newton_schulz_12", ("gram", (2,) * 6)),
        ((768, 768), "polar_express", ("plain", (1,) * 5)),  # all products cost the same here
        ((768, 3072), "normalize", ("gram", ())),
    ],
)
def test_on_a_cpu_the_rule_takes_the_gram_form_where_it_saves_work(shape, method, expected):
    choice = choose(*shape, method, torch.bfloat16, CPU, "auto")
    assert (choice.backend, choice.runs) == expected
    assert sum(choice.runs) == len(METHODS[method].coefficients)
    assert choose(*shape, method, torch.bfloat16, CPU, "plain").backend == "plain"


@pytest.mark.parametrize("method", ITERATIVE)
@pytest.mark.parametrize("shape", [(2, 12), (6, 24), (16, 64), (64, 256)])
def test_few_rows_and_near_equal_directions_do_not_make_the_gram_form_explode_in_bf16(
    shape, method
):
    """Few strong directions average no rounding out: sharing earlier ends far above 10."""
    generator = torch.Generator().manual_seed(0)
    rows, cols = shape
    count = 30_000 // (rows * cols) + 10
    for noise in (0.01, 0.1, 0.3, 1.0):
        outer = torch.randn(count, rows, 1, generator=generator) @ torch.randn(
            count, 1, cols, generator=generator
        )
        G = outer + noise * torch.randn(count, rows, cols, generator=generator)
        G[:, 3:] *= 1e-3 * noise  # and where there are more rows, three that matter
        result = orthogonalize(G, method, torch.bfloat16, "gram")
        assert torch.linalg.matrix_norm(result.double(), ord=2).max() < 1.27


@pytest.mark.parametrize(
    ("shape", "dtype", "obstacle", "backend"),
    [
        ((1024, 4096), torch.bfloat16, None, "triton"),
        ((1024, 4096), torch.bfloat16, "no compiler", "gram"),
        ((1024, 4096), torch.float32, None, "gram"),
        ((64, 256), torch.bfloat16, None, "gram"),
        ((1001, 4096), torch.bfloat16, None, "gram"),
        ((64, 64), torch.bfloat16, None, "plain"),
    ],
)
def test_on_cuda_large_matrices_that_suit_the_kernel_take_it_if_it_runs(
    shape, dtype, obstacle, backend, monkeypatch, fresh_choices
):
    monkeypatch.setattr(kernels, "obstacle", lambda device: obstacle)
    choice = choose(*shape, "polar_express", dtype, torch.device("cuda"), "auto")
    assert choice.backend == backend
    assert sum(choice.runs) == 5
    assert max(choice.runs) <= 2


@pytest.mark.skipif(kernels.obstacle(CPU) is None, reason="Triton's interpreter is on")
def test_a_forced_kernel_that_cannot_run_says_why_and_what_would_help(monkeypatch):
    with pytest.raises(
        ValueError,
        match=r"backend 'triton' cannot run on cpu: .*TRITON_INTERPRET=1; or choose auto",
    ):
        orthogonalize(random(4, 4), backend="triton")
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    kernels.obstacle.cache_clear()
    with pytest.raises(ValueError, match=r'Triton is not installed: pip install "triton>=3'):
        orthogonalize(random(4, 4), backend="triton")
    kernels.obstacle.cache_clear()


def test_bad_calls_say_what_is_possible():
    with pytest.raises(
        ValueError,
        match=r"unknown method 'qr'; choose one of polar_express, newton_schulz, .*normalize",
    ):
        orthogonalize(random(2, 2), "qr")
    with pytest.raises(
        ValueError, match=r"unknown backend 'cublas'; choose auto or one of plain, gram, triton"
    ):
        orthogonalize(random(2, 2), backend="cublas")
    with pytest.raises(ValueError, match=r"got \(3,\)"):
        orthogonalize(random(3))


# ---- the check of a result


@pytest.mark.parametrize("shape", [(48, 48), (48, 192), (192, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_finds_one_singular_value_that_stands_out(shape, dtype):
    short = min(shape)
    sound, broken = (
        with_singular_values([first] + [1.0] * (short - 1), max(shape), seed=seed).to(dtype)
        for first, seed in ((1.0, 0), (13.9, 0))
    )
    batch = torch.stack([sound, broken])
    found = spectral_norm(batch if shape[0] <= shape[1] else batch.mT)
    assert found.dtype == torch.float32
    assert found[0] < 1.05 < LARGEST_SINGULAR_VALUE < found[1] < 14


@settings(max_examples=60)
@given(matrices, st.floats(-6, 6))
def test_the_check_never_exceeds_the_spectral_norm(G, exponent):
    X = (G * 10**exponent).float()
    assert spectral_norm(X.unsqueeze(0)) <= torch.linalg.matrix_norm(X.double(), ord=2) * (1 + 1e-5)


def test_the_check_passes_every_sound_result():
    for spectrum, G in SPECTRA.items():
        for method in METHODS:
            result = orthogonalize(G.float(), method, torch.bfloat16)
            assert spectral_norm(result.unsqueeze(0)) < LARGEST_SINGULAR_VALUE, (spectrum, method)
