"""Requests of which many begin alike, as those of applications with prompts of their own do."""

import numpy as np

from paged_jax.workloads import PUBLISHED_LENGTHS, LogNormal, VocabRange, WorkloadRequest
from paged_jax.workloads.synthetic import random_token_ids

SHARED_PREFIXES = "shared_prefixes"  # as the name of a workload
NUM_PREFIXES = 16
# The paper's few-shot prefixes (section 6.4) have 80 and 341 tokens.
PREFIX_TOKENS = LogNormal(200.0, 0.6)


def shared_prefix_requests(count: int, *, vocab: VocabRange, seed: int) -> list[WorkloadRequest]:
    """Each begins with one of `NUM_PREFIXES` prefixes, the popular ones more often (Zipf).

    What follows it has Alpaca's lengths, and so have the outputs. Those of n requests begin those
    of n + 1.
    """
    streams = np.random.default_rng([seed, 0x707265]).spawn(5)
    prefix_rng, choice_rng, prompt_rng, output_rng, token_rng = streams
    prefixes = [
        tuple(random_token_ids(prefix_rng, size, vocab))
        for size in PREFIX_TOKENS.draw(prefix_rng, NUM_PREFIXES)
    ]
    weights = 1 / np.arange(1, 1 + NUM_PREFIXES)
    lengths = PUBLISHED_LENGTHS["alpaca"]
    return [
        WorkloadRequest(prefixes[number] + tuple(random_token_ids(token_rng, size, vocab)), output)
        for number, size, output in zip(
            choice_rng.choice(NUM_PREFIXES, size=count, p=weights / weights.sum()),
            lengths.prompt.draw(prompt_rng, count),
            lengths.output.draw(output_rng, count),
            strict=True,
        )
    ]
