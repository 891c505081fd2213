"""Products known to be symmetric, for half the work: one triangle of tiles is computed and mirrored.

The idea is public in flash-muon and in the logs of record runs. The kernel is written in Triton: it runs on CUDA
devices and, to be checked anywhere, on a CPU in Triton's interpreter. Importing this module needs no Triton.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = False  # Triton reads TRITON_INTERPRET where a kernel is defined: the first import settles it

if HAS_TRITON:
    import triton
    import triton.language as tl

    INTERPRETED = bool(triton.knobs.runtime.interpret)

    # Builtins of the language only: its library (cdiv, zeros) is compiled or interpreted as of Triton's own import.
    @triton.jit
    def _mirrored_tile(
        X, Y, D, out, n, m, alpha, beta,
        x_batch, x_row, x_col, y_batch, y_row, y_col, d_batch, d_row, d_col, out_batch, out_row, out_col,
        TILE: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        # A triangle with T tiles to a side folds into rows of T + 1: the T - i tiles of its row i, then the i + 1 of
        # its row T - 1 - i. Programs that run together so share a few rows of X and, in the cache, each row of Y.
        T = (n + TILE - 1) // TILE
        tiles = T * (T + 1) // 2
        batch = (tl.program_id(0) // tiles).to(tl.int64)  # offsets have 64 bits: a batch may exceed 2^31 elements
        i = tl.program_id(0) % tiles // (T + 1)
        j = tl.program_id(0) % tiles % (T + 1)
        row_tile = tl.where(j < T - i, i, T - 1 - i)
        col_tile = tl.where(j < T - i, i + j, j - 1)

        rows = (row_tile * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
        cols = (col_tile * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
        X += batch * x_batch + rows * x_row
        Y += batch * y_batch + cols * y_row
        total = tl.full((TILE, TILE), 0.0, tl.float32)
        for start in range(0, m, DEPTH):
            k = (start + tl.arange(0, DEPTH)).to(tl.int64)
            x = tl.load(X + k[None, :] * x_col, mask=(rows < n) & (k[None, :] < m), other=0.0)
            y = tl.load(Y + k[:, None] * y_col, mask=(cols < n) & (k[:, None] < m), other=0.0)
            total = tl.dot(x, y, total, input_precision="ieee")

        inside = (rows < n) & (cols < n)
        total *= alpha
        if D is not None:
            d = tl.load(D + batch * d_batch + rows * d_row + cols * d_col, mask=inside, other=0.0)
            total += beta * d.to(tl.float32)
        result = total.to(out.dtype.element_ty)
        if row_tile == col_tile:  # this tile holds both halves, which may have been rounded differently
            result = tl.where(rows <= cols, result, tl.trans(result))
        out += batch * out_batch
        tl.store(out + rows * out_row + cols * out_col, result, mask=inside)
        tl.store(out + cols * out_row + rows * out_col, result, mask=inside)


@functools.cache
def obstacle(device: torch.device) -> str | None:
    """Why the kernel cannot run on `device`, with what would help, or None if it can."""
    if not HAS_TRITON:
        return 'Triton is not installed: pip install "triton>=3.6"'
    if INTERPRETED:
        return None
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return f"{device} is no CUDA device; to check results on a CPU, slowly, start Python with TRITON_INTERPRET=1"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor} and 8.0 is needed"
    return None


@torch.no_grad()
def symmetric_product(
    X: Tensor,
    Y: Tensor,
    out: Tensor,
    *,
    alpha: float = 1.0,
    D: Tensor | None = None,
    beta: float = 0.0,
) -> Tensor:
    """out = alpha X Y^T + beta D, known to be symmetric: Y is X, say, or both are symmetric and commute.

    X, Y (B, n, m); D, out (B, n, n); one dtype of DTYPES, any strides. out shares no memory with the rest, D included.
    The upper triangle is computed, in float32 with one rounding, and mirrored bit for bit; gradients do not flow.
    ValueError for shapes, dtypes and devices that do not fit, RuntimeError where `obstacle` names a reason.
    """
    _check(X, Y, D, out)
    if reason := obstacle(X.device):
        raise RuntimeError(f"the symmetric product cannot run: {reason}")
    if out.numel() == 0:
        return out
    if INTERPRETED and X.dtype == torch.bfloat16:  # which the interpreter multiplies as integers; float32 holds it all
        X, Y, D, wide = X.float(), Y.float(), None if D is None else D.float(), torch.empty_like(out, dtype=torch.float)
        return out.copy_(symmetric_product(X, Y, wide, alpha=alpha, D=D, beta=beta))
    B, n, m = X.shape
    tiling = _tiling(B, n, X.dtype)
    with torch.cuda.device_of(X):
        _mirrored_tile[(B * _triangle(n, tiling["TILE"]),)](
            X, Y, D, out, n, m, float(alpha), float(beta),
            *X.stride(), *Y.stride(), *(out if D is None else D).stride(), *out.stride(), **tiling,
        )  # fmt: skip
    return out


def _check(X: Tensor, Y: Tensor, D: Tensor | None, out: Tensor) -> None:
    if X.ndim != 3:
        raise ValueError(f"X has shape {tuple(X.shape)}; a batch of matrices (B, n, m) is needed, view it as one")
    if X.dtype not in DTYPES:
        raise ValueError(f"X is {X.dtype}; the symmetric product takes {', '.join(map(str, DTYPES))}")
    B, n, m = X.shape
    for name, tensor, shape in (("Y", Y, (B, n, m)), ("D", D, (B, n, n)), ("out", out, (B, n, n))):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; beside X of {tuple(X.shape)} it must be {shape}")
        if (tensor.dtype, tensor.device) != (X.dtype, X.device):
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; it must be {X.dtype} on {X.device} as X is")


def _triangle(n: int, tile: int) -> int:
    """How many tiles the upper triangle of an n x n matrix has, the diagonal included."""
    side = -(-n // tile)
    return side * (side + 1) // 2


def _tiling(B: int, n: int, dtype: torch.dtype) -> dict[str, Any]:
    """Large tiles read less for each product, if there are enough of them for the 108 to 132 processors of a GPU.

    float32 is multiplied outside the tensor cores, where small tiles are enough.
    """
    if dtype.itemsize == 2 and B * _triangle(n, 128) >= 100:
        return {"TILE": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 3}
    return {"TILE": 64, "DEPTH": 128 // dtype.itemsize, "num_warps": 4, "num_stages": 4}
