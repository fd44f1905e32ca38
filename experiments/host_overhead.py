"""What the host costs a decode iteration: scheduler, block manager and the device's arrays.

    python -m experiments.host_overhead
    python -m experiments.host_overhead --num_seqs=16,64,256 --block_size=1,16

The engine's loop runs with an executor that computes nothing: it builds every array that the device
would get and answers with a constant token, so what is timed is the host's share alone. Sequences
have prompts and outputs of random lengths; as they finish, new ones are admitted.

Expect a table in about ten seconds. --out_dir gets results.json, results.csv and host_overhead.png.
"""

import statistics
import time
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from absl import flags

from experiments import reporting
from paged_jax.engine_core import EngineCore
from paged_jax.executor.decode_rows import DecodeRows
from paged_jax.executor.interface import Executor, StepResult
from paged_jax.executor.prefill_arrays import PrefillShape, prefill_arrays
from paged_jax.memory.block_manager import BlockManager
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sampling_params import SamplingParams
from paged_jax.scheduling.scheduler import Scheduler

_NUM_SEQS = flags.DEFINE_list("num_seqs", ["16", "64", "256"], "Sequences that run at a time.")
_BLOCK_SIZE = flags.DEFINE_list("block_size", ["16"], "Block sizes, in tokens.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 512, "Mean prompt length.", lower_bound=2)
_OUTPUT_TOKENS = flags.DEFINE_integer("output_tokens", 256, "Mean output length.", lower_bound=2)
_ITERATIONS = flags.DEFINE_integer("iterations", 1000, "Iterations timed.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the lengths.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/host_overhead", "Where the results go.")

MAX_PREFILL_SEQS = 16
MAX_BATCHED_TOKENS = 8192


class FakeExecutor(Executor):
    """Builds a step's arrays, computes nothing, and notes how long the building takes."""

    def __init__(self, memory: BlockManager, *, max_num_seqs: int, max_model_len: int):
        self._memory = memory
        self._rows = DecodeRows(memory, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self.arrays_s: list[float] = []

    def execute(self, batch: ScheduledBatch) -> StepResult:
        start = time.perf_counter()
        if batch.decodes:
            self._rows.update(batch.decodes, tables_changed=bool(batch.copies))
        else:
            self._rows.forget()
        if batch.prefills:
            prefill_arrays(
                batch.prefills,
                PrefillShape.of(batch.num_prefill_tokens, MAX_PREFILL_SEQS),
                self._memory,
                max_chunks=MAX_PREFILL_SEQS,
                max_blocks=self._rows.block_tables.shape[1],
            )
        self._memory.take_copies()
        self.arrays_s.append(time.perf_counter() - start)
        n = batch.num_samples
        return StepResult([7] * n, [None] * n, 0.0)


class Case(NamedTuple):
    """Milliseconds of host time per iteration; medians over those that only decode."""

    num_seqs: int
    block_size: int
    iterations: int
    decode_ms: float
    decode_p99_ms: float
    arrays_ms: float  # of which the device's arrays
    mean_ms: float  # over all iterations, those with admissions, prefills and ends included
    admit_ms: float  # to queue, admit and prefill the first num_seqs prompts


def run_case(num_seqs: int, block_size: int) -> Case:
    """Run the loop over random lengths with `num_seqs` sequences running all the time."""
    rng = np.random.default_rng(_SEED.value)
    max_len = 2 * (_PROMPT_TOKENS.value + _OUTPUT_TOKENS.value)
    memory = BlockManager(num_seqs * -(-max_len // block_size) + 1, block_size)
    executor = FakeExecutor(memory, max_num_seqs=num_seqs, max_model_len=max_len)
    scheduler = Scheduler(
        memory,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=max_len,
        max_prefill_seqs=MAX_PREFILL_SEQS,
        eos_token_ids=(),
    )
    core = EngineCore(scheduler, executor)

    def requests(count: int, first: int) -> list[Request]:
        prompts = rng.integers(1, 2 * _PROMPT_TOKENS.value, count)
        outputs = rng.integers(1, 2 * _OUTPUT_TOKENS.value, count)
        return [  # no two prompts begin alike, so that none finds another's blocks
            Request(str(i), (i,) * int(p), SamplingParams(max_tokens=int(o)), 0.0, seed=i)
            for i, (p, o) in enumerate(zip(prompts, outputs, strict=True), start=first)
        ]

    # Enough to keep the queue filled to the end.
    total = num_seqs * (2 + 2 * _ITERATIONS.value // _OUTPUT_TOKENS.value)
    backlog = requests(total, 0)
    start = time.perf_counter()
    for request in backlog[:num_seqs]:
        scheduler.add(request)
    while scheduler.num_waiting:
        core.step()
    admit_s = time.perf_counter() - start
    for request in backlog[num_seqs:]:
        scheduler.add(request)

    executor.arrays_s.clear()
    all_s, decode_s, arrays_s = [], [], []
    for _ in range(_ITERATIONS.value):
        start = time.perf_counter()
        iteration = core.step()
        elapsed = time.perf_counter() - start
        all_s.append(elapsed)
        if not iteration.batch.prefills and not iteration.finished:
            decode_s.append(elapsed)
            arrays_s.append(executor.arrays_s[-1])
    if not decode_s:
        raise ValueError(
            f"none of {len(all_s)} iterations with {num_seqs} sequences only decoded; raise "
            "--iterations or --output_tokens"
        )
    return Case(
        num_seqs,
        block_size,
        len(all_s),
        decode_ms=1e3 * statistics.median(decode_s),
        decode_p99_ms=1e3 * float(np.quantile(decode_s, 0.99)),
        arrays_ms=1e3 * statistics.median(arrays_s),
        mean_ms=1e3 * statistics.fmean(all_s),
        admit_ms=1e3 * admit_s,
    )


def plot(cases: list[Case], path: str) -> None:
    """Host time against running sequences."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for block_size in sorted({case.block_size for case in cases}):
        chosen = [case for case in cases if case.block_size == block_size]
        sizes = [case.num_seqs for case in chosen]
        (line,) = axes.plot(sizes, [c.decode_ms for c in chosen], "o-", label=f"block {block_size}")
        axes.plot(sizes, [c.arrays_ms for c in chosen], "o:", color=line.get_color())
    axes.set(xlabel="running sequences", ylabel="host ms per decode iteration (dotted: arrays)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    num_seqs = reporting.integers(_NUM_SEQS, 1)
    block_sizes = reporting.integers(_BLOCK_SIZE, 1)
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    cases = [run_case(n, size) for size in block_sizes for n in num_seqs]
    rows = [case._asdict() for case in cases]
    reporting.report_cases("Host time per iteration", rows, out_dir, _NUM_SEQS)
    plot(cases, str(out_dir / "host_overhead.png"))
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
