"""Causal attention inside documents and a sliding window of recent tokens: one interface, a backend per machine.

Query t of a row sees keys s with  max(start of t's document, t - window) <= s <= t. The caller scales the queries.
A backend has a `name` and

    window(tokens)                           a 0-d CPU tensor: an input of a compiled graph, which then serves them all
    documents(cu_seqlens, rows, sequence)    once a forward pass, what the call wants of the boundaries of documents in
                                             the flat stream of rows: int32, ends of rows included, repetitions allowed
    (q, k, v, documents, window, longest)    (B, T, H, D) each and the result; longest: tokens of a document, an int
"""

from collections.abc import Callable
from functools import partial

import torch

from kernels.flash_attention import KERNELS, FlashAttention, why_not_flash
from kernels.flex_attention import FlexAttention, why_not_flex
from kernels.portable_attention import PortableAttention

Attention = FlashAttention | FlexAttention | PortableAttention
BACKENDS: dict[str, Callable[[], Attention]] = {name: partial(FlashAttention, name) for name in KERNELS}
BACKENDS |= {"flex": FlexAttention, "portable": PortableAttention}
ATTENTIONS = ("auto", *BACKENDS)

# What `auto` prefers to "varlen", best first, by the GPU's major compute capability. No GPU has confirmed the order.
FASTER = {9: ("flash3", "flash4"), 10: ("flash4",)}


def why_not(name: str, device: torch.device, dtype: torch.dtype, head_dim: int = 128) -> str | None:
    """What keeps a backend from running here and what to install, or None."""
    if name in KERNELS:
        return why_not_flash(name, device, dtype, head_dim)
    return why_not_flex(device) if name == "flex" else None


def choose_attention(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int = 128
) -> tuple[Attention, str]:
    """The backend called `name` ("auto": the fastest that runs) and why it; ValueError if it cannot run here."""
    if name != "auto":
        if obstacle := why_not(name, device, dtype, head_dim):
            raise ValueError(f"--attention {name} cannot run here: {obstacle}. Use --attention portable or auto.")
        return BACKENDS[name](), "as asked"
    capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    passed: list[str] = []
    for candidate in (*FASTER.get(capability, ()), "varlen", "portable"):
        obstacle = why_not(candidate, device, dtype, head_dim)
        if obstacle is None:
            break
        passed.append(f"{candidate} may be faster but {obstacle}")
    return BACKENDS[candidate](), "; ".join(passed) or "the fastest here"
