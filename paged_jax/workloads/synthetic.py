"""Prompts made of random token ids, for workloads that give lengths and no text."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class VocabRange:
    """Token ids `low <= id < high` that synthetic prompts are drawn from."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"a vocabulary range needs 0 <= low < high, got {self}")


def random_token_ids(rng: np.random.Generator, count: int, vocab: VocabRange) -> list[int]:
    ids: list[int] = rng.integers(vocab.low, vocab.high, size=count).tolist()
    return ids
