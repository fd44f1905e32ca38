"""What observing costs an iteration: metrics, timeline and iteration log.

    python -m experiments.costs.observer_cost
    python -m experiments.costs.observer_cost --num_seqs=16,256 --iterations=5000
    python -m experiments.costs.observer_cost --quick

The engine's loop runs without a device: an executor answers with a constant token. Sequences have
outputs of random lengths; as they end, new ones are admitted. Each observer is timed by itself, in
all that it is called for. Metrics are always on; the others are if asked for.

Expect a table in half a minute: microseconds of CPU time per iteration. --out_dir gets
results.json, results.csv and observer_cost.png.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from experiments.lib import reporting
from paged_jax.config import EngineConfig
from paged_jax.engine.core import EngineCore
from paged_jax.engine.delivery import Delivery
from paged_jax.engine.records import RequestRecord
from paged_jax.executor.interface import Executor, StepResult
from paged_jax.memory.block_manager import BlockManager
from paged_jax.observability.chrome_trace import ChromeTrace
from paged_jax.observability.metrics import Metrics
from paged_jax.observability.observer import IterationLog, Observer, watch
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler

_NUM_SEQS = flags.DEFINE_list("num_seqs", ["16", "64", "256"], "Sequences that run at a time.")
_ITERATIONS = flags.DEFINE_integer("iterations", 2000, "Iterations timed.", lower_bound=1)
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "Prompt length.", lower_bound=1)
_OUTPUT_TOKENS = flags.DEFINE_integer("output_tokens", 256, "Mean output length.", lower_bound=2)
_SEED = flags.DEFINE_integer("seed", 0, "Of the lengths.", lower_bound=0)
_QUICK = flags.DEFINE_bool("quick", False, "200 iterations.")
_OUT_DIR = flags.DEFINE_string("out_dir", "out/observer_cost", "Where the results go.")

BLOCK_SIZE = 16


class ConstantExecutor(Executor):
    """Answers with the same token at once."""

    def __init__(self, memory: BlockManager):
        self._memory = memory

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self._memory.take_copies()
        n = batch.num_samples
        return StepResult([7] * n, [None] * n, 0.0)


class NoText:
    """A tokenizer whose tokens say nothing."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return ""


class Timed(Observer):
    """Passes everything on to an observer and adds up the CPU seconds that it takes."""

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


def requests() -> Iterator[Request]:
    """As many as are asked for."""
    rng = np.random.default_rng(_SEED.value)
    number = 0
    while True:
        params = SamplingParams(max_tokens=int(rng.integers(1, 2 * _OUTPUT_TOKENS.value)))
        prompt = (number,) * _PROMPT_TOKENS.value
        yield Request(f"request-{number}", prompt, params, time.perf_counter(), seed=number)
        number += 1


def run_case(num_seqs: int, num_iterations: int, out_dir: Path) -> list[dict[str, object]]:
    """A row for each observer, and one for the whole loop; µs per iteration."""
    max_len = _PROMPT_TOKENS.value + 2 * _OUTPUT_TOKENS.value
    memory = BlockManager(num_seqs * -(-max_len // BLOCK_SIZE) + 1, BLOCK_SIZE)
    scheduler = Scheduler(
        memory,
        EngineConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs * _PROMPT_TOKENS.value,
            max_model_len=max_len,
            max_prefill_seqs=num_seqs,
        ),
        eos_token_ids=(),
    )
    core = EngineCore(scheduler, ConstantExecutor(memory))
    tokenizer: Any = NoText()
    delivery = Delivery(core, tokenizer)
    arriving = requests()

    def turn() -> None:
        while scheduler.num_running + scheduler.num_waiting < num_seqs:
            request = next(arriving)
            core.add(request)
            delivery.add(RequestRecord.of(request, None, tokenizer, streams=False, on_output=None))
        delivery.advance()
        delivery.take_outbox()

    observers = {
        "metrics": Timed(Metrics(scheduler)),
        "timeline": Timed(ChromeTrace(out_dir / "trace.json", core)),
        "iteration log": Timed(IterationLog(out_dir / "iterations.jsonl")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("the loop", *observers)}
    with watch(core, *observers.values()):
        for _ in tqdm(range(num_iterations), desc=f"{num_seqs} sequences", unit="iteration"):
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


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    """Microseconds against running sequences."""
    # Imported here, so that --help does not wait for it.
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in dict.fromkeys(case["of"] for case in cases):
        chosen = [case for case in cases if case["of"] == name]
        sizes = [case["num_seqs"] for case in chosen]
        axes.plot(sizes, [case["mean_us"] for case in chosen], "o-", label=name)
    axes.set(xlabel="running sequences", ylabel="mean CPU µs per iteration")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    num_seqs = reporting.integers(_NUM_SEQS, 1)
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    iterations = 200 if _QUICK.value else _ITERATIONS.value
    cases = [row for n in num_seqs for row in run_case(n, iterations, out_dir)]
    reporting.report_cases("CPU time per iteration", cases, out_dir, _NUM_SEQS)
    plot(cases, out_dir / "observer_cost.png")
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
