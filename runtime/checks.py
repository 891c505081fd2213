"""Checks on a model and its state.

After warm-up: it sees no future, and state was restored bit for bit. After the last validation,
with trained weights: its losses are those of probabilities, and depend on no later token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Inputs and targets, integers (B, T), to the loss of each target in nats, (B, T), or to their sum.
# Targets may be fewer than inputs; they are then those of each row's end.
Losses = Callable[[Tensor, Tensor], Tensor]
AT_ONCE = 1024  # rows


@torch.no_grad()
def check_trained(
    losses: Losses, summed: Losses, inputs: Tensor, targets: Tensor, vocab_size: int, bos: int
) -> dict[str, float]:
    """Three checks of a model on validation rows; an honest model has 1, 0 and 0.

    normalized: the sum over the vocabulary of exp(-loss) of one next token. causality_trained: the
    largest change of losses in the first half of the rows by other inputs in the second. additive:
    how much the sum over the rows differs from that of their first halves and of each other target.
    vocab_size: tokens that have a score, those that pad the vocabulary among them.
    """
    each, half = losses(inputs, targets), targets.size(1) // 2
    cut = inputs.size(1) - targets.size(1) + half
    changes = []
    for changed in other_futures(inputs, cut, vocab_size, bos):
        changes.append((losses(changed, targets) - each)[:, :half].abs().max())
    parts = summed(inputs[:, :cut], targets[:, :half]) + each[:, half:].sum()
    return {
        "normalized": probability(losses, inputs[:1, :8], vocab_size),
        "causality_trained": torch.stack(changes).max().item(),
        "additive": (parts / summed(inputs, targets) - 1).abs().item(),
    }


def other_futures(inputs: Tensor, cut: int, vocab_size: int, bos: int) -> tuple[Tensor, Tensor]:
    """The rows with other tokens from `cut` on: one document to the end, and one from `cut` on.

    Where a document ends gives away the future, too.
    """
    other = (inputs[:, cut:] + 1) % vocab_size
    other[other == bos] = (bos + 1) % vocab_size
    same = torch.cat([inputs[:, :cut], other], dim=1)
    new = same.clone()
    new[:, cut] = bos
    return same, new


def probability(losses: Losses, row: Tensor, vocab_size: int) -> float:
    """The sum over the vocabulary of exp(-loss) of the token in the middle of a row (1, T).

    It is an input too, which exposes a model that reads one token ahead.
    """
    total, middle = 0.0, row.size(1) // 2
    for tokens in torch.arange(vocab_size).split(AT_ONCE):
        rows = row.repeat(len(tokens), 1)
        rows[:, middle] = tokens.to(rows)
        loss = losses(rows[:, :-1], rows[:, 1:].long())[:, middle - 1]
        total += (-loss.cpu().double()).exp().sum().item()
    return total


@torch.no_grad()
def check_trained_model(trainer: Any) -> dict[str, Any]:
    """Check the trained model, for the log. Collective.

    trainer: that of train_gpt.py. Each rank checks two rows that it validates, or none if it has
    none. The worst values count.
    """
    config, model = trainer.config, trainer.model
    model.set_step(config.steps)

    def summed(inputs: Tensor, targets: Tensor) -> Tensor:  # not compiled: that would cost more
        return model(inputs, targets, *model.eval_context(inputs))

    found = []
    for batch in trainer.data.validation[:1]:
        inputs, targets, _ = batch.to(trainer.machine.device)
        tokens = (config.padded_vocab, config.bos)
        found.append(check_trained(model.token_losses, summed, inputs[:2], targets[:2], *tokens))
    everywhere = [checks for each in trainer.machine.gather(found) for checks in each]
    worst = {}
    for name in everywhere[0]:
        worst[name] = farthest([checks[name] for checks in everywhere], name)
    return {
        "targets_scored": trainer.targets_scored, "train_tokens_sha256": trainer.trained_rows(),
        "checks": worst,
    }  # fmt: skip


def farthest(values: list[float], name: str) -> float:
    """The value of a check that is farthest from that of an honest model."""
    honest = 1.0 if name == "normalized" else 0.0
    return max(values, key=lambda value: abs(value - honest))


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values or nested dicts of values are equal, tensors in every bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return bool(a == b)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    # Compare bytes: NaN then equals itself, and -0 differs from 0.
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
