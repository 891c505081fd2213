"""Nearly orthogonal matrices from matrix products alone: Newton-Schulz and Polar Express.

Both push every singular value of a matrix towards 1 by a few odd polynomials p(s) = a s + b s^3 + c s^5 and leave its
singular vectors alone. A method is data: one coefficient triple an iteration, and how the matrix is scaled before.
How the products are made is chosen at run time, by device, dtype and shape: see `choose`.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels

logger = logging.getLogger(__name__)


Coefficients = tuple[tuple[float, float, float], ...]  # (a, b, c) of each iteration


class Method(NamedTuple):
    coefficients: Coefficients
    safety: float  # the start is X / (norm * safety + eps), norm being the Frobenius norm: singular values below 1
    eps: float
    # How many iterations in 16 bits may share a Gram matrix, from which later ones are computed by small products. They
    # magnify the rounding of its small eigenvalues: each of these partitions keeps the largest singular value below
    # 1.25 on every spectrum tried, where pairing Polar Express from the start lets it explode.
    runs: tuple[int, ...] = ()


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
        runs=(1, 1, 1, 2),
    ),
    # Jordan et al., "Muon" (2024): steep at zero, and content with singular values between 0.68 and 1.13.
    "newton_schulz": Method(((3.4445, -4.7750, 2.0315),) * 5, safety=1.0, eps=1e-7, runs=(1, 2, 2)),
    # Track 3 of the public contest: twelve gentle iterations that bring all but the smallest values close to 1.
    "newton_schulz_12": Method(((2.0, -1.5, 0.5),) * 12, safety=1.0, eps=1e-7, runs=(2,) * 6),
    "normalize": Method((), safety=1.0, eps=1e-7),
    # The exact polar factor, by a singular value decomposition in float64: slow, for comparisons.
    "exact": Method((), safety=1.0, eps=1e-7),
}

BACKENDS = ("plain", "gram", "triton")
# In float32 three iterations on one Gram matrix cost little accuracy, five a digit and more.
LONGEST_RUN = 3
# Smaller products are bound by their launches, and half of their tiles saves nothing; sides that are no multiple of 16
# make slow loads.
TRITON_LEAST, TRITON_MULTIPLE = 512, 16

# On a CPU the products of a large batch stream from memory, those of matrices that fit the inner caches do not; two MiB
# is one 768 x 768 matrix in bf16 or sixteen of 256 x 256. A batch that size also keeps small matrices cheap to call.
CPU_BATCH_BYTES = 2 * 2**20

# A method's singular values end below 1.25, bf16 rounding included. Beyond this one its products went wrong.
LARGEST_SINGULAR_VALUE = 1.5


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


class Choice(NamedTuple):
    backend: str
    runs: tuple[int, ...]  # iterations on each Gram matrix

    def __str__(self) -> str:
        return f"{self.backend}, iterations {' + '.join(map(str, self.runs)) or 'none'}"


@functools.cache
def choose(
    rows: int, cols: int, method: str, dtype: torch.dtype, device: torch.device, backend: str = "auto"
) -> Choice:
    """What multiplies matrices (rows, cols), rows <= cols: the backend named, or for "auto" the one with least to do.

    A rule and not a measurement, so that a run can be repeated; each choice is logged once, at level INFO, and cached.
    ValueError for an unknown backend, and for one that cannot run on the device: it says what to install.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose auto or one of {', '.join(BACKENDS)}")
    if backend == "auto":
        suits = rows >= TRITON_LEAST and rows % TRITON_MULTIPLE == cols % TRITON_MULTIPLE == 0 and dtype.itemsize == 2
        suits = suits and device.type == "cuda" and kernels.obstacle(device) is None
        backend = "triton" if suits else "gram"
    elif backend == "triton" and (obstacle := kernels.obstacle(device)) is not None:
        raise ValueError(f"backend 'triton' cannot run on {device}: {obstacle}; or choose auto, gram or plain")
    steps = METHODS[method]
    iterations = len(steps.coefficients)
    single = (1,) * iterations
    longer = steps.runs if dtype.itemsize == 2 else partition(iterations, LONGEST_RUN)
    runs = single if backend == "plain" else min(single, longer, key=lambda runs: work(rows, cols, runs, backend))
    choice = Choice("plain" if backend == "gram" and runs == single else backend, runs)
    logger.info("%d x %d in %s on %s: %s", rows, cols, dtype, device, choice)
    return choice


