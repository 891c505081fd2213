"""The symmetric product against float64: in Triton's interpreter, compiled where there is a GPU.

The interpreter runs a copy of the module: `optim.symmetric_matmul` itself stays as it is.
"""

import importlib.util
import os
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim import symmetric_matmul as kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = [(1, 1, 1), (3, 1, 12), (2, 17, 31), (1, 64, 64), (2, 65, 5), (1, 129, 257), (1, 300, 40)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
CASES.append(((34, 130, 9), torch.float16))  # in large tiles, as the next
CASES.append(pytest.param((17, 260, 9), torch.bfloat16, marks=pytest.mark.gpu))


def copy_of_the_module(**environment):
    spec = importlib.util.find_spec("optim.symmetric_matmul")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, environment):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=[CPU, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str)
def kernel(request):
    """The product, and the device that it runs on."""
    if request.param == CUDA:
        return kernels.symmetric_product, CUDA
    if sys.platform != "linux" and not kernels.HAS_TRITON:
        pytest.skip("Triton is made for Linux alone")
    import triton  # noqa: F401  not for the first time under TRITON_INTERPRET: torch.compile needs it compiled

    interpreted = copy_of_the_module(TRITON_INTERPRET="1").symmetric_product

    def product(X, out, D=None, **factors):
        if X.dtype != torch.bfloat16:
            return interpreted(X, out, D=D, **factors)
        # Trap: the interpreter multiplies bf16 as integers. float32 holds every bf16 value.
        D = None if D is None else D.float()
        wide = torch.empty_like(out, dtype=torch.float32)
        return out.copy_(interpreted(X.float(), wide, D=D, **factors))

    return product, CPU


def random(*shape, dtype, device):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def symmetric(B, n, dtype, device):
    half = random(B, n, n, dtype=dtype, device=device)
    return half.tril() + half.tril(-1).mT


def check(result, X, *, alpha=1.0, D=None, beta=0.0):
    """`result` is symmetric to the bit, and errs by float32 sums and one rounding, no more."""
    X = X.double()
    D = torch.zeros_like(result, dtype=torch.float64) if D is None else D.double()
    exact = alpha * X @ X.mT + beta * D
    terms = abs(alpha) * X.abs() @ X.abs().mT + abs(beta) * D.abs()
    # Tensor cores cut off what does not fit, they do not round.
    in_float32 = (X.size(2) + 4) * 2**-23 * terms
    finfo = torch.finfo(result.dtype)
    once = finfo.eps / 2 * (exact.abs() + in_float32) + finfo.smallest_normal
    assert torch.equal(result, result.mT)
    assert ((result.double() - exact).abs() <= in_float32 + once).all()


def nowhere(X):
    return X.new_full((X.size(0), X.size(1), X.size(1)), float("nan"))


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_gram_matrices_and_their_polynomials_are_exact_but_for_one_rounding(kernel, shape, dtype):
    product, device = kernel
    X, A = random(*shape, dtype=dtype, device=device), symmetric(*shape[:2], dtype, device)
    check(product(X, nowhere(X)), X)
    terms = {"alpha": 2.0315, "D": A, "beta": -4.775}
    check(product(A, nowhere(A), **terms), A, **terms)


LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: torch.stack((x, x + 1), dim=-1).flatten(-2)[..., ::2],
    "part of rows": lambda x: torch.cat((x, x + 1), dim=-1)[..., : x.size(-1)],
    "batch inside": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "one for all": lambda x: x[:1].expand_as(x),
}


@settings(max_examples=25)
@given(
    st.sampled_from(list(LAYOUTS)), st.sampled_from(list(LAYOUTS)), st.sampled_from(DTYPES),
    st.integers(1, 3), st.integers(1, 140), st.integers(1, 80),
)  # fmt: skip
def test_strides_of_the_inputs_change_no_bit(kernel, layout, layout_of_D, dtype, B, n, m):
    product, device = kernel
    X = LAYOUTS[layout](random(B, n, m, dtype=dtype, device=device))
    D = LAYOUTS[layout_of_D](symmetric(B, n, dtype, device))
    terms = {"alpha": 0.5, "beta": -2.0}
    strided = product(X, nowhere(X), D=D, **terms)
    X, D = X.contiguous(), D.contiguous()
    # On a GPU, other strides may be other code.
    assert device == CUDA or torch.equal(strided, product(X, nowhere(X), D=D, **terms))
    check(strided, X, D=D, **terms)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 4])
@pytest.mark.parametrize(("n", "m"), [(768, 768), (768, 3072), (1024, 4096)])
def test_a_gpu_errs_no_more_than_torch_does_at_the_sizes_of_models(B, n, m):
    X = random(B, n, m, dtype=torch.bfloat16, device=CUDA) / m**0.5
    A = kernels.symmetric_product(X, nowhere(X))
    square = kernels.symmetric_product(A, nowhere(X), alpha=2.0, D=A, beta=-3.0)
    theirs = torch.baddbmm(A, A, A, alpha=2.0, beta=-3.0)
    exact = 2 * A.double() @ A.double() - 3 * A.double()
    for mine, other, truth in (
        (A, torch.bmm(X, X.mT), X.double() @ X.double().mT),
        (square, theirs, exact),
    ):
        assert torch.equal(mine, mine.mT)
        assert (mine - truth).abs().max() <= 1.01 * (other - truth).abs().max()
