"""What sharing saves, measured on any engine, real or simulated."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from paged_jax.engine.core import EngineCore
from paged_jax.executor.interface import Executor
from paged_jax.memory.usage import MemoryUsage
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.workloads import WorkloadRequest, find_packaged_sharegpt, read_sharegpt


def simulate(
    requests: Sequence[WorkloadRequest],
    params: SamplingParams,
    scheduler: Scheduler,
    executor: Executor,
) -> list[MemoryUsage]:
    """Serve requests that are all there at the start; returns the memory's use in each iteration.

    As in the paper, requests share nothing with each other: leave the prefix cache off.
    """
    usages: list[MemoryUsage] = []
    core = EngineCore(scheduler, executor, on_iteration=lambda stats: usages.append(stats.usage))
    for index, request in enumerate(requests):
        own = replace(params, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
        scheduler.add(Request(str(index), request.prompt_token_ids, own, 0.0, seed=index))
    while scheduler.has_work:
        core.report(core.step())
    return usages


def with_sharegpt_text(
    requests: Sequence[WorkloadRequest],
    encode: Callable[[str], Sequence[int]],
    *,
    trace: str | Path | None,
    seed: int,
) -> list[WorkloadRequest]:
    """The requests, each with the beginning of a ShareGPT conversation of its own as its prompt.

    trace: a ShareGPT file; None takes the installed package's. ValueError where no conversation
    that is left is as long as a prompt.
    """
    exchanges, _ = read_sharegpt(trace or find_packaged_sharegpt())
    order = np.random.default_rng(seed).permutation(len(exchanges))
    texts: Iterator[list[int]] = (
        list(encode(f"{exchanges[i].prompt}\n{exchanges[i].reply}")) for i in order
    )
    read: list[list[int]] = []  # texts that no prompt has taken yet
    filled = []
    for request in requests:
        length = request.num_prompt_tokens
        while (tokens := next((text for text in read if len(text) >= length), None)) is None:
            if (text := next(texts, None)) is None:
                raise ValueError(f"no ShareGPT conversation is left with {length} tokens or more")
            read.append(text)
        read.remove(tokens)
        filled.append(replace(request, prompt_token_ids=tuple(tokens[:length])))
    return filled


def saved_fraction(usages: Iterable[MemoryUsage]) -> float:
    """Blocks saved by sharing over blocks without sharing (Kwon et al., section 6.3).

    Both are summed over the iterations: one with more memory in use weighs more.
    """
    shared = used = 0
    for usage in usages:
        shared += usage.shared
        used += usage.total - usage.free
    if not shared + used:
        raise ValueError("no memory was used, so none can have been saved")
    return shared / (shared + used)


def num_tokens_apart(beams: Sequence[Sequence[int]]) -> int:
    """For how many tokens, up to the last one, these beams of equal length have differed."""
    tokens = np.array(beams)
    differs = (tokens != tokens[0]).any(axis=0)
    return len(differs) - int(differs.argmax()) if differs.any() else 0


def beams_apart(batch: ScheduledBatch) -> list[int]:
    """How long the beams are apart, for each search with several beams in the batch."""
    searches: dict[str, list[list[int]]] = {}
    for seq in batch.decodes:
        if seq.request.beam_search is not None:
            searches.setdefault(seq.request.request_id, []).append(seq.token_ids)
    return [num_tokens_apart(beams) for beams in searches.values() if len(beams) > 1]
