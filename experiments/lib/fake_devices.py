"""Executors that stand in for a device, and one that keeps notes of what any executor is given."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from paged_jax.config import EngineConfig
from paged_jax.engine.core import EngineCore
from paged_jax.executor.decode_rows import DecodeRows
from paged_jax.executor.histories import Histories
from paged_jax.executor.interface import Executor, StepResult
from paged_jax.executor.prefill_arrays import PrefillShape, prefill_arrays
from paged_jax.executor.sampling_rows import SamplingArrays
from paged_jax.memory.block_manager import BlockManager
from paged_jax.memory.interface import MemoryManager
from paged_jax.outputs import TokenLogprobs
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.simulation.executor import VOCAB_SIZE, BeamCandidates, Branching

TOKEN = 7  # the answer of a device that computes nothing


class ConstantDevice(Executor):
    """Answers at once, with a constant token."""

    def __init__(self, memory: MemoryManager):
        self._memory = memory

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self._memory.take_copies()
        return _answer(batch.num_samples)


def _answer(num_samples: int, device_s: float = 0.0) -> StepResult:
    return StepResult([TOKEN] * num_samples, [None] * num_samples, device_s)


class BranchingDevice(Executor):
    """Answers at once: samples with random tokens, beams with candidates that `branching` draws."""

    def __init__(self, memory: MemoryManager, *, seed: int, branching: Branching | None = None):
        self._memory = memory
        self._rng = np.random.default_rng(seed)
        self._beams = BeamCandidates(self._rng, branching)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self._memory.take_copies()
        sampled = batch.sampled
        tokens: list[int] = self._rng.integers(VOCAB_SIZE, size=len(sampled)).tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(sampled)
        if beams := [seq for seq in sampled if seq.request.beam_search is not None]:
            rows = iter(self._beams.draw(beams))
            logprobs = [next(rows) if seq.request.beam_search else None for seq in sampled]
        return StepResult(tokens, logprobs, 0.0)


class SleepingDevice(Executor):
    """Builds every array that a step would get, sleeps, and answers with a constant token.

    Iterations queue up as they do on a GPU: each takes `device_s` seconds from its dispatch, or
    from the end of the iteration before it.
    """

    def __init__(
        self, memory: MemoryManager, rows: DecodeRows, max_prefill_seqs: int, device_s: float
    ):
        self._memory, self._rows = memory, rows
        self._max_prefill_seqs = max_prefill_seqs
        self._device_s = device_s
        self._busy_until = 0.0
        self.arrays_s: list[float] = []  # of each iteration, what building its arrays took

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.dispatch(batch).result()

    def dispatch(
        self, batch: ScheduledBatch, *, after: "SleepingIteration | None" = None
    ) -> "SleepingIteration":
        start = time.perf_counter()
        if batch.decodes:
            self._rows.update(
                batch.decodes, tables_changed=bool(batch.copies), is_ahead=after is not None
            )
        else:
            self._rows.forget()
        if batch.prefills:
            prefill_arrays(
                batch.prefills,
                PrefillShape.of(batch.num_prefill_tokens, self._max_prefill_seqs),
                self._memory,
                max_chunks=self._max_prefill_seqs,
                max_blocks=self._rows.block_tables.shape[1],
            )
        self._memory.take_copies()
        now = time.perf_counter()
        self.arrays_s.append(now - start)
        begin = max(now, self._busy_until)
        self._busy_until = begin + self._device_s
        return SleepingIteration(batch.num_samples, begin, self._busy_until)


class SleepingIteration(NamedTuple):
    """An iteration of so many samples; its times are of `time.perf_counter`."""

    num_samples: int
    begin_s: float
    end_s: float

    def result(self) -> StepResult:
        if (rest_s := self.end_s - time.perf_counter()) > 0:
            time.sleep(rest_s)
        return _answer(self.num_samples, self.end_s - self.begin_s)


class BatchRecorder[Note](Executor):
    """Passes each batch on to an executor, real or fake, and keeps notes of it.

    notes_of: the notes to keep of a batch, taken before it is executed.
    """

    def __init__(self, executor: Executor, notes_of: Callable[[ScheduledBatch], Iterable[Note]]):
        self._executor, self._notes_of = executor, notes_of
        self._notes: list[Note] = []

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self._notes.extend(self._notes_of(batch))
        return self._executor.execute(batch)

    @property
    def cache_is_lost(self) -> bool:
        return self._executor.cache_is_lost

    def reset_cache(self) -> None:
        self._executor.reset_cache()

    def take(self) -> list[Note]:
        """The notes since the last call."""
        notes, self._notes = self._notes, []
        return notes


# A loop without a model


def make_loop(
    num_seqs: int,
    mean_prompt: int,
    mean_output: int,
    *,
    block_size: int,
    device_s: float = 0.0,
    is_pipelined: bool = False,
) -> tuple[EngineCore, SleepingDevice]:
    """An idle loop and its device, with memory for the longest sequences of `endless_requests`."""
    max_len = 2 * (mean_prompt + mean_output)
    memory = BlockManager(num_seqs * -(-max_len // block_size) + 1, block_size)
    rows = DecodeRows(
        memory,
        SamplingArrays(VOCAB_SIZE),
        Histories(num_seqs, max_len, [num_seqs]),
        max_num_seqs=num_seqs,
        max_model_len=max_len,
    )
    device = SleepingDevice(memory, rows, max_prefill_seqs=16, device_s=device_s)
    config = EngineConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=max_len,
        max_prefill_seqs=16,
    )
    scheduler = Scheduler(memory, config, eos_token_ids=())
    return EngineCore(scheduler, device, is_pipelined=is_pipelined), device


def endless_requests(seed: int, mean_prompt: int, mean_output: int) -> Iterator[Request]:
    """Lengths are uniform; no two prompts begin alike, so that none finds another's blocks."""
    rng = np.random.default_rng(seed)
    for number in itertools.count():
        prompt = int(rng.integers(1, 2 * mean_prompt))
        params = SamplingParams(max_tokens=int(rng.integers(1, 2 * mean_output)))
        yield Request(str(number), (number,) * prompt, params, 0.0, seed=number)
