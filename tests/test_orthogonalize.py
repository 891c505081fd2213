"""Orthogonalization against float64 iterations, singular value decompositions and its own symmetries."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim import reference
from optim.orthogonalize import CPU_BATCH_BYTES, METHODS, batch_limit, native_dtype, orthogonalize

SHAPES = [(1, 12), (6, 12), (12, 6), (16, 16), (31, 17), (48, 192), (192, 48), (1, 1)]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_follows_the_float64_iteration(method, shape):
    G = random(*shape)
    exact = reference.iterate(G, method)
    assert (orthogonalize(G, method, torch.float32) - exact).abs().max() < 2e-5
    assert (orthogonalize(G.double(), method, torch.float64) - exact).abs().max() < 1e-11
    # Five steps amplify a rounding of 2^-9 of the start.
    assert (orthogonalize(G, method, torch.bfloat16) - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize(("method", "low", "high"), [("polar_express", 0.84, 1.16), ("newton_schulz", 0.67, 1.21)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_end_in_the_band_of_the_method(method, low, high, dtype):
    values = torch.linalg.svdvals(orthogonalize(random(96, 384), method, dtype).float())
    assert low < values.min()
    assert values.max() < high


@pytest.mark.parametrize(("method", "cosine"), [("polar_express", 0.99), ("newton_schulz", 0.98)])
def test_result_points_along_the_exact_polar_factor(method, cosine):
    G = random(64, 256)
    result, exact = orthogonalize(G, method, torch.float32).double(), reference.polar_factor(G)
    assert torch.cosine_similarity(result.flatten(), exact.flatten(), dim=0) > cosine
    assert torch.cosine_similarity(G.double().flatten(), exact.flatten(), dim=0) < cosine  # it was not there before


def test_polar_express_lifts_small_singular_values_more_than_newton_schulz():
    U, _, Vh = torch.linalg.svd(random(32, 32, dtype=torch.float64))
    spectrum = torch.logspace(0, -4, 32, dtype=torch.float64)
    polar_express, newton_schulz, normalized = (
        torch.linalg.svdvals(orthogonalize(U * spectrum @ Vh, method, torch.float64)).median()
        for method in ("polar_express", "newton_schulz", "normalize")
    )
    assert polar_express > 0.8 > newton_schulz > 0.6 > 0.1 > normalized


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [(3,), (2, 5), (1,), (0,), (40,)])
def test_a_batch_is_its_matrices_one_by_one(method, batch):
    G = random(*batch, 20, 12)
    result = orthogonalize(G, method, torch.float32)
    assert result.shape == G.shape
    for one, matrix in zip(result.reshape(-1, 20, 12), G.reshape(-1, 20, 12), strict=True):
        torch.testing.assert_close(one, orthogonalize(matrix, method, torch.float32), rtol=1e-5, atol=1e-6)


def test_a_batch_larger_than_the_cache_is_cut_without_changing_it(monkeypatch):
    G = random(7, 16, 24)
    whole = orthogonalize(G, dtype=torch.float32)
    monkeypatch.setattr("optim.orthogonalize.CPU_BATCH_BYTES", 2 * 16 * 24 * 4)
    assert batch_limit(16 * 24, torch.float32, torch.device("cpu")) == 2
    torch.testing.assert_close(orthogonalize(G, dtype=torch.float32), whole, rtol=1e-5, atol=1e-6)


def test_the_cache_rule_takes_single_large_matrices_and_many_small_ones():
    cpu = torch.device("cpu")
    assert batch_limit(3072 * 768, torch.bfloat16, cpu) == 1
    assert batch_limit(256 * 256, torch.bfloat16, cpu) >= 8
    assert batch_limit(256 * 256, torch.bfloat16, torch.device("cuda")) > CPU_BATCH_BYTES


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_extreme_scales_give_the_result_of_ordinary_ones(method, dtype, scale):
    G = random(12, 40)
    torch.testing.assert_close(
        orthogonalize(G * scale, method, dtype).float(), orthogonalize(G, method, dtype).float(), rtol=0.02, atol=0.01
    )


@pytest.mark.parametrize("method", METHODS)
def test_zero_stays_zero_beside_a_matrix_that_is_not(method):
    G = random(2, 8, 4)
    G[0] = 0
    result = orthogonalize(G, method, torch.float32)
    assert not result[0].any()
    assert torch.isfinite(result).all()
    assert result[1].norm() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_the_input_is_neither_changed_nor_aliased(method, dtype):
    G = random(6, 9).to(dtype)
    before = G.clone()
    result = orthogonalize(G, method, dtype)
    result.fill_(7)
    assert torch.equal(G, before)


def test_normalize_divides_by_the_frobenius_norm():
    G = random(5, 7, dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(G, "normalize", torch.float64), G / G.norm(), rtol=1e-6, atol=0)


matrices = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31)).map(
    lambda spec: random(spec[0], spec[1], seed=spec[2], dtype=torch.float64)
)


@settings(max_examples=40, deadline=None)
@given(matrices, st.sampled_from(list(METHODS)), st.floats(-25, 25))
def test_scale_sign_and_transposition_commute_with_it(G, method, exponent):
    result = orthogonalize(G, method, torch.float64)
    close = {"rtol": 1e-6, "atol": 1e-9}
    torch.testing.assert_close(orthogonalize(G * 10**exponent, method, torch.float64), result, **close)
    torch.testing.assert_close(orthogonalize(-G, method, torch.float64), -result, **close)
    torch.testing.assert_close(orthogonalize(G.T, method, torch.float64), result.T, **close)


@settings(max_examples=25, deadline=None)
@given(matrices, st.sampled_from(list(METHODS)))
def test_singular_values_never_pass_the_bound(G, method):
    bound = {"polar_express": 1.16, "newton_schulz": 1.21}.get(method, 1.0 + 1e-9)
    assert torch.linalg.matrix_norm(orthogonalize(G, method, torch.float64), ord=2) < bound


def test_default_dtype_is_the_native_one():
    assert orthogonalize(random(4, 4)).dtype == native_dtype(torch.device("cpu"))
    assert native_dtype(torch.device("meta")) == torch.float32


def test_bad_calls_say_what_is_possible():
    with pytest.raises(ValueError, match=r"'qr'; choose one of polar_express, newton_schulz, .*normalize"):
        orthogonalize(random(2, 2), "qr")
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        orthogonalize(random(3))


def test_the_five_polynomials_together_are_near_one_on_the_range_they_were_made_for():
    s = torch.logspace(math.log10(0.02), 0, 200, dtype=torch.float64) / METHODS["polar_express"].safety
    for a, b, c in METHODS["polar_express"].coefficients:
        s = a * s + b * s**3 + c * s**5
    assert (s - 1).abs().max() < 0.16
