"""What the host costs a decode iteration: scheduler, block manager and the device's arrays.

    python -m experiments.costs.host_overhead
    python -m experiments.costs.host_overhead --num_seqs=16,64,256 --block_size=1,16

The engine's loop runs with an executor that computes nothing: it builds every array that the device
would get and answers with a constant token, so what is timed is the host's share alone. Sequences
have prompts and outputs of random lengths; as they finish, new ones are admitted.

Expect a table in about ten seconds. --out_dir gets results.json, results.csv and host_overhead.png.
"""

import statistics
import time
from itertools import islice
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from absl import flags

from experiments.lib import reporting
from experiments.lib.fake_devices import endless_requests, make_loop

_NUM_SEQS = flags.DEFINE_list("num_seqs", ["16", "64", "256"], "Sequences that run at a time.")
_BLOCK_SIZE = flags.DEFINE_list("block_size", ["16"], "Block sizes, in tokens.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 512, "Mean prompt length.", lower_bound=2)
_OUTPUT_TOKENS = flags.DEFINE_integer("output_tokens", 256, "Mean output length.", lower_bound=2)
_ITERATIONS = flags.DEFINE_integer("iterations", 1000, "Iterations timed.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the lengths.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/host_overhead", "Where the results go.")


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
    lengths = {"mean_prompt": _PROMPT_TOKENS.value, "mean_output": _OUTPUT_TOKENS.value}
    core, device = make_loop(num_seqs, block_size=block_size, **lengths)
    scheduler = core.scheduler
    # Enough to keep the queue filled to the end.
    total = num_seqs * (2 + 2 * _ITERATIONS.value // _OUTPUT_TOKENS.value)
    backlog = list(islice(endless_requests(_SEED.value, **lengths), total))
    start = time.perf_counter()
    for request in backlog[:num_seqs]:
        scheduler.add(request)
    while scheduler.num_waiting:
        core.step()
    admit_s = time.perf_counter() - start
    for request in backlog[num_seqs:]:
        scheduler.add(request)

    device.arrays_s.clear()
    all_s, decode_s, arrays_s = [], [], []
    for _ in range(_ITERATIONS.value):
        start = time.perf_counter()
        iteration = core.step()
        elapsed = time.perf_counter() - start
        all_s.append(elapsed)
        if not iteration.batch.prefills and not iteration.finished:
            decode_s.append(elapsed)
            arrays_s.append(device.arrays_s[-1])
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
