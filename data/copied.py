"""Loss on copied and on new tokens: how much of its score a model owes to copying."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from data.loader import Batch

# A pair counts as a copy within this many tokens: the shortest window of the last validation on
# `tiny`, 160 tokens, and one block of 16. Logs compare only at the same value.
COPY_REACH = 176
MOST_TOKENS = 16_384  # of validation: enough for two decimals, in a second


def copied_and_new_loss(
    token_losses: Callable[[Tensor, Tensor], Tensor], validation: Iterable[Batch], bos: int
) -> dict[str, float]:
    """Mean losses in nats of the first MOST_TOKENS validation tokens; NaN where there are none.

    copy_loss: of tokens that repeat a pair of their document; new_loss: of the others.
    token_losses: takes inputs and targets and returns the loss of each target, (B, T).
    """
    losses, copied = [torch.zeros(0)], [torch.zeros(0, dtype=torch.bool)]
    for batch in validation:
        length = batch.inputs.size(1)
        context = length - batch.targets.size(1)  # inputs at a row's start without a target
        rows = max(MOST_TOKENS // length, 1)  # no more memory than a step takes
        inputs = batch.inputs[:rows, :MOST_TOKENS]
        targets = batch.targets[:rows, : MOST_TOKENS - context]
        tokens = torch.cat([inputs, targets[:, -1:]], dim=1)
        copied.append(is_copied(tokens, bos)[:, -targets.size(1) :].flatten())
        losses.append(token_losses(inputs, targets).cpu().flatten())
        if sum(map(len, losses)) >= MOST_TOKENS:
            break
    loss, copy = torch.cat(losses), torch.cat(copied)
    return {"copy_loss": loss[copy].mean().item(), "new_loss": loss[~copy].mean().item()}


def is_copied(tokens_BT: Tensor, bos: int) -> Tensor:
    """True for pairs of neighbours that occurred in the same document before, (B, T - 1) bool.

    tokens_BT: integers; bos begins a document. Not farther back than COPY_REACH tokens.
    """
    before, after = tokens_BT[:, :-1], tokens_BT[:, 1:]
    pairs = torch.stack([(before == bos).cumsum(1), before, after])  # each with its document
    copied = torch.zeros_like(before, dtype=torch.bool)
    for back in range(1, min(COPY_REACH, before.size(1) - 1) + 1):
        copied[:, back:] |= (pairs[..., back:] == pairs[..., :-back]).all(0)
    return copied
