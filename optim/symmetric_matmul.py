"""Symmetric products for half the work: compute one triangle of tiles and mirror it.

The idea comes from flash-muon and from the logs of public record runs. The Triton kernel runs on
CUDA devices; tests run it on a CPU in Triton's interpreter. The module can be imported without
Triton.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    import triton
    import triton.language as tl

    # Trap: use only builtins of the language. Triton's library functions are compiled or
    # interpreted by the value of TRITON_INTERPRET when Triton was imported, not this kernel.
    @triton.jit
    def _mirrored_tile(
        X, D, out, n, m, alpha, beta,
        x_batch, x_row, x_col, d_batch, d_row, d_col, out_batch, out_row, out_col,
        TILE: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        # The triangle has T tiles a side. Folded row i holds T + 1 tiles: the T - i of row i, then
        # the i + 1 of row T - 1 - i. So neighbouring programs share rows of X in the cache.
        T = (n + TILE - 1) // TILE
        tiles = T * (T + 1) // 2
        batch = (tl.program_id(0) // tiles).to(tl.int64)  # a batch may exceed 2^31 elements
        i = tl.program_id(0) % tiles // (T + 1)
        j = tl.program_id(0) % tiles % (T + 1)
        row_tile = tl.where(j < T - i, i, T - 1 - i)
        col_tile = tl.where(j < T - i, i + j, j - 1)

        rows = (row_tile * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
        cols = (col_tile * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
        X += batch * x_batch
        left, right = X + rows * x_row, X + cols * x_row
        total = tl.full((TILE, TILE), 0.0, tl.float32)
        for start in range(0, m, DEPTH):
            k = (start + tl.arange(0, DEPTH)).to(tl.int64)
            x = tl.load(left + k[None, :] * x_col, mask=(rows < n) & (k[None, :] < m), other=0.0)
            y = tl.load(right + k[:, None] * x_col, mask=(cols < n) & (k[:, None] < m), other=0.0)
            total = tl.dot(x, y, total, input_precision="ieee")

        inside = (rows < n) & (cols < n)
        total *= alpha
        if D is not None:
            d = tl.load(D + batch * d_batch + rows * d_row + cols * d_col, mask=inside, other=0.0)
            total += beta * d.to(tl.float32)
        result = total.to(out.dtype.element_ty)
        if row_tile == col_tile:  # its two halves may be rounded differently
            result = tl.where(rows <= cols, result, tl.trans(result))
        out += batch * out_batch
        tl.store(out + rows * out_row + cols * out_col, result, mask=inside)
        tl.store(out + cols * out_row + rows * out_col, result, mask=inside)


@functools.cache
def obstacle(device: torch.device) -> str | None:
    """Why the kernel cannot run on `device`, with the fix; None if it can."""
    if not HAS_TRITON:
        return 'Triton is not installed: pip install "triton>=3.6"'
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return f"{device} is no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {major}.{minor} and 8.0 is needed"
    return None


def symmetric_product(
    X: Tensor, out: Tensor, *, D: Tensor | None = None, alpha: float = 1, beta: float = 0
) -> Tensor:
    """out = alpha X X^T + beta D, for a symmetric D.

    X (B, n, m); D, out (B, n, n); one of bf16, float16 and float32; any strides. `out` must not
    share memory. The upper triangle is summed in float32, rounded once and mirrored. Trap: nothing
    is checked here; `obstacle` says whether the kernel can run.
    """
    B, n, m = X.shape
    tiling = _tiling(B, n, X.dtype)
    with torch.cuda.device_of(X):
        _mirrored_tile[(B * _triangle(n, tiling["TILE"]),)](
            X, D, out, n, m, float(alpha), float(beta),
            *X.stride(), *(out if D is None else D).stride(), *out.stride(), **tiling,
        )  # fmt: skip
    return out


def _triangle(n: int, tile: int) -> int:
    """Number of tiles in the upper triangle of an n x n matrix, with the diagonal."""
    side = -(-n // tile)
    return side * (side + 1) // 2


def _tiling(B: int, n: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes: large tiles read less, but need enough of them to fill 108 to 132 processors.

    Small tiles are enough for float32, which does not use the tensor cores.
    """
    if dtype.itemsize == 2 and B * _triangle(n, 128) >= 100:
        return {"TILE": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 3}
    return {"TILE": 64, "DEPTH": 128 // dtype.itemsize, "num_warps": 4, "num_stages": 4}
