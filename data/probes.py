"""Tokens that show whether a model copies from its context, as in arXiv:2209.11895."""

import torch
from torch import Tensor

COPY_REACH = 176  # tokens back in which a pair of tokens must have stood before
REPEATED = 64  # tokens of a random text that is read twice


def is_copied(tokens_BT: Tensor, bos: int) -> Tensor:
    """True for pairs of neighbours that stood in the same document before, (B, T - 1) bool.

    tokens_BT: integers; bos begins a document. Not further back than COPY_REACH tokens.
    """
    before, after = tokens_BT[:, :-1], tokens_BT[:, 1:]
    document = (before == bos).cumsum(1)
    copied = torch.zeros_like(before, dtype=torch.bool)
    for back in range(1, min(COPY_REACH, before.size(1) - 1) + 1):
        same = document[:, back:] == document[:, :-back]
        for part in (before, after):
            same &= part[:, back:] == part[:, :-back]
        copied[:, back:] |= same
    return copied


def repeated_tokens(rows: int, vocab_size: int, bos: int) -> Tensor:
    """Rows of bos and REPEATED random tokens twice, always the same: (rows, 1 + 2 * REPEATED)."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(vocab_size - 1, (rows, REPEATED), generator=generator)
    random += random >= bos
    return torch.cat([torch.full((rows, 1), bos), random, random], dim=1)
