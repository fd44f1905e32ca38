"""What the host costs a decode iteration: scheduler, block manager and the device's arrays.

    python -m experiments.costs.host_overhead
    python -m experiments.costs.host_overhead --num_seqs=16,64,256 --block_size=1,16

The engine's loop runs with an executor that computes nothing: it builds every array that the device
would get and answers with a constant token, so the times are the host's share alone. Sequences have
prompts and outputs of random lengths; as they finish, new ones are admitted.

Expect a table in about ten seconds. --out_dir gets results.json, results.csv and host_overhead.png.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from experiments.lib import figures
from experiments.lib.experiment import grid, run
from experiments.lib.fake_devices import endless_requests, make_loop
from experiments.lib.options import Options, option
from experiments.lib.reporting import report


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    num_seqs: tuple[int, ...] = option(
        (16, 64, 256), "So many sequences run at a time.", quick=(16, 64), least=1
    )
    block_size: tuple[int, ...] = option((16,), "Block sizes, in tokens.", least=1)
    prompt_tokens: int = option(512, "Prompts have this mean length.", least=2)
    output_tokens: int = option(256, "Outputs have this mean length.", least=2)
    iterations: int = option(1000, "So many iterations are timed.", quick=200, least=1)


class Case(NamedTuple):
    """Milliseconds of host time per iteration; medians over iterations that only decode."""

    num_seqs: int
    block_size: int
    iterations: int
    decode_ms: float
    decode_p99_ms: float
    arrays_ms: float  # the part of decode_ms that builds the device's arrays
    mean_ms: float  # over all iterations, with admissions, prefills and ends
    admit_ms: float  # to queue, admit and prefill the first num_seqs prompts


def measure(point: tuple[int, int], config: Config) -> Case:
    """Run the loop over random lengths with (num_seqs, block size) all the time."""
    num_seqs, block_size = point
    lengths: dict[str, Any] = {
        "mean_prompt": config.prompt_tokens,
        "mean_output": config.output_tokens,
    }
    core, device = make_loop(num_seqs, block_size=block_size, **lengths)
    scheduler = core.scheduler
    # Enough to keep the queue filled to the end.
    total = num_seqs * (2 + 2 * config.iterations // config.output_tokens)
    backlog = list(islice(endless_requests(config.seed, **lengths), total))
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
    for _ in range(config.iterations):
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


def plot(cases: Sequence[Case], out_dir: str) -> None:
    """Host time against running sequences, in all and for the arrays."""
    figure, [[axes]] = figures.panels(size=(6, 4))
    for size in sorted({case.block_size for case in cases}):
        own = [case for case in cases if case.block_size == size]
        total = [(case.num_seqs, case.decode_ms) for case in own]
        arrays = [(case.num_seqs, case.arrays_ms) for case in own]
        figures.lines(axes, {f"block {size}": total, f"block {size}, arrays": arrays})
    axes.set(xlabel="running sequences", ylabel="host ms per decode iteration", ylim=(0, None))
    axes.legend()
    figures.save(figure, out_dir, "host_overhead.png")


def main(config: Config) -> None:
    points = [(n, size) for size in config.block_size for n in config.num_seqs]
    cases = grid(partial(measure, config=config), points, config, unit="case")
    report("Host time per iteration", cases, config)
    plot(cases, config.out_dir)


if __name__ == "__main__":
    run(main, Config)
