"""The output head: projection, soft cap and cross entropy over chunks of tokens, plain or in FP8.

The logits of a chunk are computed once. As in Liger Kernel (arXiv:2410.10989), the forward pass
also computes the gradients of x and weight, and the backward pass only scales them. FP8 formats and
scales are modded-nanogpt's. N tokens, n of a chunk, K targets a token, C model dim, V vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

HEADS = ("auto", "fp8", "chunked", "plain")
# Tokens of a chunk. 8192 tokens have 0.8 GB of bf16 logits at a vocabulary of 50,304. Eager code
# takes five times as much, in float32. Each chunk costs a pass over the weight's gradient.
CHUNK, EAGER_CHUNK, ROOMY_CHUNK, PLAIN_CHUNK = 8192, 2048, 32_768, 32_768
SCORING_CHUNK = 256  # eager code without gradients: the logits of `small` then fit a core's cache
ROOMY = 60 * 2**30  # bytes of GPU memory above which ROOMY_CHUNK is used
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_LIMIT = torch.finfo(E4M3).max
WEIGHT_SCALE = 2**-8  # up to 1.75; the 2**-9 of record 42 cuts weights at 0.875 (records 51, 55)
# A summed loss has gradients in [-1, 1] by its logits, times the sum of a token's weights. E5M2
# leaves room for a sum of 128.
GRADIENT_SCALE = 1 / 448
FP8_MULTIPLE = 16  # FP8 matrix units read rows of whole 16 bytes
FP8_CAPABILITY = (8, 9)
LOG2_E = math.log2(math.e)


class Softcap(NamedTuple):
    """A bound on logits z. With s = z + shift: "sigmoid" is height sigmoid(s / width), "rsqrt"
    height s / sqrt(s^2 + width^2). Heights above 70 overflow in exp. FP8 needs slopes of at most 1.
    """

    kind: str
    height: float
    width: float
    shift: float


def capped(z: Tensor, softcap: Softcap) -> Tensor:
    """The logits z after the soft cap."""
    kind, height, width, shift = softcap
    if shift:  # adding 0 costs eager code a pass, and can change how compiled code rounds
        z = z + shift
    if kind == "sigmoid":
        return height * torch.sigmoid(z / width)
    return height * z * (z.square() + width**2).rsqrt()


def _capped_by_exp2(z: Tensor, softcap: Softcap) -> Tensor:
    """`capped`, of a sigmoid by exp2 and reciprocal: GPUs have an instruction for each."""
    kind, height, width, shift = softcap
    if kind != "sigmoid":
        return capped(z, softcap)
    turn = -LOG2_E / width
    return height * (1 + (turn * z + turn * shift).exp2()).reciprocal()


def _slope(capped_z: Tensor, softcap: Softcap) -> Tensor:
    """The derivative of `capped` by z, computed from the capped value."""
    kind, height, width, _ = softcap
    if kind == "sigmoid":
        return capped_z * (1 / width - capped_z * (1 / (height * width)))
    return height / width * (1 - (capped_z / height).square()).clamp(min=0) ** 1.5


def _summed(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _cross_entropy(
    z_nV: Tensor, targets: Tensor, weights_K: Tensor | None, softcap: Softcap, gradient: bool,
    fp8: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The loss of a chunk, () or (2,), and its gradient by z, or None without `gradient`.

    fp8: the gradient is in E5M2 and divided by GRADIENT_SCALE. On GPUs arithmetic bounds this
    kernel, not memory. So it counts logits in bits, as e^y = 2^(y log2 e), divides nothing, and
    compares no token of the vocabulary with the targets.
    """
    in_bits = softcap._replace(height=LOG2_E * softcap.height)
    y_nV = _capped_by_exp2(z_nV.to(_summed(z_nV.dtype)), in_bits)
    e_nV = y_nV.exp2()  # the cap prevents overflow, so no pass has to find the largest logit
    total_n1 = e_nV.sum(-1, keepdim=True)
    targets_nK = targets.view(len(targets), -1)
    counted_nK, tokens_nK = targets_nK >= 0, targets_nK.clamp(min=0)  # -1 is no token
    y_nK = y_nV.gather(1, tokens_nK)
    loss_nK = counted_nK * (total_n1.log() - y_nK / LOG2_E)
    weights_nK = counted_nK.to(loss_nK.dtype)
    if weights_K is None:
        loss = loss_nK.sum()
    else:
        weights_nK = weights_nK * weights_K
        loss = torch.stack([(weights_nK * loss_nK).sum(), loss_nK[:, 0].sum()])
    if not gradient:
        return loss, None

    dtype, unit = (E5M2, GRADIENT_SCALE) if fp8 else (z_nV.dtype, 1.0)
    weights_nK = weights_nK / (LOG2_E * unit)
    # The gradient by y is a multiple of the softmax, less the weight of each target at its token.
    # Several targets may be one token: each place is given the sum of their weights.
    same_nKK = tokens_nK.unsqueeze(2) == targets_nK.unsqueeze(1)
    own_nK = (same_nKK * weights_nK.unsqueeze(1)).sum(-1)
    dy_nV = e_nV.mul_(weights_nK.sum(-1, keepdim=True) * total_n1.reciprocal())
    dz_nK = (dy_nV.gather(1, tokens_nK) - own_nK) * _slope(y_nK, in_bits)
    dz_nV = dy_nV.mul_(_slope(y_nV, in_bits)).to(dtype)
    dz_nV[torch.arange(len(z_nV), device=z_nV.device).unsqueeze(1), tokens_nK] = dz_nK.to(dtype)
    return loss, dz_nV


