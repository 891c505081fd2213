"""The optimizers again, one matrix at a time in float64, as in a textbook: the tests' oracle.

A step function takes a weight, its gradient and a state dict, empty before the first step, and
returns the new weight.
"""

import torch
from torch import Tensor

from optim.orthogonalize import METHODS


def iterate(G: Tensor, method: str) -> Tensor:
    """What `orthogonalized` approximates for one matrix (rows, cols), without rounding."""
    steps = METHODS[method]
    X = G.double()
    if X.norm() == 0:
        return X
    X = X / X.abs().max()
    X = X / (X.norm() * steps.safety + steps.eps)
    for a, b, c in steps.coefficients:
        X = a * X + b * (X @ X.T @ X) + c * (X @ X.T @ X @ X.T @ X)
    return X


def muon_step(
    weight: Tensor, grad: Tensor, state: dict[str, Tensor], *, lr: float, momentum: float = 0.95,
    nesterov: bool = True, weight_decay: float = 0.0, scale: str = "spectral", split: int = 1,
    method: str = "polar_express", lr_mul: float = 1.0, wd_mul: float = 1.0,
    beta2: float | None = None, cautious: bool = False,
) -> Tensor:  # fmt: skip
    """One step of Muon or, with beta2, of NorMuon, for one weight (rows, cols)."""
    weight, grad = weight.double(), grad.double()
    rows, cols = weight.shape

    buffer = momentum * state.get("momentum", torch.zeros_like(grad)) + (1 - momentum) * grad
    state["momentum"] = buffer
    update = momentum * buffer + (1 - momentum) * grad if nesterov else buffer

    if cols >= rows:
        blocks = update.reshape(split, rows, cols // split)
    else:
        blocks = update.reshape(split, rows // split, cols)
    directions = []
    for index, block in enumerate(blocks):
        direction = iterate(block, method)
        if beta2 is not None:
            dim = -1 if rows >= cols else 0
            direction = normalize_variance(direction, state, f"variance {index}", beta2, dim)
        directions.append(direction)
    direction = torch.stack(directions).reshape(rows, cols)

    scales = {"spectral": max(1, rows / cols) ** 0.5, "rms": 0.2 * max(rows, cols) ** 0.5}
    step = lr * lr_mul * scales[scale] * direction
    return descend(weight, step, lr * weight_decay * wd_mul, cautious)


def descend(weight: Tensor, step: Tensor, decay: float, cautious: bool) -> Tensor:
    """Decay, if cautious only where it has the sign of the step, and take the step."""
    decayed = weight * (1 - decay)
    if cautious:
        decayed = torch.where(weight * step > 0, decayed, weight)
    return decayed - step


def normalize_variance(
    direction: Tensor, state: dict[str, Tensor], key: str, beta2: float, dim: int
) -> Tensor:
    """Divide by the running RMS along `dim`, then restore the Frobenius norm."""
    mean_square = direction.square().mean(dim=dim, keepdim=True)
    state[key] = beta2 * state.get(key, torch.zeros_like(mean_square)) + (1 - beta2) * mean_square
    scaled = direction / state[key].clamp(min=1e-10).sqrt()
    return scaled * (direction.norm() / scaled.norm().clamp(min=1e-10))


def row_adam_step(
    weight: Tensor, grad: Tensor, state: dict[str, Tensor], *, lr: float, beta2: float = 0.95,
    eps: float = 1e-10, weight_decay: float = 0.0, lr_mul: float = 1.0, wd_mul: float = 1.0,
    cautious: bool = False,
) -> Tensor:  # fmt: skip
    """One step of RowAdam for a table (rows, width), row by row."""
    t = int(state.get("step", torch.tensor(0))) + 1
    v = beta2 * state.get("row_avg_sq", torch.zeros(len(grad), dtype=torch.float64))
    new = weight.double().clone()
    for row, each in enumerate(grad.double()):
        v[row] += (1 - beta2) * each.square().mean()
        if each.any():
            step = lr * lr_mul * (1 - beta2**t) ** 0.5 * each / (v[row].sqrt() + eps)
            new[row] = descend(new[row], step, lr * weight_decay * wd_mul, cautious)
    state.update(step=torch.tensor(t), row_avg_sq=v)
    return new


def adam_step(
    weight: Tensor, grad: Tensor, state: dict[str, Tensor], *, lr: float,
    betas: tuple[float, float], eps: float = 1e-8, weight_decay: float = 0.0, lr_mul: float = 1.0,
    wd_mul: float = 1.0, cautious: bool = False,
) -> Tensor:  # fmt: skip
    """One step of Adam with decoupled decay, for a weight of any shape."""
    weight, grad = weight.double(), grad.double()
    beta1, beta2 = betas
    t = int(state.get("step", torch.tensor(0))) + 1
    m = beta1 * state.get("exp_avg", torch.zeros_like(grad)) + (1 - beta1) * grad
    v = beta2 * state.get("exp_avg_sq", torch.zeros_like(grad)) + (1 - beta2) * grad**2
    state.update(step=torch.tensor(t), exp_avg=m, exp_avg_sq=v)
    rate = lr * lr_mul * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
    return descend(weight, rate * m / (v.sqrt() + eps), lr * weight_decay * wd_mul, cautious)
