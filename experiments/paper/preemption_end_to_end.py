"""A workload in a pool that is too small for it, preempted in one mode or another."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from experiments.lib.driver import ServedRun, serve
from paged_jax import Engine, SamplingParams
from paged_jax.workloads import WorkloadRequest

Mode = Literal["none", "recompute", "swap", "auto"]  # none: a pool in which everything fits
MODES: tuple[Mode, ...] = get_args(Mode)


class Run(NamedTuple):
    """One row of the table: a block size and a mode, medians over the rounds."""

    block_size: int
    mode: str
    output_per_s: float  # tokens/s
    latency_ms: float  # normalised: from arrival to the last token, by output token, mean
    preemptions: int  # the rest is of the first round
    by_swap: int
    swapped_blocks: int  # out and in
    recomputed_tokens: int
    swap_percent: float  # of the time that iterations take
    same_percent: float  # outputs that are the same as without preemption


class Served(NamedTuple):
    """What one round of a mode gives."""

    output_per_s: float
    latency_ms: float
    counts: tuple[int, int, int, int]  # as in `Run`
    swap_percent: float
    tokens: list[list[int]]


def num_blocks_of(requests: Sequence[WorkloadRequest], block_size: int) -> list[int]:
    """Blocks that each request comes to hold."""
    return [-(-(r.num_prompt_tokens + r.max_tokens - 1) // block_size) for r in requests]


def serve_once(engine: Engine, requests: Sequence[WorkloadRequest]) -> Served:
    """All requests are there at the start; greedy."""
    before = _counts(engine)
    run = serve(engine, requests, SamplingParams(temperature=0))
    outputs = [served.output for served in run.served if served.output is not None]
    if len(outputs) < len(requests):
        raise ValueError(next(s.refusal or "no output" for s in run.served if s.output is None))
    latencies = []
    for output in outputs:
        last_s = output.metrics.last_token_s
        assert last_s is not None
        num_tokens = len(output.outputs[0].token_ids)
        latencies.append((last_s - output.metrics.arrival_s) / num_tokens)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    first, second, third, fourth = np.subtract(_counts(engine), before).tolist()
    return Served(
        num_tokens / run.wall_s,
        1e3 * float(np.mean(latencies)),
        (first, second, third, fourth),
        _swap_percent(run),
        [output.outputs[0].token_ids for output in outputs],
    )


def _swap_percent(run: ServedRun) -> float:
    return 100 * sum(step.swap_s for step in run.steps) / sum(step.wall_s for step in run.steps)


def _counts(engine: Engine) -> tuple[int, int, int, int]:
    scheduler = engine.core.scheduler
    return (
        scheduler.counters.num_preemptions,
        scheduler.counters.num_preemptions_by_swap,
        scheduler.counters.num_swapped_out_blocks + scheduler.counters.num_swapped_in_blocks,
        scheduler.counters.num_recomputed_tokens,
    )


def summarise(
    block_size: int, mode: str, rounds: Sequence[Served], wanted: Sequence[list[int]]
) -> Run:
    """A mode's rounds beside the outputs that a pool without preemption gives."""
    same = [a == b for served in rounds for a, b in zip(served.tokens, wanted, strict=True)]
    return Run(
        block_size,
        mode,
        float(np.median([served.output_per_s for served in rounds])),
        float(np.median([served.latency_ms for served in rounds])),
        *rounds[0].counts,
        swap_percent=float(np.median([served.swap_percent for served in rounds])),
        same_percent=100 * sum(same) / len(same),
    )