def _quantize(x: Tensor, scale: float) -> Tensor:
    # The clamp is needed: not every version of torch saturates in the conversion.
    return (x.float() / scale).clamp(-E4M3_LIMIT, E4M3_LIMIT).to(E4M3)


def _transpose(x: Tensor) -> Tensor:
    """x^T; in FP8 contiguous, with rows padded by zeros, as the matrix units require."""
    if x.dtype not in (E4M3, E5M2):
        return x.T
    return F.pad(x.T, (0, -x.size(0) % FP8_MULTIPLE)).contiguous()


def _product(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a b^T; for FP8 operands times `scale` and in `dtype`."""
    if a.dtype not in (E4M3, E5M2):
        return a @ b.T
    scale_a, one = (torch.full((), s, dtype=torch.float32, device=a.device) for s in (scale, 1.0))
    return torch._scaled_mm(a, b.T, scale_a, one, out_dtype=dtype, use_fast_accum=fast)


# The operator's three stages, each a compiled graph. If loss and gradients shared one, the compiler
# would write the transpose of dz element by element.
def _operands(
    weight_VC: Tensor, dtype: torch.dtype, precision: str, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The weight as an operand, (V, C), and with `gradient` its transpose, (C, V)."""
    w_VC = _quantize(weight_VC, WEIGHT_SCALE) if precision == "fp8" else weight_VC.to(dtype)
    return w_VC, _transpose(w_VC) if gradient else None


def _losses(
    x_nC: Tensor, targets: Tensor, weights_K: Tensor | None, w_VC: Tensor, x_scale: float,
    softcap: Softcap, gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Loss of a chunk, and as operands: its tokens, and the gradient by its logits or None."""
    fp8 = w_VC.dtype == E4M3
    a_nC = _quantize(x_nC, x_scale) if fp8 else x_nC
    z_nV = _product(a_nC, w_VC, x_scale * WEIGHT_SCALE, x_nC.dtype, fast=True)
    loss, dz_nV = _cross_entropy(z_nV, targets, weights_K, softcap, gradient, fp8)
    return loss, a_nC, dz_nV


def _gradients(
    a_nC: Tensor, dz_nV: Tensor, w_CV: Tensor, dw: Tensor | None, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dx of a chunk, and dweight^T summed over chunks so far. scale: the one of a."""
    # x^T dz, not dz^T x: faster in FP8 if V is many times C (modded-nanogpt).
    sums = _summed(dtype)
    dw_CV = _product(_transpose(a_nC), _transpose(dz_nV), scale * GRADIENT_SCALE, sums)
    dw = dw_CV.to(sums) if dw is None else dw.add_(dw_CV)
    return _product(dz_nV, w_CV, GRADIENT_SCALE * WEIGHT_SCALE, dtype), dw


compile_stage = functools.cache(functools.partial(torch.compile, dynamic=False, fullgraph=True))


def _chunk_size(device: torch.device, compiled: bool) -> int:
    if not compiled:
        return EAGER_CHUNK
    roomy = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > ROOMY
    return ROOMY_CHUNK if roomy else CHUNK


# torch's schemas of operators know no tuples, hence the parts of a Softcap one by one.
@torch.library.custom_op("speedrun::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None, kind: str, height: float,
    width: float, shift: float, chunk: int, precision: str, compiled: bool, gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss, dx and dweight^T in float32 or float64; both are empty without `gradients`."""
    stages: tuple[Callable, ...] = (_operands, _losses, _gradients)
    operands, losses, gradients_of = map(compile_stage, stages) if compiled else stages
    softcap = Softcap(kind, height, width, shift)
    chunk = chunk or _chunk_size(x.device, compiled)
    x_scale = x.size(1) ** 0.5 / E4M3_LIMIT  # after an RMS norm no element exceeds sqrt(C)
    loss = x.new_zeros(() if weights is None else 2, dtype=_summed(x.dtype))
    dx: list[Tensor] = []
    dw_CV: Any = None
    # Trap: the model's graph calls this with other dispatch keys in its first run than later.
    # Without the guard each stage would be compiled for both, which costs 0.6 s in the second step
    # (CPU, code in the cache) and uses up twice as many of the 8 graphs that torch allows.
    with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
        w_VC, w_CV = operands(weight, x.dtype, precision, gradients)
        for x_nC, part in zip(x.split(chunk), targets.split(chunk), strict=True):
            loss_n, a_nC, dz_nV = losses(x_nC, part, weights, w_VC, x_scale, softcap, gradients)
            loss += loss_n
            if gradients:
                dx_nC, dw_CV = gradients_of(a_nC, dz_nV, w_CV, dw_CV, x_scale, x.dtype)
                dx.append(dx_nC)
            del dz_nV  # before the next chunk makes its own
        if not gradients:
            return loss, x.new_empty(0), loss.new_empty(0)
        return loss, torch.cat(dx) if len(dx) > 1 else dx[0], dw_CV


@_linear_cross_entropy.register_fake
def _(x, weight, targets, weights, *options):
    *_, gradients = options
    loss = x.new_empty(() if weights is None else 2, dtype=_summed(x.dtype))
    shapes = (x.shape, weight.T.shape) if gradients else (0, 0)
    return loss, x.new_empty(shapes[0]), loss.new_empty(shapes[1])


def _save(ctx, inputs, output):
    ctx.weight_dtype = inputs[1].dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # none for dx and dweight, which have no gradients
    ctx.save_for_backward(*output[1:])
    ctx.others = len(inputs) - 2  # inputs without a gradient


def _differentiate(ctx, grad, *_):
    dx, dw_CV = ctx.saved_tensors
    grad = grad.flatten()[0]  # a second loss is only for the log
    dweight = (grad * dw_CV).to(ctx.weight_dtype).T.contiguous()  # one pass, if compiled
    return grad * dx, dweight, *[None] * ctx.others


_linear_cross_entropy.register_autograd(_differentiate, setup_context=_save)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None, *,
    softcap: Softcap, chunk: int = 0, precision: str = "plain",
) -> Tensor:  # fmt: skip
    """Cross entropy of capped(x weight^T), summed over tokens: () float32, or float64 if x is.

    x: (N, C); for FP8 it must be bf16 and come from an RMS norm. weight: (V, C), cast to x's dtype.
    targets: (N,) int64; or (N, K), -1 for no target, with weights (K,) float32. The loss is then
    (2,): the weighted sum over all targets, to train on, and the plain sum over column 0, which has
    no gradient, to log. weights gets no gradient. chunk: tokens; 0: chosen by memory. precision:
    "plain", or "fp8" if `fp8_obstacle` returns None.
    """
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    options = chunk, precision, torch.compiler.is_compiling(), gradients
    return _linear_cross_entropy(x, weight, targets, weights, *softcap, *options)[0]


def _weighted(logits_nV: Tensor, targets_nK: Tensor, weights_K: Tensor) -> Tensor:
    """The two losses of a chunk, (2,)."""
    log_p, targets = F.log_softmax(logits_nV, -1), targets_nK.unbind(1)
    losses = [F.nll_loss(log_p, each, ignore_index=-1, reduction="sum") for each in targets]
    return torch.stack([(torch.stack(losses) * weights_K.detach()).sum(), losses[0].detach()])


def plain_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, softcap: Softcap,
    reduction: str = "sum", weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same loss by autograd, which keeps all logits. bias: (V,) or None.

    reduction: "sum", or without weights "none": each token's loss, (N,) float32.
    """
    scoring = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    chunk = SCORING_CHUNK if scoring else PLAIN_CHUNK
    losses = []
    for part, target in zip(x.split(chunk), targets.split(chunk), strict=True):
        logits = capped(F.linear(part, weight, bias).float(), softcap)
        if weights is None:
            losses.append(F.cross_entropy(logits, target, reduction=reduction))
        else:
            losses.append(_weighted(logits, target, weights))
    return torch.stack(losses).sum(0) if reduction == "sum" else torch.cat(losses)


def fp8_obstacle(device: torch.device, dtype: torch.dtype, dim: int, vocab: int) -> str | None:
    """Why the FP8 head cannot run here; None if it can."""
    nvidia = device.type == "cuda" and not torch.version.hip
    if not nvidia or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return "it needs an NVIDIA GPU of compute capability 8.9 or newer"
    if dtype != torch.bfloat16:
        return f"it needs bf16, not {dtype}"
    if dim % FP8_MULTIPLE or vocab % FP8_MULTIPLE:
        return f"dim {dim} and padded vocabulary {vocab} must be multiples of 16"
    return None


def choose_head(
    name: str, device: torch.device, dtype: torch.dtype, dim: int, vocab: int, bias: bool = False
) -> tuple[str, str]:
    """The head `name` ("auto": FP8 if it runs here, else chunked), and why it was chosen.

    ValueError if the named head cannot run here. Only "plain" has a bias.
    """
    obstacle = "it has no bias" if bias else fp8_obstacle(device, dtype, dim, vocab)
    if name == "plain" or (name == "chunked" and not bias):
        return name, "as asked"
    if obstacle is None:
        return "fp8", ("as asked" if name == "fp8" else "the fastest here")
    if name == "auto":
        return ("plain" if bias else "chunked"), f"fp8 would be faster but {obstacle}"
    raise ValueError(f"--loss-kernel {name} cannot run here: {obstacle}. Use --loss-kernel auto.")
