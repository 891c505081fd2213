"""Nearly orthogonal matrices from matrix products alone: Newton-Schulz and Polar Express.

Both push every singular value of a matrix towards 1 by a few odd polynomials p(s) = a s + b s^3 + c s^5 and leave its
singular vectors alone. A method is data: one coefficient triple an iteration, and how the matrix is scaled before.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor


class Method(NamedTuple):
    coefficients: tuple[tuple[float, float, float], ...]  # (a, b, c) of each iteration
    safety: float  # the start is X / (norm * safety + eps), norm being the Frobenius norm: singular values below 1
    eps: float


METHODS = {
    # Amsel et al., "The Polar Express" (arXiv:2505.16932), for five iterations; safety keeps bf16 rounding below 1.
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
    # Jordan et al., "Muon" (2024): steep at zero, and content with singular values between 0.68 and 1.13.
    "newton_schulz": Method(((3.4445, -4.7750, 2.0315),) * 5, safety=1.0, eps=1e-7),
    # Track 3 of the public contest: twelve gentle iterations that bring all but the smallest values close to 1.
    "newton_schulz_12": Method(((2.0, -1.5, 0.5),) * 12, safety=1.0, eps=1e-7),
    "normalize": Method((), safety=1.0, eps=1e-7),
}

# On a CPU the products of a large batch stream from memory, those of matrices that fit the inner caches do not; two MiB
# is one 768 x 768 matrix in bf16 or sixteen of 256 x 256. A batch that size also keeps small matrices cheap to call.
CPU_BATCH_BYTES = 2 * 2**20


def batch_limit(numel: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many matrices of `numel` elements are worth one batched call: what fits the cache on a CPU, else no limit."""
    if device.type != "cpu":
        return 2**62
    return max(1, CPU_BATCH_BYTES // max(1, numel * dtype.itemsize))


@functools.cache
def native_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where `device` multiplies it in hardware, else float32."""
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device)[0] >= 8
    elif device.type == "cpu":
        # These probes are private to torch: one that a version lacks counts as a no.
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        native = any(getattr(torch.cpu, probe, bool)() for probe in probes)
    else:
        native = False
    return torch.bfloat16 if native else torch.float32


@torch.no_grad()
def orthogonalize(G: Tensor, method: str = "polar_express", dtype: torch.dtype | None = None) -> Tensor:
    """The nearly orthogonal matrix with the singular vectors of G (..., rows, cols); "normalize" keeps G's direction.

    Returns a new tensor of G's shape in `dtype`, that of the products (None: `native_dtype`). The scale of G does not
    matter, from 1e-30 to 1e30; zero gives zero. ValueError for an unknown method or fewer than two dimensions.
    """
    if method not in METHODS:
        raise ValueError(f"unknown orthogonalization method {method!r}; choose one of {', '.join(METHODS)}")
    if G.ndim < 2:
        raise ValueError(f"orthogonalize needs (..., rows, cols), got shape {tuple(G.shape)}; view it as a matrix")
    dtype = dtype or native_dtype(G.device)
    rows, cols = G.shape[-2:]
    batch = math.prod(G.shape[:-2])
    out = torch.empty(G.shape, dtype=dtype, device=G.device)
    if out.numel() == 0:
        return out
    limit = batch_limit(rows * cols, dtype, G.device)
    sources, results = G.reshape(batch, rows, cols), out.view(batch, rows, cols)
    if rows > cols:  # the Gram matrix of the short side is the smaller one
        sources, results = sources.mT, results.mT
    for source, result in zip(sources.split(limit), results.split(limit), strict=True):
        result.copy_(_iterate(source, METHODS[method], dtype))
    return out


def _iterate(G: Tensor, method: Method, dtype: torch.dtype) -> Tensor:
    X = G.to(torch.promote_types(torch.promote_types(G.dtype, dtype), torch.float32))
    # Squares overflow or vanish long before their matrix does, so the largest element is brought to 1 first.
    largest = torch.maximum(X.amax(dim=(-2, -1), keepdim=True), -X.amin(dim=(-2, -1), keepdim=True))
    X = X / largest.clamp_min(torch.finfo(X.dtype).tiny)
    X /= torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True) * method.safety + method.eps
    X = X.to(dtype)
    for a, b, c in method.coefficients:
        A = torch.bmm(X, X.mT)  # unlike matmul, never copies the transposed operand
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X