def partition(iterations: int, length: int) -> tuple[int, ...]:
    """Runs of `length` iterations, the first one shorter if need be: it meets the widest range of singular values."""
    first = iterations % length
    return (first,) * (first > 0) + (length,) * (iterations // length)


def work(rows: int, cols: int, runs: tuple[int, ...], backend: str) -> float:
    """Multiplications for one matrix. A run of k takes 2 products with the matrix and 4 k - 3 of Gram matrices."""
    symmetric = 0.5 if backend == "triton" else 1.0
    squares = sum(4 * run - 3 for run in runs) * symmetric * rows**3
    return squares + len(runs) * (symmetric + 1) * rows**2 * cols


@torch.no_grad()
def orthogonalize(
    G: Tensor, method: str = "polar_express", dtype: torch.dtype | None = None, backend: str = "auto"
) -> Tensor:
    """The nearly orthogonal matrix with the singular vectors of G (..., rows, cols); "normalize" keeps G's direction.

    Returns a new tensor of G's shape in `dtype`, that of the products (None: `native_dtype`). The scale of G does not
    matter, from 1e-30 to 1e30; zero gives zero. backend: see `choose`, whose errors it raises. ValueError also for an
    unknown method or fewer than two dimensions.
    """
    if method not in METHODS:
        raise ValueError(f"unknown orthogonalization method {method!r}; choose one of {', '.join(METHODS)}")
    if G.ndim < 2:
        raise ValueError(f"orthogonalize needs (..., rows, cols), got shape {tuple(G.shape)}; view it as a matrix")
    dtype = dtype or native_dtype(G.device)
    rows, cols = G.shape[-2:]
    batch = math.prod(G.shape[:-2])
    if G.numel() == 0:
        return G.to(dtype)
    choice = choose(min(rows, cols), max(rows, cols), method, dtype, G.device, backend)
    slices = G.reshape(batch, rows, cols).split(batch_limit(rows * cols, dtype, G.device))
    if method == "exact":
        found = [polar_factor(X).to(dtype) for X in slices]
    else:
        found = [iterate(X, METHODS[method], dtype, choice) for X in slices]
    return (found[0] if len(found) == 1 else torch.cat(found)).view(G.shape)


def polar_factor(G: Tensor) -> Tensor:
    """U V^T of the singular value decompositions of G (..., rows, cols), over the values that are not zero, float64."""
    sound = G.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)  # of others the decomposition would raise an error
    U, S, Vh = torch.linalg.svd(torch.where(sound, G, 0).double(), full_matrices=False)
    nonzero = S.gt(1e-12 * S.amax(dim=-1, keepdim=True)).unsqueeze(-2)
    return torch.where(sound, (U * nonzero) @ Vh, torch.nan)


def iterate(G: Tensor, method: Method, dtype: torch.dtype, choice: Choice) -> Tensor:
    """All iterations X <- (a I + b A + c A^2) X with A = X X^T, on matrices (batch, rows, cols).

    With rows > cols it is X <- X (a I + b A + c A^2) with A = X^T X, which is the smaller one.
    """
    # A CPU is slow by orders of magnitude where the result of a bf16 product has other strides.
    X = scaled(G, method).to(dtype).contiguous()
    tall = X.shape[-2] > X.shape[-1]
    product = kernels.symmetric_product if choice.backend == "triton" else plain_product
    memory = [X.new_empty(len(X), *[min(X.shape[-2:])] * 2) for _ in range(5)]
    other, done = torch.empty_like(X), 0
    for run in choice.runs:
        coefficients = method.coefficients[done : done + run]
        (a, b, c), A, B = coefficients[0], memory[0], memory[1]
        wide = X.mT if tall else X
        product(wide, wide, A)
        product(A, A, B, D=A, alpha=c, beta=b)
        if run > 1:
            a, B = 0.0, continued(coefficients, memory, product)
        left, right = (X, B) if tall else (B, X)
        torch.baddbmm(X, left, right, beta=a, out=other)
        X, other, done = other, X, done + run
    return X


def continued(coefficients: Coefficients, memory: list[Tensor], product: Callable[..., Tensor]) -> Tensor:
    """The polynomial of several iterations, from the first one's A and B = b A + c A^2 in `memory`.

    The Gram matrix of the next iteration is (a I + B) A (a I + B), a product of small matrices. B is kept without a I:
    on a diagonal of the size of a, bf16 would round the rest of it away.
    """
    A, B, spare, total, other = memory
    latest, a = B, coefficients[0][0]
    for number, (next_a, b, c) in enumerate(coefficients[1:]):
        product(latest, A, spare, D=A, beta=a)
        product(spare, latest, A, D=spare, beta=a)
        if number == 0:
            B.diagonal(dim1=-2, dim2=-1).add_(a)
            latest, total = total, B
        product(A, A, latest, D=A, alpha=c, beta=b)
        product(latest, total, other, D=total, beta=next_a)
        total, other, a = other, total, next_a
    return total


def plain_product(
    X: Tensor, Y: Tensor, out: Tensor, *, D: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    """out = alpha X Y^T + beta D."""
    if D is None:
        return torch.bmm(X, Y.mT, out=out)
    return torch.baddbmm(D, X, Y.mT, beta=beta, alpha=alpha, out=out)


def scaled(G: Tensor, method: Method) -> Tensor:
    """A copy of G in float32 at least, with singular values in (0, 1]."""
    X = G.to(torch.promote_types(G.dtype, torch.float32))
    # Squares overflow or vanish long before their matrix does, so the largest element is brought to 1 first.
    largest = torch.maximum(X.amax(dim=(-2, -1), keepdim=True), -X.amin(dim=(-2, -1), keepdim=True))
    X = X / largest.clamp_min(torch.finfo(X.dtype).tiny)
    return X.div_(torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True) * method.safety + method.eps)


def spectral_norm(X: Tensor) -> Tensor:
    """A lower estimate of the largest singular value of X (batch, rows, cols), float32, from two vector products.

    NaN or infinite where X is. Of n values near 1, a single one must reach about (5 n)^(1/4), 8 for 768, to lift the
    estimate above 1.5: enough to see products gone wrong, which end far above.
    """
    X = X.mT if X.shape[-2] > X.shape[-1] else X
    g = probe(X.shape[-2], X.device).to(X.dtype).expand(X.shape[0], 1, -1)
    image = torch.bmm(torch.bmm(g, X), X.mT).float()
    return (torch.linalg.vector_norm(image, dim=(1, 2)) / max(1, X.shape[-2]) ** 0.5).sqrt()


@functools.cache
def probe(rows: int, device: torch.device) -> Tensor:
    """Random signs, the same on every call."""
    return torch.randint(0, 2, (1, 1, rows), generator=torch.Generator().manual_seed(0)).mul(2).sub(1).to(device)
