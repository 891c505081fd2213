"""Vocabularies: the table of prefixes against a search through all tokens, and damaged files."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizers import PROSE, prefix_table, read_prefixes, read_tokenizer, token_bytes


def slow_table(vocabulary):
    table = []
    for token in vocabulary:
        found = [other for other in vocabulary if other and token.startswith(other)]
        shorter = [other for other in found if other != token]
        table.append(vocabulary.index(max(shorter, key=len)) if shorter else -1)
    return table


small_vocabularies = st.lists(st.binary(max_size=5).map(lambda b: bytes(c % 3 for c in b)),
                              unique=True)  # fmt: skip


@given(small_vocabularies)
def test_the_prefix_is_the_longest_of_a_search_through_all_tokens(vocabulary):
    assert prefix_table(vocabulary) == slow_table(vocabulary)


def of(size):
    """The settings of a run that matter here."""
    return SimpleNamespace(vocab_size=size, bos=size - 1)


def test_the_bytes_of_the_prose_vocabulary_encode_to_their_token_and_have_prefixes():
    tokenizer = read_tokenizer(PROSE)
    vocabulary = token_bytes(tokenizer)
    assert vocabulary.pop() == b"", "<|endoftext|>"
    ranks = [tokenizer.encode_single_token(token) for token in vocabulary]
    assert ranks == [*range(2047)]
    table = read_prefixes(of(2048))
    assert table == [*slow_table(vocabulary), -1]
    assert [token for token in range(2047) if table[token] == -1] == [*range(256)]


@pytest.mark.parametrize("content", [b"", b"not a token\n", b"YQ== 0\n"])
def test_a_vocabulary_that_is_damaged_or_lacks_a_byte_is_refused_with_the_fix(content, tmp_path):
    file = tmp_path / "mine.tiktoken"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"mine\.tiktoken.*restore the file"):
        read_tokenizer(file)
