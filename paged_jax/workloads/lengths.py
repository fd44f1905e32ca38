"""Synthetic lengths: log-normal with published means, or uniform; prompts of random tokens."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paged_jax.workloads.numbers import MAX_TOKENS
from paged_jax.workloads.request import VocabRange, WorkloadRequest, random_token_ids


@dataclass(frozen=True)
class LogNormal:
    """Token counts exp(N(mu, sigma)) rounded, at least 1, with mu such that `mean` is the mean."""

    mean: float
    sigma: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= MAX_TOKENS:
            raise ValueError(f"the mean length must lie in 1..{MAX_TOKENS}, got {self.mean}")
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise ValueError(f"sigma must be a finite number of at least 0, got {self.sigma}")

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        mu = math.log(self.mean) - self.sigma**2 / 2
        lengths = np.rint(rng.lognormal(mu, self.sigma, size=count))
        if lengths.max(initial=0) > MAX_TOKENS:
            raise ValueError(f"{self} drew {lengths.max():.3g} tokens; lower its sigma")
        counts: list[int] = np.maximum(lengths, 1).astype(np.int64).tolist()
        return counts


@dataclass(frozen=True)
class Uniform:
    """Token counts drawn evenly from `low <= n <= high`."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= MAX_TOKENS:
            raise ValueError(f"uniform lengths need 1 <= low <= high <= {MAX_TOKENS}, got {self}")

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        counts: list[int] = rng.integers(self.low, self.high + 1, size=count).tolist()
        return counts


Distribution = LogNormal | Uniform


@dataclass(frozen=True)
class Lengths:
    """The lengths of prompts and outputs."""

    prompt: Distribution
    output: Distribution


# Means: Kwon et al. 2023, section 6.1. The paper gives no spread. ShareGPT's sigmas give the
# coefficients of variation of the first exchanges in ShareGPT V3 (prompt and reply together at
# most 2048 tokens of SmolLM2's tokenizer); Alpaca's are assumed.
PUBLISHED_LENGTHS = {
    "sharegpt": Lengths(LogNormal(161.31, 1.2), LogNormal(337.99, 0.6)),
    "alpaca": Lengths(LogNormal(19.31, 0.5), LogNormal(58.45, 0.9)),
}

# The paper served no request of more than 2048 tokens, and its means are of the requests it served:
# these lengths have the same means once longer requests are dropped. The spread of the outputs is
# read from the paper's results. The token states and reservations of its Figure 2, over the batch
# sizes of Figure 13, say that a running request has 757, 717 and 732 tokens in the end (Orca Max,
# Pow2 and Oracle). This is more than the mean, as long outputs run longer, and takes outputs that
# vary this much. Prompts vary as in ShareGPT V3.
SERVED_LENGTHS = {"sharegpt_served": Lengths(LogNormal(179.5, 1.2), LogNormal(355.2, 0.825))}

NAMED_LENGTHS = PUBLISHED_LENGTHS | SERVED_LENGTHS


def length_requests(
    lengths: Lengths, count: int, *, vocab: VocabRange, seed: int, ignore_eos: bool = True
) -> Iterator[WorkloadRequest]:
    """`count` requests of random lengths and random prompts."""
    prompt_rng, output_rng, token_rng = np.random.default_rng(seed).spawn(3)
    prompts = lengths.prompt.draw(prompt_rng, count)
    outputs = lengths.output.draw(output_rng, count)
    for num_prompt_tokens, num_output_tokens in zip(prompts, outputs, strict=True):
        prompt = tuple(random_token_ids(token_rng, num_prompt_tokens, vocab))
        yield WorkloadRequest(prompt, num_output_tokens, ignore_eos)
