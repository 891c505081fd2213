"""Causal attention within documents and a sliding window: one interface, several backends.

B rows, T tokens a row, H heads, D head dim. Query t of a row sees the keys s of that row with
max(start of t's document, t - window) <= s <= t. The caller scales the queries. A backend has

    name                                    one of ATTENTIONS, without "auto"
    window(tokens)                          a 0-d CPU tensor: one compiled graph takes every window
    documents(cu_seqlens, rows, sequence, longest)   for the call; made once a forward pass
    (q, k, v, documents, window)            attention, (B, T, H, D) like q, k and v

cu_seqlens: int32 positions of document boundaries in the flat stream of rows. They include 0 and
the end of each row, and may repeat. longest: an int, at least the tokens of the longest document.
Make documents outside compiled code, so that one graph takes any length.
"""

import torch

from kernels.flash_attention import KERNELS, FlashAttention, why_not_flash
from kernels.portable_attention import PortableAttention

Attention = FlashAttention | PortableAttention
ATTENTIONS = ("auto", *KERNELS, "portable")


def choose_attention(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int = 128
) -> tuple[Attention, str]:
    """The backend `name` ("auto": the fastest that runs here), and why it was chosen.

    ValueError if the named backend cannot run here.
    """
    if name == "portable":
        return PortableAttention(), "as asked"
    if name != "auto":
        if obstacle := why_not_flash(name, device, dtype, head_dim):
            fix = "Use --attention portable or auto."
            raise ValueError(f"--attention {name} cannot run here: {obstacle}. {fix}")
        return FlashAttention(name), "as asked"
    capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    passed: list[str] = []
    for candidate, (_, known, _) in KERNELS.items():
        obstacle = why_not_flash(candidate, device, dtype, head_dim)
        if obstacle is None:
            return FlashAttention(candidate), "; ".join(passed) or "the fastest here"
        if capability in known or candidate == "varlen":
            passed.append(f"{candidate} may be faster but {obstacle}")
    return PortableAttention(), "; ".join(passed)
