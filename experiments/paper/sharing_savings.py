"""What sharing saves, measured on any engine, real or simulated."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.lib import reporting
from paged_jax.engine.core import EngineCore
from paged_jax.executor.interface import Executor, StepResult
from paged_jax.memory.interface import MemoryManager
from paged_jax.memory.usage import MemoryUsage
from paged_jax.outputs import TokenLogprobs
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request
from paged_jax.simulation.executor import VOCAB_SIZE, BeamCandidates, Branching
from paged_jax.simulation.run import SystemConfig
from paged_jax.workloads import WorkloadRequest, find_packaged_sharegpt, read_sharegpt


class BranchingExecutor(Executor):
    """Computes nothing: random tokens for samples, candidates by `branching` for beams."""

    def __init__(self, memory: MemoryManager, *, seed: int, branching: Branching | None = None):
        self._memory = memory
        self._rng = np.random.default_rng(seed)
        self._beams = BeamCandidates(self._rng, branching)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self._memory.take_copies()
        sampled = batch.sampled
        tokens: list[int] = self._rng.integers(VOCAB_SIZE, size=len(sampled)).tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(sampled)
        beams = [i for i, seq in enumerate(sampled) if seq.request.beam_search is not None]
        if beams:
            for i, row in zip(beams, self._beams.draw([sampled[i] for i in beams]), strict=True):
                logprobs[i] = row
        return StepResult(tokens, logprobs, 0.0)


def simulate(
    requests: Sequence[WorkloadRequest],
    params: SamplingParams,
    system: SystemConfig,
    executor_of: Callable[[MemoryManager], Executor],
    *,
    description: str,
) -> list[MemoryUsage]:
    """Serve requests that are all there at the start; returns the memory's use in each iteration.

    As in the paper, requests share nothing with each other: leave the prefix cache off.
    """
    scheduler = system.scheduler()
    usages: list[MemoryUsage] = []
    core = EngineCore(
        scheduler,
        executor_of(scheduler.memory),
        on_iteration=lambda stats: usages.append(stats.usage),
    )
    for index, request in enumerate(requests):
        own = replace(params, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
        scheduler.add(Request(str(index), request.prompt_token_ids, own, 0.0, seed=index))
    with tqdm(total=len(requests), desc=description, unit="request", leave=False) as bar:
        while scheduler.has_work:
            iteration = core.step()
            core.report(iteration)
            ended = {seq.request.request_id: seq.request for seq in iteration.finished}
            bar.update(sum(request.is_finished for request in ended.values()))
    return usages


def with_sharegpt_text(
    requests: Sequence[WorkloadRequest],
    encode: Callable[[str], Sequence[int]],
    *,
    trace: str | Path | None,
    seed: int,
) -> list[WorkloadRequest]:
    """The requests with prompts that are the beginnings of ShareGPT conversations.

    trace: a ShareGPT file; None: the installed package. ValueError where it has no text as long
    as a prompt that no other request took.
    """
    exchanges, _ = read_sharegpt(trace or find_packaged_sharegpt())
    order = np.random.default_rng(seed).permutation(len(exchanges))
    texts: Iterator[list[int]] = (
        list(encode(f"{exchanges[i].prompt}\n{exchanges[i].reply}")) for i in order
    )
    too_short: list[list[int]] = []  # for a prompt before: they may do for one to come
    filled = []
    for request in requests:
        length = request.num_prompt_tokens
        tokens = next((text for text in too_short if len(text) >= length), None)
        if tokens is not None:
            too_short.remove(tokens)
        while tokens is None:
            text = next(texts, None)
            if text is None:
                raise ValueError(f"no ShareGPT conversation is left with {length} tokens or more")
            if len(text) >= length:
                tokens = text
            else:
                too_short.append(text)
        filled.append(replace(request, prompt_token_ids=tuple(tokens[:length])))
    return filled


def saved_fraction(usages: Iterable[MemoryUsage]) -> float:
    """Blocks saved by sharing over blocks without sharing (Kwon et al., section 6.3).

    Both are summed over the snapshots: where more memory is in use, it weighs more.
    """
    shared = used = 0
    for usage in usages:
        shared += usage.shared
        used += usage.total - usage.free
    if not shared + used:
        raise ValueError("no memory was used, so none can have been saved")
    return shared / (shared + used)


def num_tokens_apart(beams: Sequence[Sequence[int]]) -> int:
    """How many tokens ago, counted to the last one, these beams of equal length were one."""
    tokens = np.array(beams)
    differs = (tokens != tokens[0]).any(axis=0)
    return len(differs) - int(differs.argmax()) if differs.any() else 0


class BeamObserver(Executor):
    """An executor that notes, at each step of each search, for how long its beams are apart."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self._tokens_apart: list[int] = []

    def execute(self, batch: ScheduledBatch) -> StepResult:
        searches: dict[str, list[list[int]]] = {}
        for seq in batch.decodes:
            if seq.request.beam_search is not None:
                searches.setdefault(seq.request.request_id, []).append(seq.token_ids)
        self._tokens_apart += [
            num_tokens_apart(beams) for beams in searches.values() if len(beams) > 1
        ]
        return self._executor.execute(batch)

    @property
    def cache_is_lost(self) -> bool:
        return self._executor.cache_is_lost

    def reset_cache(self) -> None:
        self._executor.reset_cache()

    def take(self) -> dict[str, Any]:
        """Mean and percentiles since the last call."""
        tokens_apart, self._tokens_apart = self._tokens_apart, []
        return reporting.spread(tokens_apart, percents=(50, 90))
