"""Sets of tokens as bits, and the constraints that need no grammar."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

WORD = 32  # tokens in a word of bits


def bits_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """The tokens as `TokenConstraint.restrict` has them, without those beyond the vocabulary."""
    tokens = np.array([token for token in token_ids if token < vocab_size], np.int64)
    bits = np.zeros(-(-vocab_size // WORD), np.uint32)
    np.bitwise_or.at(bits, tokens // WORD, np.uint32(1) << (tokens % WORD).astype(np.uint32))
    return bits


class AllowedTokens:
    """Only these tokens, whatever came before."""

    def __init__(self, token_ids: Iterable[int], vocab_size: int):
        self._bits = bits_of(token_ids, vocab_size)

    def restrict(self, output_token_ids: Sequence[int], allowed: np.ndarray) -> None:
        allowed &= self._bits

    def branch(self) -> Self:
        return self


class BadWords:
    """Leaves out the last token of a word where the word's other tokens end the output."""

    def __init__(self, words: Iterable[Sequence[int]]):
        """words: the tokens of each word, at least one."""
        self._words = [(list(tokens[:-1]), tokens[-1]) for tokens in words]

    def restrict(self, output_token_ids: Sequence[int], allowed: np.ndarray) -> None:
        longest = max(len(beginning) for beginning, _ in self._words)
        recent = list(output_token_ids[max(len(output_token_ids) - longest, 0) :])
        for beginning, last in self._words:
            if recent[len(recent) - len(beginning) :] == beginning:
                allowed[last // WORD] &= ~np.uint32(1 << last % WORD)

    def branch(self) -> Self:
        return self


def spell_words(words: Iterable[str], tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """The tokens of each word, at the beginning of a text and after a space, as vLLM has them.

    The spelling after a space counts if it begins with another token and has as many: otherwise the
    space is a token of its own, and the word after it is spelt as at the beginning. ValueError for
    a word that the model cannot spell.
    """
    spelt: list[list[int]] = []
    for word in words:
        if word != word.encode(errors="replace").decode():  # a lone surrogate
            raise ValueError(f"bad_words: {word!r:.80} is not valid Unicode")
        stem = word.lstrip() or word
        first, spaced = (
            tokenizer.encode(text, add_special_tokens=False) for text in (stem, f" {stem}")
        )
        if not first or max(first) >= vocab_size:
            raise ValueError(f"bad_words: the model has no tokens for {word!r:.80}")
        spelt.append(first)
        if len(spaced) == len(first) and spaced[0] != first[0] and max(spaced) < vocab_size:
            spelt.append(spaced)
    return spelt
