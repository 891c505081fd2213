"""RMS norm and relu^2 by few passes over memory, for eager code on a CPU.

There every intermediate of torch's own backward passes is a trip through memory; a compiler would
fuse them. Each function computes what the plain expression beside it does, and uses that
expression on GPUs and in compiled code.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def eager_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def rms_norm(x: Tensor) -> Tensor:
    """x / RMS(x) over the last dimension, in the dtype of x. torch's backward takes twice as long.

    The forward pass is torch's own, bit for bit. The backward pass multiplies in the dtype of x.
    """
    return _RMSNorm.apply(x) if eager_on_cpu(x) else F.rms_norm(x, (x.size(-1),))


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, as in Primer (arXiv:2109.08668)."""
    return _SquaredReLU.apply(x) if eager_on_cpu(x) else x.relu().square()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, inverse_rms = torch.ops.aten._fused_rms_norm(x, [x.size(-1)], None, None)
        ctx.save_for_backward(y, inverse_rms.to(x.dtype))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        y, inverse_rms = ctx.saved_tensors
        along = (dy * y).mean(-1, keepdim=True)
        return torch.addcmul(dy, y, along, value=-1).mul_(inverse_rms)


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        r = x.relu()
        ctx.save_for_backward(r)
        return r * r

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (r,) = ctx.saved_tensors
        return (r * dy).mul_(2)
