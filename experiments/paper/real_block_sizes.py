"""What a block size does to a workload of a real model on this machine's device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments.lib.driver import ServedRun, require_fitting, serve
from experiments.paper.block_sizes import Row, held_figures
from experiments.paper.requests import SHARED_PREFIXES, draw
from paged_jax.engine.engine import Engine
from paged_jax.loading import LoadedModel
from paged_jax.memory.sizing import bytes_per_block
from paged_jax.sampling_params import SamplingParams
from paged_jax.workloads import VocabRange, WorkloadRequest


class RealRuns:
    """The same requests to an engine of each block size, over pools of the same memory."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        pool_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        num_requests: int,
        max_tokens: int,
        rounds: int,
        seed: int,
    ):
        self._model = model
        self._pool_tokens = pool_tokens
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self._num_requests, self._max_tokens = num_requests, max_tokens
        self._rounds, self._seed = rounds, seed

    def requests(self, workload: str) -> list[WorkloadRequest]:
        """All there at the start, outputs cut."""
        drawn = draw(
            workload,
            self._num_requests,
            self._max_model_len,
            self._seed,
            VocabRange(0, self._model.config.vocab_size),
        )
        return [replace(r, max_tokens=min(r.max_tokens, self._max_tokens)) for r in drawn]

    def run(self, block_size: int, workloads: Sequence[str], bar: "tqdm[Any]") -> list[Row]:
        """A row for each workload."""
        engine = Engine(
            self._model,
            block_size=block_size,
            num_blocks=self._pool_tokens // block_size,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=max(64, self._max_num_seqs),
            max_model_len=self._max_model_len,
            max_prefill_seqs=4,
            seed=self._seed,
        )
        try:
            engine.warm_up(progress=False)
            return [self._run_workload(engine, workload, bar) for workload in workloads]
        finally:
            engine.close()

    def _run_workload(self, engine: Engine, workload: str, bar: "tqdm[Any]") -> Row:
        requests = self.requests(workload)
        require_fitting(engine, requests)
        before = engine.sharing_stats
        num_preempted = engine.core.scheduler.counters.num_preemptions
        runs: list[ServedRun] = []
        for number in range(self._rounds):
            # The salt hides what the rounds before have left in the cache.
            params = SamplingParams(temperature=0, cache_salt=f"{workload}, round {number}")
            runs.append(serve(engine, requests, params))
            bar.update()
        weights = [step.wall_s for run in runs for step in run.steps]

        def over_time(values: Sequence[float]) -> float:
            return float(np.average(values, weights=weights))

        usages = [step.usage for run in runs for step in run.steps]
        config, block_size = engine.config, engine.block_size
        waste, tables = held_figures(
            block_size=block_size,
            internal=over_time([u.internal for u in usages]),
            held=over_time([u.token_states + u.reserved + u.internal for u in usages]),
            num_seqs=over_time([step.num_running for run in runs for step in run.steps]),
            max_model_len=engine.max_model_len,
            token_bytes=bytes_per_block(
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                block_size=1,
                head_dim=config.head_dim,
                bytes_per_value=jnp.dtype(engine.dtype).itemsize,
            ),
        )
        num_tokens = sum(request.max_tokens for request in requests)
        seconds = float(np.median([run.wall_s for run in runs]))
        latencies = [
            (served.output.metrics.last_token_s - served.output.metrics.arrival_s)
            / served.request.max_tokens
            for run in runs
            for served in run.served
            if served.output is not None and served.output.metrics.last_token_s is not None
        ]
        stats = engine.sharing_stats
        queried = stats.queried_tokens - before.queried_tokens
        hits = stats.hit_tokens - before.hit_tokens
        return Row(
            "real",
            workload,
            block_size,
            num_tokens / seconds,
            1e3 * float(np.mean(latencies)),
            waste,
            tables,
            100 * hits / queried if workload == SHARED_PREFIXES else None,
            engine.core.scheduler.counters.num_preemptions - num_preempted,
        )
