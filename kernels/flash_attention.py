"""FlashAttention on NVIDIA GPUs: torch's operator with one of three kernels behind it.

The kernels take all rows as one flat stream of documents. N tokens in all rows, B rows of T
tokens, H heads, D head dim. Sources: FlashAttention-2 (arXiv:2307.08691), which is part of torch;
FlashAttention-3 (arXiv:2407.08608) and -4 from github.com/Dao-AILab/flash-attention.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as registry

# Name in torch's registry (None: the kernel built into torch), major compute capabilities that have
# forward and backward passes, and how to install it. Best first, as their authors say; no GPU has
# confirmed it here.
KERNELS: dict[str, tuple[str | None, range, str]] = {
    "flash3": ("FA3", range(9, 10),
               "build FlashAttention 3, folder hopper of github.com/Dao-AILab/flash-attention"),
    "flash4": ("FA4", range(9, 11),
               "pip install flash-attn-4 (95 MB; it compiles its kernels in the first steps)"),
    "varlen": (None, range(8, 100), "install torch from pytorch.org"),
}  # fmt: skip


def activate(impl: str | None) -> None:
    """Make torch's operator use this kernel in the whole process. A package may raise anything."""
    if registry.current_flash_attention_impl() != impl:
        if impl is None:
            registry.restore_flash_attention_impl()
        else:
            registry.activate_flash_attention_impl(impl)
    if impl is None and not torch.backends.cuda.is_flash_attention_available():
        raise RuntimeError("this build of torch was made without it")


def why_not_flash(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this kernel cannot run here, with the fix; None if it can. Activates it to find out."""
    impl, known, install = KERNELS[name]
    if device.type != "cuda" or torch.version.hip:
        return "it needs an NVIDIA GPU with CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 or fp16, not {dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"it takes head dims that are multiples of 8 up to 256, not {head_dim}"
    capability = torch.cuda.get_device_capability(device)[0]
    if capability not in known:
        return f"it runs on compute capability {known[0]}.x to {known[-1]}.x, not {capability}.x"
    if name == "flash4" and torch.torch_version.TorchVersion(torch.__version__) < "2.13":
        return "it needs torch 2.13 or newer"  # at first, torch's FA4 had no backward with windows
    try:
        activate(impl)
    except Exception as error:  # a missing, incomplete or broken package may raise anything
        return f"{error}; {install}"
    return None


def _reach(cu_seqlens: Tensor, window: Tensor, longest: Tensor) -> tuple[tuple, dict[str, Any]]:
    """Arguments of torch's operators for documents, window and causality."""
    reach, most = int(window), int(longest)
    causal = reach >= most  # with a window, window_size_right hides the future
    left = -1 if causal else reach  # -1: no document is longer than the window
    options = {"scale": 1.0, "window_size_left": left, "window_size_right": 0}
    return (cu_seqlens, cu_seqlens, most, most, 0.0, causal), options  # 0.0: dropout


# An operator of our own hides window and longest, 0-d CPU tensors, from the compiler, which would
# compile a graph for each value of an int.
@torch.library.custom_op("speedrun::flash_attention", mutates_args=())
def _flash_attention(
    q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, cu_seqlens: Tensor, window: Tensor, longest: Tensor
) -> tuple[Tensor, Tensor]:
    """The output (N, H, D) and the log-sum-exp of the scores (H, N), float32."""
    args, options = _reach(cu_seqlens, window, longest)
    forward = torch.ops.aten._flash_attention_forward
    out, lse = forward(q_NHD, k_NHD, v_NHD, *args, False, **options)[:2]
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("speedrun::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
    dout_NHD: Tensor, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, out_NHD: Tensor, lse_HN: Tensor,
    cu_seqlens: Tensor, window: Tensor, longest: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    args, options = _reach(cu_seqlens, window, longest)
    tensors = dout_NHD.contiguous(), q_NHD, k_NHD, v_NHD, out_NHD, lse_HN
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_NHD.device), q_NHD.new_empty(0)
    backward = torch.ops.aten._flash_attention_backward
    dq, dk, dv = backward(*tensors, *args, *no_dropout, **options)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_flash_attention.register_fake
def _(q, k, v, cu_seqlens, window, longest):
    return q.new_empty(q.shape), q.new_empty((q.size(1), q.size(0)), dtype=torch.float32)


@_flash_attention_backward.register_fake
def _(dout, q, k, v, out, lse, cu_seqlens, window, longest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, *documents = inputs
    ctx.save_for_backward(q, k, v, *output, *documents)


def _differentiate(ctx, dout, _):
    return *_flash_attention_backward(dout, *ctx.saved_tensors), None, None, None


_flash_attention.register_autograd(_differentiate, setup_context=_save)


class FlashAttention:
    """The backend `name` of KERNELS. Trap: the last one made sets the kernel for the process."""

    window = staticmethod(torch.tensor)

    def __init__(self, name: str) -> None:
        self.name = name
        activate(KERNELS[name][0])

    def documents(
        self, cu_seqlens: Tensor, rows: int, sequence: int, longest: int
    ) -> tuple[Tensor, Tensor]:
        return cu_seqlens, torch.tensor(longest)

    def __call__(
        self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, documents: tuple[Tensor, Tensor],
        window: Tensor,
    ) -> Tensor:  # fmt: skip
        q_NHD, k_NHD, v_NHD = (x.flatten(0, 1) for x in (q_BTHD, k_BTHD, v_BTHD))
        cu_seqlens, longest = documents
        out, _ = _flash_attention(q_NHD, k_NHD, v_NHD, cu_seqlens, window, longest)
        return out.view(q_BTHD.shape)
