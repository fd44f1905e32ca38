"""The constraint of a request, from its sampling parameters."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paged_jax.constraints.grammar import GrammarCompiler
from paged_jax.constraints.interface import TokenConstraint
from paged_jax.constraints.tokens import AllowedTokens, BadWords, spell_words
from paged_jax.sampling_params import SamplingParams


class Constraints:
    """Makes constraints for one model; what they have in common is made once, when it is needed.

    tokenizer: a fast tokenizer of transformers.
    eos_token_ids: tokens that end every sequence which does not set `ignore_eos`.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._grammars = GrammarCompiler(tokenizer, vocab_size)

    def of(self, params: SamplingParams) -> TokenConstraint | None:
        """The constraint that the parameters ask for; ValueError for one that cannot be."""
        size = self._vocab_size
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        ends = eos | frozenset(params.stop_token_ids)
        parts: list[TokenConstraint] = []
        if params.allowed_token_ids is not None:
            parts.append(AllowedTokens(params.allowed_token_ids, size))
        if params.bad_words:
            parts.append(BadWords(spell_words(params.bad_words, self._tokenizer, size)))
        if params.structured_outputs is not None:
            if not ends:
                why = "ignore_eos is set" if params.ignore_eos else "the model has no EOS"
                raise ValueError(
                    f"structured_outputs needs a token that ends the text, and {why}; give one in "
                    "stop_token_ids"
                )
            parts.append(self._grammars.constraint(params.structured_outputs, ends, eos))
        return AllOf(parts) if len(parts) > 1 else next(iter(parts), None)


class AllOf:
    """Constraints that hold together."""

    def __init__(self, parts: Sequence[TokenConstraint]):
        self._parts = parts

    def restrict(self, output_token_ids: Sequence[int], allowed: np.ndarray) -> None:
        for part in self._parts:
            part.restrict(output_token_ids, allowed)

    def branch(self) -> "AllOf":
        return AllOf([part.branch() for part in self._parts])
