"""Text from a model, token by token. V vocabulary, T tokens so far."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


def generate(
    logits: Callable[[Tensor], Tensor], tokens: Sequence[int], count: int, *, bos: int,
    context: int, temperature: float = 1.0, top_k: int = 0, least: int = 0, seed: int = 0,
) -> Iterator[int]:  # fmt: skip
    """Yield up to `count` tokens after `tokens`; bos ends the text and is not yielded.

    logits: takes the last tokens of a document (T,) int64, at most `context` of them, and returns
    those of the next token, (V,). Nothing is cached: each token costs a pass over its context.
    temperature 0: always the likeliest token. top_k: sample from the k likeliest; 0: from all.
    least: tokens before the text may end. No other random state is read or changed.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(tokens)
    for index in range(count):
        logits_V = logits(torch.tensor(text[-context:]))
        if index < least:
            logits_V[bos] = -torch.inf
        token = pick(logits_V, temperature, top_k, generator)
        if token == bos:
            return
        text.append(token)
        yield token


def pick(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw one token, on the CPU: a seed then gives the same text on every device, to rounding."""
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V.cpu().double() / temperature  # Apple's GPUs have no float64
    if 0 < top_k < len(logits_V):
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    return int(torch.multinomial(logits_V.softmax(0), 1, generator=generator))
