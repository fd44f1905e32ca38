"""Workloads in which steps of every size occur, and what they measure."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.simulator.real_engine import RealEngine
from paged_jax.simulation.calibrated import Measured, StepBuckets
from paged_jax.simulation.run import SystemConfig
from paged_jax.workloads import VocabRange, WorkloadRequest
from paged_jax.workloads.request import random_token_ids

MAX_PROMPT_TOKENS = 320
OUTPUT_TOKENS = (4, 20)


def prepare(real: RealEngine, seed: int) -> None:
    """Run each step once, which loads what was compiled, before any is measured."""
    real.engine.warm_up()
    measure(real, seed)


def measure(real: RealEngine, seed: int) -> list[Measured]:
    """One round: each workload on its own."""
    engine = real.engine
    workloads = calibration_workloads(
        real.buckets,
        real.system,
        VocabRange(0, engine.config.vocab_size),
        seed,
    )
    measured: list[Measured] = []
    for requests in tqdm(workloads, desc="calibration", unit="workload", leave=False):
        measured += real.serve(requests)[1]
    return measured


def calibration_workloads(
    buckets: StepBuckets, system: SystemConfig, vocab: VocabRange, seed: int
) -> list[list[WorkloadRequest]]:
    """Workloads to be served one after the other, the requests of each all at once.

    For each size of a prefill a prompt that fills it, and one that does so after a chunk of the
    largest size; for each size of a decode step as many sequences of random lengths; for each size
    of what samples after prompts as many prompts that are computed together.
    """
    rng = np.random.default_rng([seed, 0x63616C])
    room = system.max_model_len - OUTPUT_TOKENS[1]

    def request(num_prompt: int, num_output: int) -> WorkloadRequest:
        return WorkloadRequest(tuple(random_token_ids(rng, num_prompt, vocab)), num_output)

    workloads: list[list[WorkloadRequest]] = []
    for low, high in zip((0, *buckets.prefill), buckets.prefill, strict=False):
        for before in (0, buckets.prefill[-1]):
            # More than three quarters full: the scheduler leaves less to the size below.
            num_tokens = before + int(rng.integers(low + 1 + 3 * (high - low) // 4, high + 1))
            if num_tokens <= room:
                workloads.append([request(num_tokens, 2)])
    for size in buckets.decode:
        prompts = rng.integers(8, min(MAX_PROMPT_TOKENS, room) + 1, size=size)
        outputs = rng.integers(*OUTPUT_TOKENS, endpoint=True, size=size)
        workloads.append([request(*each) for each in zip(prompts, outputs, strict=True)])
    for size in buckets.head:
        if size <= system.max_prefill_seqs:  # more at a time are forks
            longest = max(1, min(room, system.max_num_batched_tokens // size))
            workloads.append([request(n, 2) for n in rng.integers(1, longest + 1, size=size)])
    return workloads


def facts(measured: Sequence[Measured]) -> dict[str, Any]:
    """How much was measured."""
    return {"iterations": len(measured), "seconds": sum(seconds for _, seconds in measured)}
