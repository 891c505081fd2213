"""For each token of a vocabulary, the longest other token that its bytes begin with.

Prefix token prediction (modded-nanogpt, record 88) also scores the prefix of each target.
"""

from collections.abc import Callable, Sequence
from functools import partial

import tiktoken

from data.corpus import read_vocabulary


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
    """Return the bytes of each token of the corpus' vocabulary or of GPT-2's, told by their size.

    tiktoken downloads GPT-2's once. ValueError for another size, or if the download fails.
    """
    tokenizers: dict[int, Callable[[], tiktoken.Encoding]] = {
        1024: read_vocabulary,
        50257: partial(tiktoken.get_encoding, "gpt2"),
    }
    if vocab_size not in tokenizers:
        raise ValueError(f"no vocabulary of {vocab_size} tokens is known. Set --vocab-size to 1024 "
                         f"(the corpus) or 50257 (GPT-2), or do without prefixes.")  # fmt: skip
    try:
        tokenizer = tokenizers[vocab_size]()
    except OSError as error:
        raise ValueError(f"tiktoken cannot read its vocabulary: {error}. Connect to the network "
                         f"once, or set TIKTOKEN_CACHE_DIR.") from error  # fmt: skip
    vocabulary = [tokenizer.decode_single_token_bytes(token) for token in range(vocab_size)]
    vocabulary[tokenizer.eot_token] = b""
    return vocabulary
