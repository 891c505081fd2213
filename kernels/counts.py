"""Counts of n-grams: which tokens followed the last ones in the text trained on so far, how often.

B rows of a text, T tokens of a row, n tokens of an n-gram, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FACTOR = 6_364_136_223_846_793_005  # Knuth's, of a linear congruential generator modulo 2^64


class NgramCounts(nn.Module):
    """Frequencies of the next token after the last 1, 2, ... longest - 1 tokens, in a text.

    It holds the text, and all n-grams of a length as sorted numbers: those of a context are
    neighbours there, so binary searches count them. Frequencies of all tokens add up to 1.
    """

    text: Tensor  # int32 (rows, T + 1): inputs, then the last target; -1 where nothing was read yet

    def __init__(self, longest: int, vocab_size: int, rows: int, seq_len: int):
        super().__init__()
        self.lengths, self.vocab_size = range(2, longest + 1), vocab_size
        # Contexts have the numbers below this power of two, n-grams those below 2^62.
        self.contexts = 2 ** (62 - (vocab_size - 1).bit_length())
        self.register_buffer("text", torch.empty((rows, seq_len + 1), dtype=torch.int32))
        self.register_load_state_dict_post_hook(lambda *_: self.forget_counts())
        self.forget()

    def forget(self) -> None:
        """Forget the text."""
        self.text.fill_(-1)
        self.forget_counts()

    def forget_counts(self) -> None:
        """Forget what was counted, but not the text."""
        self.counted = 0  # rows
        self.sorted = [self.text.new_empty(0, dtype=torch.int64) for _ in self.lengths]

    def count(self, rows: int) -> None:
        """Count the n-grams of the first rows of the text, if these are not what is counted."""
        if rows == self.counted:
            return
        text = self.text[:rows].long()
        unread, inputs, targets = text[:, :1] < 0, text[:, :-1], text[:, 1:]
        self.sorted = []
        for n in self.lengths:
            numbers = self.numbers(inputs, n - 1) * self.vocab_size + targets
            numbers = numbers.masked_fill(unread, 2**62)  # behind all n-grams
            self.sorted.append(numbers[:, n - 2 :].flatten().sort().values)
        self.counted = rows

    def numbers(self, tokens_BT: Tensor, n: int) -> Tensor:
        """A number for each token and the n - 1 before it, int64 (B, T).

        It means nothing where these would begin before the row. Among a million contexts of 2,048
        tokens, two have the same number by a chance of 1 in 4,000; then they count as one.
        """
        numbers_BT = torch.zeros_like(tokens_BT, dtype=torch.int64)
        for back in range(n):  # int64 wraps around
            numbers_BT = numbers_BT * FACTOR + F.pad(tokens_BT, (back, 0))[:, : tokens_BT.size(1)]
        return numbers_BT & (self.contexts - 1)

    def frequencies(self, inputs_BT: Tensor, tokens_BTK: Tensor) -> tuple[Tensor, Tensor]:
        """How often these tokens followed the inputs, for each length of n-grams.

        tokens_BTK: K candidates for what follows each of the last inputs. Returns their relative
        frequencies, float32 (B, T, K, lengths), and how often what they follow occurred, int64 (B,
        T, lengths). Both are 0 for n-grams that would begin before the row.
        """
        frequencies, totals = [], []
        for n, numbers in zip(self.lengths, self.sorted, strict=True):
            context_BT = self.numbers(inputs_BT, n - 1)
            context_BT[:, : n - 2] = -1  # it would begin before the row
            first_BT = context_BT[:, -tokens_BTK.size(1) :] * self.vocab_size
            ngram_BTK = first_BT.unsqueeze(-1) + tokens_BTK
            total = between(numbers, first_BT, first_BT + self.vocab_size)
            count = between(numbers, ngram_BTK, ngram_BTK + 1)
            frequencies.append(count / total.clamp(min=1).unsqueeze(-1))
            totals.append(total)
        return torch.stack(frequencies, -1), torch.stack(totals, -1)


def between(numbers: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """How many of the sorted numbers are first or larger, but smaller than end, for each of these.

    first and end have one shape; the result is int64 and has it too.
    """
    ends = torch.searchsorted(numbers, torch.stack([first, end]))
    return ends[1] - ends[0]
