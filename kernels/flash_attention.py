"""Fused attention on NVIDIA GPUs over documents end to end in one flat stream, by one of three kernels.

N tokens of all rows, H heads, D head dim. Documents may be empty, as those are that fill up the list of boundaries.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl

Grads = tuple[Tensor, Tensor, Tensor]


class Kernel(NamedTuple):
    """`reach` is cu_seqlens, window (tokens, None: without limit) and longest: of queries and of keys alike."""

    forward: Callable[..., tuple[Tensor, Tensor]]  # q, k, v, *reach -> out and log-sum-exp (H, N) in fp32
    backward: Callable[..., Grads]  # grad, q, k, v, out, lse, *reach -> dq, dk, dv
    load: Callable[[], Any]  # raises or returns nothing where it is not installed
    install: str
    capabilities: range  # major compute capabilities of GPUs that have both


def _aten_reach(cu_seqlens: Tensor, window: int | None, longest: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = {"scale": 1.0, "window_size_left": -1 if window is None else window, "window_size_right": 0}
    return (cu_seqlens, cu_seqlens, longest, longest, 0.0, window is None), options


def _aten_forward(q: Tensor, k: Tensor, v: Tensor, *reach: Any) -> tuple[Tensor, Tensor]:
    args, options = _aten_reach(*reach)
    return torch.ops.aten._flash_attention_forward(q, k, v, *args, False, **options)[:2]


def _aten_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *reach: Any) -> Grads:
    args, options = _aten_reach(*reach)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)  # random state of a dropout of 0
    return torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *args, *unused, **options)


def _cute() -> Any:
    from flash_attn.cute import interface

    return interface


def _hopper() -> Any:
    import flash_attn_interface  # noqa: F401  # which registers its operators

    return torch.ops.flash_attn_3.bwd


def _cute_reach(cu_seqlens: Tensor, window: int | None, longest: int) -> dict[str, Any]:
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"softmax_scale": 1.0, "causal": True, "window_size_left": window, **lengths}


def _cute_forward(q: Tensor, k: Tensor, v: Tensor, *reach: Any) -> tuple[Tensor, Tensor]:
    return _cute()._flash_attn_fwd(q, k, v, return_lse=True, **_cute_reach(*reach))[:2]


def _cute_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *reach: Any) -> Grads:
    return _cute()._flash_attn_bwd(q, k, v, out, grad, lse, **_cute_reach(*reach))


KERNELS = {
    "flash4": Kernel(
        _cute_forward, _cute_backward, _cute,
        "pip install flash-attn-4 (its compiler, a download of 95 MB, works in the first steps)", range(9, 13),
    ),
    "flash3": Kernel(
        _aten_forward, _aten_backward, _hopper,
        "build FlashAttention 3, the folder hopper of github.com/Dao-AILab/flash-attention", range(9, 10),
    ),
    "varlen": Kernel(
        _aten_forward, _aten_backward, torch.backends.cuda.is_flash_attention_available,
        "--attention flex does without", range(8, 100),
    ),
}  # fmt: skip


def why_not_flash(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What keeps this kernel from running here and how to get it, or None; imports it to see."""
    kernel = KERNELS[name]
    if device.type != "cuda" or torch.version.hip:
        return "it needs an NVIDIA GPU with CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 or fp16, not {dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"it takes head dims that are multiples of 8 up to 256, not {head_dim}"
    capability = torch.cuda.get_device_capability(device)[0]
    if capability not in kernel.capabilities:
        return f"it has no kernel for compute capability {capability}.x (the oldest: {kernel.capabilities[0]}.0)"
    try:
        missing = "" if kernel.load() else "this build of torch was made without it"
    except Exception as error:  # whatever a package that is missing, incomplete or broken raises
        missing = str(error)
    return f"{missing}; {kernel.install}" if missing else None


def _reach(cu_seqlens: Tensor, window: Tensor, longest: int) -> tuple[Tensor, int | None, int]:
    return cu_seqlens, int(window) if int(window) < longest else None, longest


@torch.library.custom_op("speedrun::flash_attention", mutates_args=())
def _flash_attention(
    q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, cu_seqlens: Tensor, window: Tensor, longest: int, kernel: str
) -> tuple[Tensor, Tensor]:
    out, lse = KERNELS[kernel].forward(q_NHD, k_NHD, v_NHD, *_reach(cu_seqlens, window, longest))
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("speedrun::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
    grad_NHD: Tensor, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, out_NHD: Tensor, lse_HN: Tensor,
    cu_seqlens: Tensor, window: Tensor, longest: int, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = grad_NHD.contiguous(), q_NHD, k_NHD, v_NHD, out_NHD, lse_HN
    dq, dk, dv = KERNELS[kernel].backward(*tensors, *_reach(cu_seqlens, window, longest))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_flash_attention.register_fake
def _(q, k, v, cu_seqlens, window, longest, kernel):
    return q.new_empty(q.shape), q.new_empty((q.size(1), q.size(0)), dtype=torch.float32)


@_flash_attention_backward.register_fake
def _(grad, q, k, v, out, lse, cu_seqlens, window, longest, kernel):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output):
    *tensors, ctx.longest, ctx.kernel = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _differentiate(ctx, grad, _):
    return *_flash_attention_backward(grad, *ctx.saved_tensors, ctx.longest, ctx.kernel), None, None, None, None


_flash_attention.register_autograd(_differentiate, setup_context=_save)


class FlashAttention:
    """One of KERNELS: CUDA, bf16 or fp16. "flash3" takes the place of torch's own kernel in the whole process."""

    window = staticmethod(torch.tensor)

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "flash3":
            activate_flash_attention_impl("FA3")

    def documents(self, cu_seqlens: Tensor, rows: int, sequence: int) -> Tensor:
        return cu_seqlens

    def __call__(
        self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, documents: Tensor, window: Tensor, longest: int
    ) -> Tensor:
        q_NHD, k_NHD, v_NHD = (x.flatten(0, 1) for x in (q_BTHD, k_BTHD, v_BTHD))
        return _flash_attention(q_NHD, k_NHD, v_NHD, documents, window, longest, self.name)[0].view(q_BTHD.shape)
