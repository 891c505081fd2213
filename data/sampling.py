"""Text from a model, token by token. V vocabulary, T tokens so far."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


def generate(
    logits: Callable[[Tensor], Tensor], tokens: Sequence[int], count: int, *, bos: int,
    context: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, least: int = 0,
    seed: int = 0,
) -> Iterator[int]:  # fmt: skip
    """Yield up to `count` tokens after `tokens`; bos ends the text and is not yielded.

    logits: takes the last tokens of a document (T,) int64, at most `context` of them, and returns
    those of the next token, (V,). Nothing is cached: each token costs a pass over its context.
    temperature 0: always the likeliest token. top_k: sample from the k likeliest; 0: from all.
    top_p: from the fewest likeliest that have this share of the probability (arXiv:1904.09751).
    least: tokens before the text may end. No other random state is read or changed.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(tokens)
    for index in range(count):
        logits_V = logits(torch.tensor(text[-context:]))
        if index < least:
            logits_V[bos] = -torch.inf
        token = pick(logits_V, temperature, top_k, top_p, generator)
        if token == bos:
            return
        text.append(token)
        yield token


def pick(
    logits_V: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """Draw one token, on the CPU: a seed then gives the same text on every device, to rounding."""
    if temperature == 0:
        return int(logits_V.argmax())
    p_V = (logits_V.cpu().double() / temperature).softmax(0)  # Apple's GPUs have no float64
    sorted_V, order_V = p_V.sort(descending=True)
    sorted_V[top_k or len(p_V) :] = 0
    before_V = sorted_V.cumsum(0) - sorted_V  # share of the likelier ones
    sorted_V[before_V >= top_p * sorted_V.sum()] = 0
    p_V[order_V] = sorted_V
    return int(torch.multinomial(p_V, 1, generator=generator))
