"""Probes of a trained model: does it copy from its context? (Olsson et al., arXiv:2209.11895)"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from data.loader import Batch

COPY_REACH = 176  # tokens back in which a pair of tokens must have stood before
REPEATED, REPEATED_ROWS = 64, 16  # tokens of a random text that is read twice, and texts
MOST_TOKENS = 16_384  # of validation: enough for two decimals, in a second


def probe_copying(
    token_losses: Callable[[Batch], Tensor], validation: Iterable[Batch], vocab_size: int, bos: int
) -> dict[str, float]:
    """Mean losses in nats. `token_losses` returns that of each target of a batch, (B, T).

    copy_loss and new_loss: of validation tokens that repeat a pair of their document, and of the
    others. induction: of the second reading of random tokens, less that of the first.
    """
    losses, copied = [torch.zeros(0)], [torch.zeros(0, dtype=torch.bool)]
    for batch in validation:
        if sum(map(len, losses)) < MOST_TOKENS:
            found = token_losses(batch).cpu()
            tokens = torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1)
            losses.append(found.flatten())
            copied.append(is_copied(tokens, bos)[:, -found.size(1) :].flatten())
    loss, copy = torch.cat(losses), torch.cat(copied)
    first, second = token_losses(repeated_text(vocab_size, bos)).split(REPEATED, dim=1)
    return {
        "copy_loss": loss[copy].mean().item(),
        "new_loss": loss[~copy].mean().item(),
        "induction": (second.mean() - first.mean()).item(),
    }


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


def repeated_text(vocab_size: int, bos: int) -> Batch:
    """Rows of bos and REPEATED random tokens twice, always the same, each row a document."""
    shape = (REPEATED_ROWS, REPEATED)
    random = torch.randint(vocab_size - 1, shape, generator=torch.Generator().manual_seed(0))
    random += random >= bos
    text = torch.cat([torch.full((REPEATED_ROWS, 1), bos), random, random], dim=1)
    rows = torch.arange(REPEATED_ROWS + 1, dtype=torch.int32) * 2 * REPEATED
    return Batch(text[:, :-1].int(), text[:, 1:], rows)
