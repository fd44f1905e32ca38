"""Constraints to test with."""

import numpy as np


class TokensOf:
    """Allows, as the i-th output token, the tokens of `allowed[i % len(allowed)]`.

    It checks what it is asked: outputs continue those of the call before.
    """

    def __init__(self, *allowed: set[int]):
        self.allowed = allowed
        self.seen: list[int] = []

    def restrict(self, output_token_ids, allowed) -> None:
        assert allowed.dtype == np.uint32
        assert list(output_token_ids)[: len(self.seen)] == self.seen
        self.seen = list(output_token_ids)
        for at, token in enumerate(self.seen):
            assert token in self.allowed[at % len(self.allowed)], "a token that was left out"
        keep = np.zeros_like(allowed)
        for token in self.allowed[len(self.seen) % len(self.allowed)]:
            keep[token // 32] |= np.uint32(1 << token % 32)
        allowed &= keep

    def branch(self) -> "TokensOf":
        other = TokensOf(*self.allowed)
        other.seen = self.seen.copy()
        return other


class EvenTokens(TokensOf):
    """Allows tokens of even number below 250."""

    def __init__(self) -> None:
        super().__init__({*range(0, 250, 2)})


class Raising:
    """Raises after some tokens."""

    def __init__(self, after: int):
        self.after = after

    def restrict(self, output_token_ids, allowed) -> None:
        if len(output_token_ids) >= self.after:
            raise RuntimeError("the grammar is broken")

    def branch(self) -> "Raising":
        return self
