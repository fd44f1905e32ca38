"""A workload in a pool that is too small for it, preempted in one mode or another."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import numpy as np

from experiments.lib.driver import serve
from paged_jax import Engine, SamplingParams
from paged_jax.loading import LoadedModel
from paged_jax.workloads import WorkloadRequest

MODES = ("none", "recompute", "swap", "auto")  # none: a pool in which everything fits


class Run(NamedTuple):
    """A block size and a mode, end to end; medians over the rounds."""

    block_size: int
    mode: str
    output_per_s: float  # tokens/s
    latency_ms: float  # normalised: from arrival to the last token, by output token, mean
    preemptions: int  # this one and the next three are of the first round
    by_swap: int
    swapped_blocks: int  # out and in
    recomputed_tokens: int
    swap_percent: float  # of the time that iterations take
    same_percent: float  # outputs that are the same as without preemption


class Served(NamedTuple):
    """What one round of a mode gives."""

    output_per_s: float
    latency_ms: float
    swap_percent: float
    counts: tuple[int, int, int, int]  # as in `Run`
    tokens: list[list[int]]


def serve_once(engine: Engine, requests: Sequence[WorkloadRequest]) -> Served:
    """Serve requests that are all there at the start, greedily."""
    before = _counts(engine)
    served = serve(engine, requests, SamplingParams(temperature=0))
    outputs = [each.output for each in served.served if each.output is not None]
    if len(outputs) < len(requests):
        raise ValueError(next(s.refusal or "no output" for s in served.served if s.output is None))
    tokens = [output.outputs[0].token_ids for output in outputs]
    seconds = [(output.metrics.last_token_s or 0) - output.metrics.arrival_s for output in outputs]
    wall_s = sum(step.wall_s for step in served.steps)
    return Served(
        sum(map(len, tokens)) / served.wall_s,
        1e3 * float(np.mean(np.divide(seconds, [len(each) for each in tokens]))),
        100 * sum(step.swap_s for step in served.steps) / wall_s,
        tuple(np.subtract(_counts(engine), before).tolist()),
        tokens,
    )


def _counts(engine: Engine) -> tuple[int, int, int, int]:
    scheduler = engine.core.scheduler
    return (
        scheduler.counters.num_preemptions,
        scheduler.counters.num_preemptions_by_swap,
        scheduler.counters.num_swapped_out_blocks + scheduler.counters.num_swapped_in_blocks,
        scheduler.counters.num_recomputed_tokens,
    )


def run_of(
    block_size: int, mode: str, rounds: Sequence[Served], wanted: Sequence[list[int]]
) -> Run:
    """A mode's rounds, compared with the `wanted` outputs, which come without preemption."""
    same = [a == b for served in rounds for a, b in zip(served.tokens, wanted, strict=True)]
    output_per_s, latency_ms, swap_percent = np.median([r[:3] for r in rounds], axis=0).tolist()
    return Run(
        block_size,
        mode,
        output_per_s,
        latency_ms,
        *rounds[0].counts,
        swap_percent=swap_percent,
        same_percent=100 * sum(same) / len(same),
    )


def serve_modes(
    model: LoadedModel,
    options: Mapping[str, Any],
    requests: Sequence[WorkloadRequest],
    *,
    pool_percent: int,
    rounds: int,
) -> list[Run]:
    """Serve the requests in each mode in turn, round by round.

    options: options of each engine, its block size among them.
    pool_percent: the pool's size, in percent of all the blocks that the requests come to hold.
    """
    block_size = options["block_size"]
    blocks = [-(-(r.num_prompt_tokens + r.max_tokens - 1) // block_size) for r in requests]
    small = max(max(blocks), sum(blocks) * pool_percent // 100)
    served: dict[str, list[Served]] = {mode: [] for mode in MODES}
    with ExitStack() as stack:
        engines = {}
        for mode in MODES:
            engine = Engine(
                model,
                num_blocks=sum(blocks) if mode == "none" else small,
                preemption_mode="recompute" if mode == "none" else mode,
                swap_space_blocks=sum(blocks) if mode in ("swap", "auto") else 0,
                **options,
            )
            engines[mode] = stack.enter_context(closing(engine))
            engine.warm_up()
        for number in range(rounds):
            order = MODES if number % 2 == 0 else MODES[::-1]  # a noisy machine slows all of them
            for mode in order:
                served[mode].append(serve_once(engines[mode], requests))
    wanted = served["none"][0].tokens
    return [run_of(block_size, mode, served[mode], wanted) for mode in MODES]
