"""For each token of a vocabulary, the longest other token that its bytes begin with.

Prefix token prediction (modded-nanogpt, record 88) also scores the prefix of each target.
"""

from collections.abc import Sequence

from data.tokenizers import TOKENIZERS, read_tokenizer, token_bytes


def prefix_table(vocabulary: Sequence[bytes]) -> list[int]:
    """Return for each token the id of its longest proper prefix among the tokens, or -1.

    A token's id is its place in `vocabulary`. Special tokens are b"": they have no prefix and are
    no prefix.
    """
    ids = {token: index for index, token in enumerate(vocabulary)}
    table = []
    for token in vocabulary:
        start = token[:-1]
        while start and start not in ids:
            start = start[:-1]
        table.append(ids[start] if start else -1)
    return table


def read_bytes(vocab_size: int) -> list[bytes]:
    """Return the bytes of each token of the known vocabulary of this size.

    ValueError for another size, or if tiktoken cannot download GPT-2's.
    """
    if vocab_size not in TOKENIZERS:
        raise ValueError(f"no vocabulary of {vocab_size} tokens is known. Set --vocab-size to one "
                         f"of {', '.join(map(str, TOKENIZERS))}, or do without prefixes.")
    return token_bytes(read_tokenizer(TOKENIZERS[vocab_size]))
