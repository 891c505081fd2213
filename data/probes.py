"""Probes of a trained model: does it copy from its context? (Olsson et al., arXiv:2209.11895)"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from data.loader import Batch

# A pair counts as a copy if it stood at most this many tokens earlier: the shortest window of the
# last validation on `tiny`, 160 tokens, and one block of 16. Logs compare only at the same value.
COPY_REACH = 176
REPEATED = 64  # tokens of a random text, which is read twice
REPEATED_ROWS = 16  # random texts
MOST_TOKENS = 16_384  # of validation: enough for two decimals, in a second


def probe_copying(
    token_losses: Callable[[Batch], Tensor], validation: Iterable[Batch], vocab_size: int, bos: int,
    positions: int = 2 * REPEATED,
) -> dict[str, float]:  # fmt: skip
    """Mean losses in nats. `token_losses` returns that of each target of a batch, (B, T).

    copy_loss and new_loss: of validation tokens that repeat a pair of their document, and of the
    others. induction: of the second reading of random tokens, less that of the first. positions:
    most tokens of a row that the model can read.
    """
    losses: list[Tensor] = []
    copied: list[Tensor] = []
    for batch in map(cut, validation):
        tokens = torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1)
        copied.append(is_copied(tokens, bos)[:, -batch.targets.size(1) :].flatten())
        losses.append(token_losses(batch).cpu().flatten())
        if sum(map(len, losses)) >= MOST_TOKENS:
            break
    # A rank may have no validation rows: then both means are NaN.
    loss = torch.cat(losses) if losses else torch.zeros(0)
    copy = torch.cat(copied) if copied else torch.zeros(0, dtype=torch.bool)
    count = min(REPEATED, positions // 2)
    first, second = token_losses(repeated_text(vocab_size, bos, count)).split(count, dim=1)
    return {
        "copy_loss": loss[copy].mean().item(),
        "new_loss": loss[~copy].mean().item(),
        "induction": (second.mean() - first.mean()).item(),
    }


def cut(batch: Batch) -> Batch:
    """Rows of at most MOST_TOKENS inputs, so that the probe needs no more memory than the run."""
    length = batch.inputs.size(1)
    context = length - batch.targets.size(1)  # inputs at a row's start without a target
    rows, length = max(MOST_TOKENS // length, 1), min(MOST_TOKENS, length)
    inputs, targets = batch.inputs[:rows, :length], batch.targets[:rows, : length - context]
    # Boundaries beyond the cut become its end: empty documents.
    return Batch(inputs, targets, batch.cu_seqlens.clamp(max=inputs.numel()))


def is_copied(tokens_BT: Tensor, bos: int) -> Tensor:
    """True for pairs of neighbours that stood in the same document before, (B, T - 1) bool.

    tokens_BT: integers; bos begins a document. Not farther back than COPY_REACH tokens.
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


def repeated_text(vocab_size: int, bos: int, count: int = REPEATED) -> Batch:
    """Rows of bos and `count` random tokens twice, always the same, each row a document."""
    shape = (REPEATED_ROWS, count)
    random = torch.randint(vocab_size - 1, shape, generator=torch.Generator().manual_seed(0))
    random += random >= bos
    text = torch.cat([torch.full((REPEATED_ROWS, 1), bos), random, random], dim=1)
    rows = torch.arange(REPEATED_ROWS + 1, dtype=torch.int32) * 2 * count
    return Batch(text[:, :-1].int(), text[:, 1:], rows)
