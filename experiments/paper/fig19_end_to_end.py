"""A workload in a pool that is too small for it, preempted in one mode or another."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from experiments.lib.driver import serve
from paged_jax import Engine, SamplingParams
from paged_jax.loading import LoadedModel
from paged_jax.workloads import WorkloadRequest

MODES = ("none", "recompute", "swap", "auto")  # none: a pool in which everything fits
COUNTS = ("preemptions", "by_swap", "swapped_blocks", "recomputed_tokens")  # swapped: out and in

Row = dict[str, Any]
Outputs = list[list[int]]  # the tokens of each request


def serve_once(engine: Engine, requests: Sequence[WorkloadRequest]) -> tuple[Row, Outputs]:
    """Serve requests that are all there at the start, greedily."""
    before = _counts(engine)
    served = serve(engine, requests, SamplingParams(temperature=0))
    outputs = [each.output for each in served.served if each.output is not None]
    if len(outputs) < len(requests):
        raise ValueError(next(s.refusal or "no output" for s in served.served if s.output is None))
    tokens = [output.outputs[0].token_ids for output in outputs]
    seconds = [(output.metrics.last_token_s or 0) - output.metrics.arrival_s for output in outputs]
    latencies = np.divide(seconds, [len(each) for each in tokens])
    wall_s, swap_s = (sum(getattr(s, of) for s in served.steps) for of in ("wall_s", "swap_s"))
    row = {
        "output_per_s": sum(map(len, tokens)) / served.wall_s,  # tokens/s
        "latency_ms": 1e3 * float(np.mean(latencies)),  # normalised: arrival to the end, by token
        **dict(zip(COUNTS, np.subtract(_counts(engine), before).tolist(), strict=True)),
        "swap_percent": 100 * swap_s / wall_s,  # of the time that iterations take
    }
    return row, tokens


def _counts(engine: Engine) -> list[int]:
    counters = engine.core.scheduler.counters
    return [
        counters.num_preemptions,
        counters.num_preemptions_by_swap,
        counters.num_swapped_out_blocks + counters.num_swapped_in_blocks,
        counters.num_recomputed_tokens,
    ]


def row_of(
    block_size: int, mode: str, rounds: Sequence[tuple[Row, Outputs]], wanted: Outputs
) -> Row:
    """A mode's rounds: medians, but counts of the first; `wanted` come without preemption."""
    rows = [row for row, _ in rounds]
    medians = {
        name: float(np.median([row[name] for row in rows]))
        for name in ("output_per_s", "latency_ms", "swap_percent")
    }
    same = [a == b for _, tokens in rounds for a, b in zip(tokens, wanted, strict=True)]
    same_percent = 100 * sum(same) / len(same)
    head = {"block_size": block_size, "mode": mode}
    return {**head, **rows[0], **medians, "same_percent": same_percent}


def serve_modes(
    model: LoadedModel,
    options: Mapping[str, Any],
    requests: Sequence[WorkloadRequest],
    *,
    pool_percent: int,
    rounds: int,
) -> list[Row]:
    """Serve the requests in each mode in turn, round by round.

    options: options of each engine, its block size among them.
    pool_percent: the pool's size, in percent of all the blocks that the requests come to hold.
    """
    block_size = options["block_size"]
    blocks = [-(-(r.num_prompt_tokens + r.max_tokens - 1) // block_size) for r in requests]
    small = max(max(blocks), sum(blocks) * pool_percent // 100)
    served: dict[str, list[tuple[Row, Outputs]]] = {mode: [] for mode in MODES}
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
    _, wanted = served["none"][0]
    return [row_of(block_size, mode, served[mode], wanted) for mode in MODES]
