"""The output head: projection, soft cap and cross entropy in one pass over chunks of tokens, plain or in FP8.

A chunk's logits are made once and give their gradient at once, in the forward pass: the backward pass only scales.
N tokens, n of them in a chunk, C model dim, V vocabulary; w_CV is the transpose of w_VC.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HEADS = ("auto", "fp8", "chunked", "plain")
# Tokens whose logits exist at once: 8192 are 0.8 GB of bf16 at a vocabulary of 50,304, for which an eager chunk makes
# five times as much in float32. Each further chunk costs a pass over the weight's gradient.
CHUNK, EAGER_CHUNK, ROOMY_CHUNK = 8192, 2048, 32_768
ROOMY = 60 * 2**30  # bytes of a GPU's memory from which on a large chunk is no matter
PLAIN_CHUNK = 32_768
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_LIMIT = torch.finfo(E4M3).max
WEIGHT_SCALE = 2**-9
GRADIENT_SCALE = 1 / 448  # of a loss summed over tokens, whose gradients by logits lie in [-1, 1]
FP8_MULTIPLE = 16  # elements: FP8 matrix units read rows of whole 16 bytes
FP8_CAPABILITY = (8, 9)
LARGEST_CAP = 70  # exp(70) times any vocabulary is a float32


# (kind, height, width): ("sigmoid", h, w) is h sigmoid(z / w), ("rsqrt", h, w) is h z / sqrt(z^2 + w^2).
Softcap = tuple[str, float, float]


def capped_logits(z: Tensor, softcap: Softcap) -> Tensor:
    """The logits z, bounded by the height of `softcap`."""
    kind, height, width = softcap
    if kind == "sigmoid":
        return height * torch.sigmoid(z / width)
    return height * z * (z.square() + width**2).rsqrt()


def _slope(capped: Tensor, softcap: Softcap) -> Tensor:
    """The derivative of `capped_logits` where it took the value `capped`."""
    kind, height, width = softcap
    if kind == "sigmoid":
        return capped * (height - capped) / (height * width)
    return height / width * (1 - (capped / height).square()).clamp(min=0) ** 1.5


def _summed(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _cross_entropy(z_nV: Tensor, targets_n: Tensor, cap: Softcap, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Loss of the capped logits, summed over tokens, and its gradient by z if asked for."""
    capped = capped_logits(z_nV.to(_summed(z_nV.dtype)), cap)
    e = capped.exp()  # no cap exceeds LARGEST_CAP, so nothing overflows and no pass has to find the largest logit
    total, target = e.sum(-1, keepdim=True), targets_n.unsqueeze(1)
    loss = (total.log() - capped.gather(1, target)).sum()
    if not gradient:
        return loss, None
    p = e.mul_(total.reciprocal())  # divisions would hold up a kernel that is made of exponentials already
    hit = torch.arange(p.size(1), device=p.device) == target
    return loss, torch.where(hit, p - 1, p).mul_(_slope(capped, cap))


def _quantize(x: Tensor, scale: float) -> Tensor:
    # The conversion alone does not saturate in every version of torch.
    return (x.float() / scale).clamp(-E4M3_LIMIT, E4M3_LIMIT).to(E4M3)


def _transpose(x: Tensor) -> Tensor:
    """x^T; in FP8 with whole rows in memory, filled up with zeros to what a matrix unit reads."""
    if x.dtype not in (E4M3, E5M2):
        return x.T
    return F.pad(x.T, (0, -x.size(0) % FP8_MULTIPLE)).contiguous()


