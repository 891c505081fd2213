"""The known vocabularies by their size: those of the two corpora, and GPT-2's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiktoken

from data import corpus, prose

# By the size of the vocabulary: its file, or its name for tiktoken.
TOKENIZERS: dict[int, Path | str] = {
    1024: corpus.VOCABULARY, 2048: prose.VOCABULARY, 50257: "gpt2",
}  # fmt: skip


def read_tokenizer(tokenizer: Path | str) -> tiktoken.Encoding:
    """Return the tokenizer of a file, or of tiktoken, which downloads GPT-2's vocabulary once.

    ValueError if it cannot be read.
    """
    try:
        if isinstance(tokenizer, Path):
            return corpus.read_vocabulary(tokenizer)
        return tiktoken.get_encoding(tokenizer)
    except OSError as error:
        raise ValueError(f"tiktoken cannot read its vocabulary: {error}. Connect to the network "
                         f"once, or set TIKTOKEN_CACHE_DIR.") from error  # fmt: skip


def require_tokenizer(config: Any) -> None:
    """ValueError before a run if it could not decode, at its end, what its model writes."""
    if config.sample_tokens and config.vocab_size in TOKENIZERS:
        read_tokenizer(TOKENIZERS[config.vocab_size])


def token_bytes(tokenizer: tiktoken.Encoding) -> list[bytes]:
    """Return the bytes of each token, by its id. <|endoftext|> has none."""
    vocabulary = [tokenizer.decode_single_token_bytes(token) for token in range(tokenizer.n_vocab)]
    vocabulary[tokenizer.eot_token] = b""
    return vocabulary


def read_prefixes(vocab_size: int) -> list[int]:
    """Return the `prefix_table` of the vocabulary of this size. ValueError if none is known."""
    if vocab_size not in TOKENIZERS:
        sizes = ", ".join(map(str, TOKENIZERS))
        raise ValueError(f"no vocabulary of {vocab_size} tokens is known. Set --vocab-size to one "
                         f"of {sizes}, or do without prefixes.")  # fmt: skip
    return prefix_table(token_bytes(read_tokenizer(TOKENIZERS[vocab_size])))


def prefix_table(vocabulary: Sequence[bytes]) -> list[int]:
    """Return for each token the id of the longest other token that begins it, or -1 (record 88).

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
