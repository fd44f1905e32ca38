"""What observing costs an iteration: metrics, timeline and iteration log.

    python -m experiments.costs.observer_cost
    python -m experiments.costs.observer_cost --num_seqs=16,256 --iterations=5000
    python -m experiments.costs.observer_cost --quick

The engine's loop runs without a device: an executor answers with a constant token. Sequences have
prompts and outputs of random lengths; as they end, new ones are admitted. Each observer is timed by
itself, in all of its calls. Metrics are always on; the others are on if asked for.

Expect half a minute. --out_dir gets results.json, results.csv and observer_cost.png.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.lib import Options, figures, grid, option, report, run
from experiments.lib.fake_devices import ConstantDevice, endless_requests, make_loop
from paged_jax.engine.delivery import Delivery
from paged_jax.engine.records import RequestRecord
from paged_jax.observability.chrome_trace import ChromeTrace
from paged_jax.observability.metrics import Metrics
from paged_jax.observability.observer import IterationLog, Observer, watch


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    num_seqs: tuple[int, ...] = option((16, 64, 256), "So many sequences run at a time.", least=1)
    iterations: int = option(2000, "So many iterations are timed.", quick=200, least=1)
    prompt_tokens: int = option(64, "Prompts have this mean length.", least=1)
    output_tokens: int = option(256, "Outputs have this mean length.", least=2)


BLOCK_SIZE = 16


class NoText:
    """A tokenizer without text: tokens decode to nothing."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return ""


class Timed(Observer):
    """Passes all calls on to an observer and adds up the CPU seconds that they take."""

    def __init__(self, observer: Observer):
        self.seconds = 0.0
        self.wants_stats = observer.wants_stats
        self.close = observer.close  # type: ignore[method-assign]
        for name in ("on_request_added", "on_step", "on_request_ended", "on_iteration"):
            setattr(self, name, self._timed(getattr(observer, name)))

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            start = time.thread_time()
            call(*arguments)
            self.seconds += time.thread_time() - start

        return timed


def measure(num_seqs: int, config: Config) -> list[dict[str, Any]]:
    """A row for the loop without observers, and one for each observer: CPU µs per iteration."""
    lengths = config.prompt_tokens, config.output_tokens
    core, _ = make_loop(num_seqs, *lengths, block_size=BLOCK_SIZE)
    scheduler = core.scheduler
    core.executor = ConstantDevice(scheduler.memory)
    tokenizer: Any = NoText()
    delivery = Delivery(core, tokenizer)
    arriving = endless_requests(config.seed, *lengths)

    def turn() -> None:
        while scheduler.num_running + scheduler.num_waiting < num_seqs:
            request = next(arriving)
            request.arrival_time = time.perf_counter()
            core.add(request)
            delivery.add(RequestRecord.of(request, None, tokenizer, streams=False, on_output=None))
        delivery.advance()
        delivery.take_outbox()

    observers = {
        "metrics": Timed(Metrics(scheduler)),
        "timeline": Timed(ChromeTrace(Path(config.out_dir) / "trace.json", core)),
        "iteration log": Timed(IterationLog(Path(config.out_dir) / "iterations.jsonl")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("the loop", *observers)}
    with watch(core, *observers.values()):
        for _ in tqdm(range(config.iterations), unit="iteration", leave=False):
            before = {name: observer.seconds for name, observer in observers.items()}
            start = time.thread_time()
            turn()
            taken = time.thread_time() - start
            for name, observer in observers.items():
                seconds[name].append(observer.seconds - before[name])
                taken -= seconds[name][-1]
            seconds["the loop"].append(taken)
    return [
        {
            "num_seqs": num_seqs,
            "of": name,
            "median_us": 1e6 * float(np.median(values)),
            "mean_us": 1e6 * float(np.mean(values)),
            "p99_us": 1e6 * float(np.quantile(values, 0.99)),
        }
        for name, values in seconds.items()
    ]


def main(config: Config) -> None:
    by_size = grid(partial(measure, config=config), config.num_seqs, config, unit="case")
    rows = [row for rows in by_size for row in rows]
    report("CPU time per iteration", rows, config)
    labels = "running sequences", "mean CPU µs per iteration"
    with figures.panel(config.out_dir, "observer_cost.png", *labels, ylim=(0, None)) as axes:
        figures.lines(axes, figures.series(rows, "num_seqs", "mean_us", itemgetter("of")))


if __name__ == "__main__":
    run(main, Config)
