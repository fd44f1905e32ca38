"""What pipelining host and device gains: iterations planned while the device runs, or one by one.

    python -m experiments.costs.pipelining
    python -m experiments.costs.pipelining --num_seqs=64,256 --device_ms=1,5,20 --model=
    python -m experiments.costs.pipelining --quick

Two kinds of devices serve one by one and pipelined, in turn, so that a noisy machine slows both:

- A simulated one that sleeps for a given time per iteration, as a GPU leaves the host alone. The
  scheduler, the memory manager and the device's arrays are real.
- The model on JAX's default device, in a whole engine. On a CPU the "device" computes on the same
  cores that plan the next iteration, so that there is little to gain.

Expect about five minutes on two CPU cores.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from experiments.lib import Options, figures, grid, option, report, run
from experiments.lib.fake_devices import endless_requests, make_loop
from experiments.lib.paired import in_turn, ratio_spread
from experiments.lib.reporting import environment
from paged_jax import Engine, SamplingParams
from paged_jax.loading import load_model
from paged_jax.observability.observer import IterationStats


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    num_seqs: tuple[int, ...] = option((16, 64, 256), "Simulated sequences.", quick=(64,), least=1)
    device_ms: tuple[int, ...] = option(
        (1, 4, 16), "A simulated device takes so long per iteration (ms).", quick=(4,), least=1
    )
    model: str = option("smollm2", "The model's name or path. With an empty one none is run.")
    model_seqs: tuple[int, ...] = option((1, 8), "The model's sequences.", quick=(2,), least=1)
    prompt_tokens: int = option(128, "Prompts have this mean length.", least=2)
    output_tokens: int = option(128, "Outputs have this mean length.", least=2)
    iterations: int = option(150, "A simulated round has so many.", quick=50, least=1)
    rounds: int = option(3, "Each kind of loop runs so many rounds.", least=1)


BLOCK_SIZE = 16


class Point(NamedTuple):
    num_seqs: int
    device_ms: int | None  # None: the model on JAX's device


Timed = tuple[float, list[IterationStats]]  # (output tokens/s, iterations) of a round
Round = Callable[[], Timed]


def measure(point: Point, config: Config) -> dict[str, Any]:
    """Run both kinds of loop in turn."""
    make = model_round if point.device_ms is None else simulated_round
    one_by_one, pipelined = (make(point, config, is_pipelined=each) for each in (False, True))
    rates: dict[Round, list[float]] = defaultdict(list)
    stats: dict[Round, list[IterationStats]] = defaultdict(list)
    for _, play in in_turn((one_by_one, pipelined), config.rounds):
        rate, iterations = play()
        rates[play].append(rate)
        stats[play] += iterations
    low, median, high = ratio_spread(rates[pipelined], rates[one_by_one])
    device_s = float(np.mean([each.device_s for each in stats[one_by_one]]))
    wall_s = float(np.mean([each.wall_s for each in stats[one_by_one]]))
    return {
        "device": environment()["device_kind"] if point.device_ms is None else "simulated",
        "num_seqs": point.num_seqs,
        "device_ms": 1e3 * device_s,  # per iteration, one by one
        "host_ms": 1e3 * (wall_s - device_s),  # the same: the device waits for so long
        "one_by_one": float(np.median(rates[one_by_one])),  # output tokens/s
        "pipelined": float(np.median(rates[pipelined])),
        "speedup": median,  # over the rounds
        "low": low,  # quartiles of the same
        "high": high,
        # Percent of the pipelined iterations that were planned ahead.
        "ahead": 100 * float(np.mean([each.is_ahead for each in stats[pipelined]])),
    }


def simulated_round(point: Point, config: Config, *, is_pipelined: bool) -> Round:
    """Rounds of a loop in which ``num_seqs`` sequences run all the time."""
    assert point.device_ms is not None
    lengths = config.prompt_tokens, config.output_tokens
    device: dict[str, Any] = {"device_s": point.device_ms / 1e3, "is_pipelined": is_pipelined}
    core, _ = make_loop(point.num_seqs, *lengths, block_size=BLOCK_SIZE, **device)
    stats: list[IterationStats] = []
    core.on_iteration = stats.append
    requests = endless_requests(config.seed, *lengths)

    def steps(count: int) -> None:
        for _ in range(count):
            while core.scheduler.num_waiting < point.num_seqs:  # so that the queue is never empty
                core.scheduler.add(next(requests))
            core.report(core.step())

    while core.scheduler.num_running < point.num_seqs:
        steps(1)

    def play() -> Timed:
        steps(1)  # the batch that was in flight while the other loop ran has cost nothing
        return timed(partial(steps, config.iterations), stats)

    return play


def model_round(point: Point, config: Config, *, is_pipelined: bool) -> Round:
    """Rounds of an engine: twice as many requests as run at a time, each round the same."""
    model, num_seqs = load(config.model, "float32"), point.num_seqs
    rng = np.random.default_rng(config.seed)
    prompts, params = [], []
    for seed in range(2 * num_seqs):
        length = int(rng.integers(1, 2 * config.prompt_tokens))
        prompts.append(rng.integers(0, model.config.vocab_size, length).tolist())
        max_tokens = int(rng.integers(1, 2 * config.output_tokens))
        params.append(SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True))
    engine = Engine(
        model,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(64, num_seqs),
        max_model_len=2 * (config.prompt_tokens + config.output_tokens),
        max_prefill_seqs=min(16, num_seqs),
        enable_prefix_caching=False,  # each round has the same prompts
        warm_up=False,
        pipelined=is_pipelined,
    )
    stats: list[IterationStats] = []
    engine.core.on_iteration = stats.append
    generate = partial(engine.generate, prompts, params, progress=False)
    generate()  # compiles what it needs
    return partial(timed, generate, stats)


load = cache(load_model)


def timed(work: Callable[[], object], stats: list[IterationStats]) -> Timed:
    """The rate and the iterations of some work, whose iterations go into `stats`."""
    stats.clear()
    start = time.perf_counter()
    work()
    elapsed = time.perf_counter() - start
    return sum(each.num_sampled for each in stats) / elapsed, list(stats)


def plot(rows: list[dict[str, Any]], out_dir: str) -> None:
    """The gain of each case, with its quartiles."""
    at = np.arange(len(rows))[::-1]
    low, speedup, high = np.array([[row["low"], row["speedup"], row["high"]] for row in rows]).T
    label = "{device}, {device_ms:.3g} ms, {num_seqs} sequences"
    xlabel, size = "output tokens/s, pipelined / one by one", (7, 1.5 + 0.35 * len(rows))
    with figures.panel(out_dir, "pipelining.png", xlabel, size=size) as axes:
        errors = speedup - low, high - speedup
        axes.barh(at, speedup, xerr=errors, ecolor="black", capsize=2)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(at, [label.format_map(row) for row in rows])


def main(config: Config) -> None:
    points = [Point(n, ms) for ms in config.device_ms for n in config.num_seqs]
    points += [Point(n, None) for n in config.model_seqs if config.model]
    rows = grid(partial(measure, config=config), points, config, unit="case")
    report("One by one and pipelined", rows, config)
    plot(rows, config.out_dir)
    print("Simulated devices sleep: what a GPU of that speed would gain, not a measurement of one.")


if __name__ == "__main__":
    run(main, Config)
