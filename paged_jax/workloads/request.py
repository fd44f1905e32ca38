"""What a workload yields: one request, before any engine has seen it."""

from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A prompt, how many tokens to generate for it, and when it arrives.

    `prompt_token_ids` is what the model is given. `prompt` is the text it was made from, for a
    human to read; None where the tokens are synthetic.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int  # output tokens
    ignore_eos: bool = True  # generate max_tokens whatever the model says
    arrival_s: float = 0.0  # seconds after the start of the run
    prompt: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(f"a request needs at least one prompt token, {self.prompt=}")
        if self.max_tokens < 1:
            raise ValueError(f"a request needs at least one output token, got {self.max_tokens}")

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request of a trace that holds no text."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int


def traced_requests(
    rows: Sequence[TracedRequest], *, vocab: VocabRange, seed: int, ignore_eos: bool = True
) -> Iterator[WorkloadRequest]:
    """Requests of the traced lengths and times, with random prompts."""
    for index, row in enumerate(rows):
        # A generator for each request: its prompt does not depend on which others are read.
        rng = np.random.default_rng([seed, index])
        prompt = tuple(random_token_ids(rng, row.num_prompt_tokens, vocab))
        yield WorkloadRequest(prompt, row.num_output_tokens, ignore_eos, row.arrival_s)