def _product(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a b^T; of FP8 operands times `scale`, as `dtype`. Both have the summed dimension last, as FP8 needs them."""
    if a.dtype not in (E4M3, E5M2):
        return a @ b.T
    scale_a, scale_b = (torch.full((), s, dtype=torch.float32, device=a.device) for s in (scale, 1.0))
    return torch._scaled_mm(a, b.T, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)


def _operands(weight_VC: Tensor, dtype: torch.dtype, precision: str, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The weight as products with `dtype` take it and, for gradients, its transpose."""
    w_VC = _quantize(weight_VC, WEIGHT_SCALE) if precision == "fp8" else weight_VC.to(dtype)
    return w_VC, _transpose(w_VC) if gradient else None


def _x_scale(x_nC: Tensor) -> float:
    return x_nC.size(1) ** 0.5 / E4M3_LIMIT  # rows come from an RMS norm: no element exceeds sqrt(C)


def _losses(
    x_nC: Tensor, targets_n: Tensor, w_VC: Tensor, cap: Softcap, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss of a chunk and, as products take them, its tokens and the gradient by its logits."""
    fp8, x_scale = w_VC.dtype == E4M3, _x_scale(x_nC)
    a_nC = _quantize(x_nC, x_scale) if fp8 else x_nC
    z_nV = _product(a_nC, w_VC, x_scale * WEIGHT_SCALE, x_nC.dtype, fast=True)
    loss, dz_nV = _cross_entropy(z_nV, targets_n, cap, gradient)
    if dz_nV is not None:
        dz_nV = (dz_nV / GRADIENT_SCALE).to(E5M2) if fp8 else dz_nV.to(x_nC.dtype)
    return loss, a_nC, dz_nV


def _gradients(
    a_nC: Tensor, dz_nV: Tensor, w_CV: Tensor, dweight_CV: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dx of a chunk, and dweight of it and of the chunks before.

    A graph of its own: in one with the loss a pass over rows would write the transpose of dz too, by single elements.
    """
    # x^T dz and not its transpose: in FP8 the faster of the two where V is many times C (modded-nanogpt).
    dweight = _product(_transpose(a_nC), _transpose(dz_nV), _x_scale(a_nC) * GRADIENT_SCALE, _summed(dtype))
    dweight = dweight.to(_summed(dtype)) if dweight_CV is None else dweight_CV.add_(dweight)
    return _product(dz_nV, w_CV, GRADIENT_SCALE * WEIGHT_SCALE, dtype), dweight


def _as_weight(dweight_CV: Tensor, dtype: torch.dtype) -> Tensor:
    return dweight_CV.new_empty(dweight_CV.shape[::-1], dtype=dtype).copy_(dweight_CV.T)


@functools.cache
def _compiled(function: Callable) -> Callable:
    compiled = torch.compile(function, dynamic=False, fullgraph=True)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

    def run(*args: object) -> Any:
        # A surrounding graph's first run excludes this key, later ones do not: two compilations for one.
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return compiled(*args)

    return run


def _chunk_size(device: torch.device, compiled: bool) -> int:
    if not compiled:
        return EAGER_CHUNK
    roomy = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > ROOMY
    return ROOMY_CHUNK if roomy else CHUNK


@torch.no_grad()
def loss_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor,
    cap: str, height: float, width: float, chunk: int, precision: str, compiled: bool, gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What the operator does; on the meta device, what memory it takes."""
    stages: tuple[Callable, ...] = (_operands, _losses, _gradients, _as_weight)
    operands, losses, gradients_of, as_weight = map(_compiled, stages) if compiled else stages
    chunk = chunk or _chunk_size(x.device, compiled)
    w_VC, w_CV = operands(weight, x.dtype, precision, gradients)
    loss, dx, dweight_CV = x.new_zeros((), dtype=_summed(x.dtype)), [], None
    for x_nC, targets_n in zip(x.split(chunk), targets.split(chunk), strict=True):
        loss_n, a_nC, dz_nV = losses(x_nC, targets_n, w_VC, (cap, height, width), gradients)
        loss += loss_n
        if gradients:
            dx_nC, dweight_CV = gradients_of(a_nC, dz_nV, w_CV, dweight_CV, x.dtype)
            dx.append(dx_nC)
        del dz_nV  # before the next chunk makes its own
    if not gradients:
        return loss, x.new_empty(0), weight.new_empty(0)
    return loss, torch.cat(dx), as_weight(dweight_CV, weight.dtype)


_linear_cross_entropy = torch.library.custom_op(
    "speedrun::linear_cross_entropy", loss_and_gradients, mutates_args=())


@_linear_cross_entropy.register_fake
def _(x, weight, targets, cap, height, width, chunk, precision, compiled, gradients):
    dx, dweight = (y.new_empty(y.shape if gradients else 0) for y in (x, weight))
    return x.new_empty((), dtype=_summed(x.dtype)), dx, dweight


def _save(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # of dx and dweight, which nobody differentiates
    ctx.save_for_backward(*output[1:])


def _differentiate(ctx, grad, *_):
    dx, dweight = ctx.saved_tensors
    return grad * dx, grad * dweight, *[None] * 8


_linear_cross_entropy.register_autograd(_differentiate, setup_context=_save)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, softcap: Softcap, chunk: int = 0, precision: str = "plain"
) -> Tensor:
    """Cross entropy of the capped x weight^T, summed over tokens: () float32, or float64 where x is.

    x: (N, C); for FP8 bf16 and from an RMS norm. weight: (V, C), read as x's dtype. targets: (N,) int64 below V.
    precision: "plain", or "fp8" (modded-nanogpt's head) where `fp8_obstacle` finds none. softcap: (kind, height, width).
    """
    if not 0 < softcap[1] <= LARGEST_CAP:
        raise ValueError(f"softcap {softcap}: its height must be above 0 and at most {LARGEST_CAP}.")
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    compiled = torch.compiler.is_compiling()
    if x.is_meta:  # where only memory matters, and nobody sees what the operator makes inside
        loss_and_gradients(x, weight, targets, *softcap, chunk, precision, compiled, gradients)
    return _linear_cross_entropy(x, weight, targets, *softcap, chunk, precision, compiled, gradients)[0]


def plain_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, softcap: Softcap) -> Tensor:
    """The same by autograd, which keeps all logits; with a bias (V,), if there is one."""
    parts = zip(x.split(PLAIN_CHUNK), targets.split(PLAIN_CHUNK), strict=True)
    losses = [F.cross_entropy(capped_logits(F.linear(h, weight, bias).float(), softcap), t, reduction="sum") for h, t in parts]
    return torch.stack(losses).sum()


def fp8_obstacle(device: torch.device, dtype: torch.dtype, channels: int, vocabulary: int) -> str | None:
    """What keeps the FP8 head from running here, or None."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return "it needs an NVIDIA GPU of compute capability 8.9 or newer"
    if dtype != torch.bfloat16:
        return f"it needs bf16, not {dtype}"
    if channels % FP8_MULTIPLE or vocabulary % FP8_MULTIPLE:
        return f"dim {channels} and padded vocabulary {vocabulary} must be multiples of {FP8_MULTIPLE}"
    return None


def choose_head(
    name: str, device: torch.device, dtype: torch.dtype, channels: int, vocabulary: int, bias: bool = False
) -> tuple[str, str]:
    """The head called `name` ("auto": FP8 where it runs, else chunked) and why it; ValueError if it cannot run here."""
    if name not in HEADS:
        raise ValueError(f"--head {name}: unknown head. Choose one of {', '.join(HEADS)}.")
    obstacle = "it has no bias" if bias else fp8_obstacle(device, dtype, channels, vocabulary)
    if obstacle and (name == "fp8" or (bias and name == "chunked")):
        raise ValueError(f"--head {name} cannot run here: {obstacle}. Use --head auto.")
    if name != "auto":
        return name, "as asked"
    if bias:
        return "plain", "the others have no bias"
    return ("chunked", f"fp8 would be faster but {obstacle}") if obstacle else ("fp8", "the fastest here")
