"""Lookups in tables; and what is looked up for a token: n-grams, signs of pairs, more targets."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

SPARSE = ("cpu", "cuda")  # devices on which torch adds a sparse gradient to a dense one
HASH = (36313, 27191, 51787, 44221)  # factors of a token, of the one before it, and so on


def lookup(index: Tensor, table: Tensor, sparse: bool = False) -> Tensor:
    """Return rows of the table (rows, C) for an index of any shape: (*index.shape, C).

    In eager code the gradient of the table is sparse: autograd adds the looked-up rows' gradients
    to table.grad in place. Else each call would fill a gradient of the whole table, and add that.
    sparse: table.grad is sparse too, for an optimizer that steps only its rows.
    """
    if torch.compiler.is_compiling() or table.device.type not in SPARSE:
        return F.embedding(index, table)
    found = F.embedding(index, table, sparse=True)
    if found.requires_grad and not sparse:
        found.register_hook(partial(_make_gradient, table))
    return found


def _make_gradient(table: Tensor, _: Tensor) -> None:
    """Make the gradient that autograd adds to. Without one, the sparse one would take its place."""
    if table.grad is None:
        table.grad = torch.zeros_like(table, dtype=table.grad_dtype)


def ngrams(tokens_BT: Tensor, rows: int, length: int) -> Tensor:
    """Return the row of the n-gram table for each token and the length - 1 before it, (B, T) int64.

    N-grams are hashed (pairs: record 62): some share a row. They cross the boundaries of documents,
    as the smear does. The first length - 1 tokens of each batch row get the table's last row.
    """
    tokens, T = tokens_BT.long(), tokens_BT.size(1)
    mixed = HASH[0] * tokens
    for back in range(1, length):
        mixed = mixed ^ (HASH[back] * F.pad(tokens, (back, 0))[:, :T])
    index_BT = mixed % (rows - 1)
    index_BT[:, : length - 1] = rows - 1
    return index_BT


def random_signs(dim: int) -> Tensor:
    """Return rows (8192, dim) of +1 and -1, on the CPU and always the same.

    Bigrams that share a row of the table differ by their signs (record 83).
    """
    generator = torch.Generator().manual_seed(0)
    return 2.0 * torch.randint(2, (8192, dim), generator=generator, device="cpu") - 1


def sign_rows(tokens_BT: Tensor, rows: int) -> Tensor:
    """Return the row of the signs for each token and the one before it, (B, T) int64."""
    tokens = tokens_BT.long()
    pairs = (tokens[:, 1:] ^ tokens[:, :-1]) % rows
    return torch.cat([torch.zeros_like(tokens[:, :1]), pairs], dim=1)


def several_targets(targets_BT: Tensor, count: int, prefixes_V: Tensor | None) -> Tensor:
    """Return `count` targets for each token, (B, T, count) int64; -1 where there is none.

    They are the next token and those after it in its row (record 53). With prefixes, (V,) int64,
    the last target is the next token's prefix (record 88).
    """
    ahead = count - 1 if prefixes_V is None else count - 2
    tokens = F.pad(targets_BT, (0, ahead), value=-1).unfold(1, ahead + 1, 1)
    if prefixes_V is None:
        return tokens
    return torch.cat([tokens, prefixes_V[targets_BT].unsqueeze(-1)], dim=-1)
