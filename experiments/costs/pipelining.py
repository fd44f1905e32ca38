"""What pipelining host and device gains: iterations planned while the device runs, or one by one.

    python -m experiments.costs.pipelining
    python -m experiments.costs.pipelining --num_seqs=64,256 --device_ms=1,5,20 --model=
    python -m experiments.costs.pipelining --quick

Two kinds of devices, each served one by one and pipelined, in turn, round by round, so that a noisy
machine slows both:

- A simulated one that sleeps for a given time per iteration, as a GPU leaves the host alone. The
  scheduler, the memory manager and the device's arrays are real; text is not in it. It shows what a
  GPU of that speed would gain, and is no measurement of one.
- The model on JAX's default device, in a whole engine. On a CPU the "device" computes on the same
  cores that plan the next iteration, so that there is little to gain.

Expect a table in about five minutes on two CPU cores: output tokens/s of both, the median ratio of
the rounds with its quartiles, and how many iterations were planned ahead. --out_dir gets
results.json, results.csv and pipelining.png.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from absl import flags
from tqdm import tqdm

from experiments.lib import reporting
from experiments.lib.fake_devices import endless_requests, make_loop
from experiments.lib.paired import in_turn, ratio_spread
from paged_jax import Engine, SamplingParams
from paged_jax.loading import LoadedModel, load_model
from paged_jax.observability.observer import IterationStats

_NUM_SEQS = flags.DEFINE_list("num_seqs", ["16", "64", "256"], "Sequences that run, simulated.")
_DEVICE_MS = flags.DEFINE_list(
    "device_ms", ["1", "4", "16"], "Milliseconds that a simulated device takes per iteration."
)
_MODEL = flags.DEFINE_string("model", "smollm2", "A model's name or path; empty: none is run.")
_MODEL_SEQS = flags.DEFINE_list("model_seqs", ["1", "8"], "Sequences that run on the model.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 128, "Mean prompt length.", lower_bound=2)
_OUTPUT_TOKENS = flags.DEFINE_integer("output_tokens", 128, "Mean output length.", lower_bound=2)
_ITERATIONS = flags.DEFINE_integer(
    "iterations", 150, "Iterations of a simulated round.", lower_bound=1
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds of each kind.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths and prompts.", lower_bound=0)
_QUICK = flags.DEFINE_bool(
    "quick", False, "64 sequences and 4 ms; 2 on the model; rounds of 50 iterations."
)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/pipelining", "Where the results go.")

BLOCK_SIZE = 16


class Case(NamedTuple):
    """One row of the table; rates are medians of the rounds."""

    device: str
    num_seqs: int
    device_ms: float  # per iteration, one by one
    host_ms: float  # likewise: what the device waits for
    one_by_one: float  # output tokens/s
    pipelined: float
    speedup: float  # median over the rounds
    low: float  # quartiles of the same
    high: float
    ahead: float  # percent of the pipelined iterations that were planned ahead


# (output tokens/s, the statistics of the iterations) of a round
Round = Callable[[], tuple[float, list[IterationStats]]]


def compare(device: str, num_seqs: int, one_by_one: Round, pipelined: Round, rounds: int) -> Case:
    """Run both in turn."""
    rates: dict[Round, list[float]] = {one_by_one: [], pipelined: []}
    stats: dict[Round, list[IterationStats]] = {one_by_one: [], pipelined: []}
    for _, run in in_turn(one_by_one, pipelined, rounds):
        rate, iterations = run()
        rates[run].append(rate)
        stats[run] += iterations
    low, median, high = ratio_spread(rates[pipelined], rates[one_by_one])
    device_s = float(np.mean([each.device_s for each in stats[one_by_one]]))
    wall_s = float(np.mean([each.wall_s for each in stats[one_by_one]]))
    return Case(
        device,
        num_seqs,
        device_ms=1e3 * device_s,
        host_ms=1e3 * (wall_s - device_s),
        one_by_one=float(np.median(rates[one_by_one])),
        pipelined=float(np.median(rates[pipelined])),
        speedup=median,
        low=low,
        high=high,
        ahead=100 * float(np.mean([each.is_ahead for each in stats[pipelined]])),
    )


def simulated_round(num_seqs: int, device_ms: int, iterations: int, *, is_pipelined: bool) -> Round:
    """Rounds of a loop in which ``num_seqs`` sequences run all the time."""
    lengths = {"mean_prompt": _PROMPT_TOKENS.value, "mean_output": _OUTPUT_TOKENS.value}
    core, _ = make_loop(
        num_seqs,
        block_size=BLOCK_SIZE,
        device_s=device_ms / 1e3,
        is_pipelined=is_pipelined,
        **lengths,
    )
    stats: list[IterationStats] = []
    core.on_iteration = stats.append
    requests = endless_requests(_SEED.value, **lengths)

    def step() -> None:
        while core.scheduler.num_waiting < num_seqs:  # so that somebody always waits
            core.scheduler.add(next(requests))
        core.report(core.step())

    while core.scheduler.num_running < num_seqs:
        step()

    def run() -> tuple[float, list[IterationStats]]:
        step()  # what was in flight while the other loop ran has cost nothing
        stats.clear()
        start = time.perf_counter()
        for _ in range(iterations):
            step()
        elapsed = time.perf_counter() - start
        return sum(each.num_sampled for each in stats) / elapsed, list(stats)

    return run


def model_round(model: LoadedModel, num_seqs: int, *, is_pipelined: bool) -> Round:
    """Rounds of an engine: twice as many requests as run at a time, each round the same."""
    rng = np.random.default_rng(_SEED.value)
    vocab_size = model.config.vocab_size
    prompts, params = [], []
    for seed in range(2 * num_seqs):
        length = int(rng.integers(1, 2 * _PROMPT_TOKENS.value))
        prompts.append(rng.integers(0, vocab_size, length).tolist())
        max_tokens = int(rng.integers(1, 2 * _OUTPUT_TOKENS.value))
        params.append(SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True))
    engine = Engine(
        model,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(64, num_seqs),
        max_model_len=2 * (_PROMPT_TOKENS.value + _OUTPUT_TOKENS.value),
        max_prefill_seqs=min(16, num_seqs),
        enable_prefix_caching=False,  # each round has the same prompts
        warm_up=False,
        pipelined=is_pipelined,
    )
    stats: list[IterationStats] = []
    engine.core.on_iteration = stats.append

    def run() -> tuple[float, list[IterationStats]]:
        stats.clear()
        start = time.perf_counter()
        engine.generate(prompts, params, progress=False)
        elapsed = time.perf_counter() - start
        return sum(each.num_sampled for each in stats) / elapsed, list(stats)

    run()  # compiles what it needs
    return run


def plot(cases: list[Case], path: str) -> None:
    """The gain of each case, with its quartiles."""
    figure, axes = plt.subplots(figsize=(7, 1.5 + 0.35 * len(cases)), layout="constrained")
    at = np.arange(len(cases))[::-1]
    speedups = np.array([[case.low, case.speedup, case.high] for case in cases])
    errors = np.abs(speedups[:, [0, 2]] - speedups[:, [1]]).T
    axes.barh(at, speedups[:, 1], xerr=errors, color="#4c72b0", ecolor="black", capsize=2)
    axes.axvline(1, color="black", linewidth=0.8)
    names = [f"{c.device}, {c.device_ms:.3g} ms, {c.num_seqs} sequences" for c in cases]
    axes.set_yticks(at, names)
    axes.set(xlabel="output tokens/s, pipelined / one by one")
    figure.savefig(path, dpi=150)


def main() -> None:
    is_quick = _QUICK.value
    num_seqs = [64] if is_quick else reporting.integers(_NUM_SEQS, 1)
    device_ms = [4] if is_quick else reporting.integers(_DEVICE_MS, 1)
    model_seqs = [2] if is_quick else reporting.integers(_MODEL_SEQS, 1)
    iterations = 50 if is_quick else _ITERATIONS.value
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    model = load_model(_MODEL.value, "float32") if _MODEL.value else None
    kinds: list[tuple[str, int, Callable[..., Round]]] = [
        ("simulated", n, partial(simulated_round, n, ms, iterations))
        for ms in device_ms
        for n in num_seqs
    ]
    if model is not None:
        device = reporting.environment()["device_kind"]
        kinds += [(device, n, partial(model_round, model, n)) for n in model_seqs]
    cases = [
        compare(device, n, make(is_pipelined=False), make(is_pipelined=True), _ROUNDS.value)
        for device, n, make in tqdm(kinds, desc="pipelining", unit="case")
    ]
    rows = [case._asdict() for case in cases]
    reporting.report_cases("One by one and pipelined", rows, out_dir, _NUM_SEQS)
    plot(cases, str(out_dir / "pipelining.png"))
    print("Simulated devices sleep: what a GPU of that speed would gain, not a measurement of one.")
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
