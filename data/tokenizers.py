"""From text to tokens: the known vocabularies, the prose's in this folder and GPT-2's."""

import base64
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import tiktoken

from data.shards import Tokens

Fetched = TypeVar("Fetched")

FETCH_SECONDS = 60.0  # GPT-2's vocabulary has 1.5 MB
PROSE = Path(__file__).with_name("prose.tiktoken")
# By the size of the vocabulary: its file, or its name for tiktoken.
TOKENIZERS: dict[int, Path | str] = {2048: PROSE, 50257: "gpt2"}
# Runs of letters, of digits and of other characters, each with one leading space, and white space.
# The classes are ASCII alone, so that no version of the Unicode tables can move a boundary.
PATTERN = r" ?[A-Za-z]+| ?[0-9]+| ?[^A-Za-z0-9 \t\r\n]+|[ \t\r\n]+(?![^ \t\r\n])|[ \t\r\n]+"
# Where a document may end, best last: after a word, a sentence, a line, a paragraph.
BOUNDARIES = [re.compile(kind) for kind in (r" ", r"[.;:] ", r"\n", r"\n\n")]


def read_tokenizer(tokenizer: Path | str) -> tiktoken.Encoding:
    """Return the tokenizer of a file, or of tiktoken, which downloads GPT-2's vocabulary once.

    <|endoftext|> has the id after the last one of a file. ValueError if it cannot be read.
    """
    try:
        if not isinstance(tokenizer, Path):
            return within(FETCH_SECONDS, lambda: tiktoken.get_encoding(tokenizer))
        # tiktoken's own reader would keep a copy of the file in a cache.
        pairs = map(bytes.split, tokenizer.read_bytes().splitlines())
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as error:
        fix = ("restore the file; for GPT-2's, connect once, name a proxy in HTTPS_PROXY, or copy "
               "the folder TIKTOKEN_CACHE_DIR from a machine that has it")  # fmt: skip
        raise ValueError(f"cannot read the vocabulary {tokenizer}: {error}; {fix}.") from error
    if {bytes([n]) for n in range(256)} - {*ranks} or {*ranks.values()} != {*range(len(ranks))}:
        raise ValueError(f"{tokenizer} is no vocabulary of bytes: restore the file.")
    last = {"<|endoftext|>": len(ranks)}
    return tiktoken.Encoding("prose", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=last)


def within(seconds: float, function: Callable[[], Fetched]) -> Fetched:
    """Return `function()`, or raise TimeoutError: tiktoken sets its download no time limit."""
    done: Future[Fetched] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()  # it cannot be stopped, but it ends with the process
    try:
        return done.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None


def split_documents(text: str, limit: int) -> list[str]:
    """Cut a text into documents of at most `limit` characters; joined, they are the text.

    A document ends at the last boundary of the best kind in the second half of the limit.
    """
    documents, start = [], 0
    while len(text) - start > limit:
        cut = end = start + limit
        for boundary in BOUNDARIES:
            for match in boundary.finditer(text, start + limit // 2, end):
                cut = match.end()
        documents.append(text[start:cut])
        start = cut
    return [*documents, text[start:]]


def encode(document: str, tokenizer: tiktoken.Encoding) -> Tokens:
    """Return <|endoftext|> and the tokens of a document, (n,)."""
    return np.array([tokenizer.eot_token, *tokenizer.encode_ordinary(document)], dtype=np.uint16)


def tokenizer_of(config: Any) -> Any:
    """Return the path or name of a run's tokenizer; None: unknown, if with as many tokens."""
    return TOKENIZERS.get(config.vocab_size) if config.bos == config.vocab_size - 1 else None


def require_tokenizer(config: Any) -> None:
    """ValueError before a run if it could not decode, at its end, what its model writes."""
    if config.sample_tokens and (tokenizer := tokenizer_of(config)):
        read_tokenizer(tokenizer)


def token_bytes(tokenizer: tiktoken.Encoding) -> list[bytes]:
    """Return the bytes of each token, by its id. <|endoftext|> has none."""
    text = range(tokenizer.eot_token)  # the last token
    return [*map(tokenizer.decode_single_token_bytes, text), b""]


def read_prefixes(config: Any) -> list[int]:
    """Return the `prefix_table` of a run's vocabulary. ValueError if it is not known."""
    if not (tokenizer := tokenizer_of(config)):
        raise ValueError(f"no vocabulary of {config.vocab_size} tokens with --bos last is known: "
                         f"take one of {[*TOKENIZERS]}, or --prefixes off.")  # fmt: skip
    return prefix_table(token_bytes(read_tokenizer(tokenizer)))


def prefix_table(vocabulary: Sequence[bytes]) -> list[int]:
    """Return for each token the id of the longest other token that begins it, or -1 (record 88).

    A token's id is its place in `vocabulary`. A special token, b"", has no prefix and is none.
    """
    ids = {token: index for index, token in enumerate(vocabulary) if token}
    starts = [[token[:end] for end in range(len(token) - 1, 0, -1)] for token in vocabulary]
    return [next((ids[start] for start in each if start in ids), -1) for each in starts]
