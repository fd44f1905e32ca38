"""What the host costs a decode iteration: scheduler, block manager and the device's arrays.

    python -m experiments.costs.host_overhead
    python -m experiments.costs.host_overhead --num_seqs=16,64,256 --block_size=1,16

The engine's loop runs with an executor that computes nothing: it builds every array that the device
would get and answers with a constant token, so the times are the host's share alone. Sequences have
prompts and outputs of random lengths; as they finish, new ones are admitted.

Expect ten seconds. --out_dir gets results.json, results.csv and host_overhead.png.
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from experiments.lib import Options, figures, grid, option, report, run
from experiments.lib.fake_devices import endless_requests, make_loop


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    num_seqs: tuple[int, ...] = option((16, 64, 256), "Running sequences.", quick=(16, 64), least=1)
    block_size: tuple[int, ...] = option((16,), "Block sizes (tokens).", least=1)
    prompt_tokens: int = option(512, "Prompts have this mean length.", least=2)
    output_tokens: int = option(256, "Outputs have this mean length.", least=2)
    iterations: int = option(1000, "So many iterations are timed.", quick=200, least=1)


def measure(point: tuple[int, int], config: Config) -> dict[str, Any]:
    """Milliseconds of host time per iteration, with (num_seqs, block size) all the time."""
    num_seqs, block_size = point
    lengths = config.prompt_tokens, config.output_tokens
    core, device = make_loop(num_seqs, *lengths, block_size=block_size)
    scheduler = core.scheduler
    # Enough to keep the queue filled to the end.
    total = num_seqs * (2 + 2 * config.iterations // config.output_tokens)
    backlog = list(islice(endless_requests(config.seed, *lengths), total))
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
    return {
        "num_seqs": num_seqs,
        "block_size": block_size,
        "iterations": len(all_s),
        # Medians over iterations that only decode; `arrays_ms` is the part that builds the arrays.
        "decode_ms": 1e3 * statistics.median(decode_s),
        "decode_p99_ms": 1e3 * float(np.quantile(decode_s, 0.99)),
        "arrays_ms": 1e3 * statistics.median(arrays_s),
        "mean_ms": 1e3 * statistics.fmean(all_s),  # over all, with admissions, prefills and ends
        "admit_ms": 1e3 * admit_s,  # to queue, admit and prefill the first num_seqs prompts
    }


def main(config: Config) -> None:
    points = [(n, size) for size in config.block_size for n in config.num_seqs]
    rows = grid(partial(measure, config=config), points, config, unit="case")
    report("Host time per iteration", rows, config)
    labels = "running sequences", "host ms per decode iteration"
    with figures.panel(config.out_dir, "host_overhead.png", *labels, ylim=(0, None)) as axes:
        for name, what in (("decode_ms", ""), ("arrays_ms", ", arrays")):
            label = "block {block_size}" + what
            figures.lines(axes, figures.series(rows, "num_seqs", name, label.format_map))


if __name__ == "__main__":
    run(main, Config)
