"""Orthogonalizes matrices with matrix products alone: Newton-Schulz and Polar Express.

Both methods push every singular value towards 1 with a few odd polynomials
p(s) = a s + b s^3 + c s^5 and keep the singular vectors. A method is data: coefficients (a, b, c)
for each iteration, and how the matrix is scaled first.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from . import symmetric_matmul


class Method(NamedTuple):
    """Coefficients of the iterations, which start at X / (safety * Frobenius norm + eps)."""

    coefficients: tuple[tuple[float, float, float], ...]  # (a, b, c) of each iteration
    safety: float = 1.0
    eps: float = 1e-7


METHODS = {
    # Amsel et al., "The Polar Express" (arXiv:2505.16932), for five iterations. The safety
    # factor keeps singular values below 1 even after rounding to bf16.
    "polar_express": Method(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        safety=1.02,
        eps=1e-6,
    ),
    # Jordan et al., "Muon" (2024): steep at zero, singular values end between 0.68 and 1.13.
    "newton_schulz": Method(((3.4445, -4.7750, 2.0315),) * 5),
    # Track 3 of the public contest: twelve gentle iterations.
    "newton_schulz_12": Method(((2.0, -1.5, 0.5),) * 12),
}

BACKENDS = ("auto", "plain", "triton")
# Below 512 rows launching a product costs most. Triton loads sides that 16 divides fastest.
TRITON_LEAST, TRITON_MULTIPLE = 512, 16
# A CPU is fastest when a batch fits its inner caches. 2 MiB hold one 768 x 768 matrix in bf16.
CPU_BATCH_BYTES = 2 * 2**20


@functools.cache
def native_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 if `device` multiplies it in hardware, else float32."""
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device)[0] >= 8
    else:
        # These probes are private to torch, so a missing one means no.
        probes = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
        native = device.type == "cpu" and any(getattr(torch.cpu, name, bool)() for name in probes)
    return torch.bfloat16 if native else torch.float32


class Choice(NamedTuple):
    """How matrices of one shape are orthogonalized."""

    method: str
    dtype: torch.dtype
    backend: str


@functools.cache
def choose(
    rows: int, cols: int, method: str, dtype: torch.dtype, device: torch.device, backend: str
) -> Choice:
    """How to orthogonalize matrices (rows, cols), rows <= cols, by the named or best backend.

    "auto" follows a rule, not a measurement, so that a run can be repeated.
    ValueError: an unknown method or backend, or a backend that cannot run on `device`.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    obstacle = symmetric_matmul.obstacle(device)
    if backend == "triton" and obstacle is not None:
        raise ValueError(f"backend 'triton' cannot run on {device}: {obstacle}; or choose auto")
    if backend == "auto":
        aligned = rows % TRITON_MULTIPLE == cols % TRITON_MULTIPLE == 0
        suits = rows >= TRITON_LEAST and aligned and dtype.itemsize == 2 and device.type == "cuda"
        backend = "triton" if suits and obstacle is None else "plain"
    return Choice(method, dtype, backend)


def orthogonalized(G: Tensor, choice: Choice) -> Tensor:
    """Matrices with the singular vectors of G (k, rows, cols) and singular values near 1.

    Returns a new tensor in choice.dtype, the dtype of the products. The scale of G has no effect
    from 1e-30 to 1e30. Zero stays zero. Iterates X <- (a I + b A + c A^2) X with A = X X^T, and if
    rows > cols X <- X (a I + b A + c A^2) with the smaller A = X^T X.
    """
    method = METHODS[choice.method]
    # Trap: on a CPU, a bf16 product of anything but row-major is orders of magnitude slower.
    X = scaled(G, method).to(choice.dtype).contiguous()
    tall = X.shape[-2] > X.shape[-1]
    triton = choice.backend == "triton"
    product = symmetric_matmul.symmetric_product if triton else plain_product
    side = min(X.shape[-2:])
    A, B = (X.new_empty(len(X), side, side) for _ in range(2))
    other = torch.empty_like(X)
    for a, b, c in method.coefficients:
        product(X.mT if tall else X, A)
        product(A, B, D=A, alpha=c, beta=b)
        left, right = (X, B) if tall else (B, X)
        torch.baddbmm(X, left, right, beta=a, out=other)
        X, other = other, X
    return X


def plain_product(
    X: Tensor, out: Tensor, *, D: Tensor | None = None, alpha: float = 1, beta: float = 0
) -> Tensor:
    """out = alpha X X^T + beta D."""
    if D is None:
        return torch.bmm(X, X.mT, out=out)
    return torch.baddbmm(D, X, X.mT, beta=beta, alpha=alpha, out=out)


def scaled(G: Tensor, method: Method) -> Tensor:
    """A copy of G in float32 at least, scaled so that no singular value exceeds 1."""
    X = G.to(torch.promote_types(G.dtype, torch.float32))
    # Squares overflow or vanish long before the matrix does, so bring the largest element to 1.
    low, high = X.amin(dim=(-2, -1), keepdim=True), X.amax(dim=(-2, -1), keepdim=True)
    X = X / torch.maximum(high, -low).clamp_min(torch.finfo(X.dtype).tiny)
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
    return X.div_(norm * method.safety + method.eps)
