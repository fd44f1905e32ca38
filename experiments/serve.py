"""Serves a workload with a real model over a paged KV cache, and reports what it measured.

    python -m experiments.serve
    python -m experiments.serve --quick
    python -m experiments.serve --workload=azure --trace=conv.csv --arrivals=trace --speedup=10
    python -m experiments.serve --workload=lengths --arrivals=poisson --rate=2 --num_requests=200
    python -m experiments.serve --workload=prompts --prompt="Why is the sky blue?"
    python -m experiments.serve --n=4 --temperature=0.8
    python -m experiments.serve --beam_width=4 --enable_prefix_caching=false
    python -m experiments.serve --num_blocks=160 --preemption_mode=swap --chrome_trace
    python -m experiments.serve --num_blocks=160 --memory_policy=orca_max
    python -m experiments.serve --arrivals=poisson --rate=4 --max_num_waiting=8 --timeout_s=20

The first command answers 32 ShareGPT prompts with SmolLM2-135M-Instruct, in about a minute on two
CPU cores; the first start compiles for half a minute more. Requests arrive in real time.

Expect a few completions, then tables: throughput, batch size, preemptions, host share; latencies
from arrival on; where the KV slots went; which requests failed, and why. --out_dir gets

    results.json      flags, versions, device, every figure
    requests.jsonl    a line a request: lengths, times, text, token ids
    steps.jsonl       a line an iteration: times, batch, KV slots
    timeline.png      batch size and KV use over time
    occupancy.png     what the blocks of the pool held over time
    summary.md        the tables
    trace.json        --chrome_trace: open it in https://ui.perfetto.dev
    iterations.jsonl  --iteration_log: as steps.jsonl, written while it runs
    profile/          --profile: JAX's own profile, for XProf or Perfetto

Bad input ends it before anything runs, with one line and exit code 2.
"""
# ruff: noqa: E402 - the clock starts before the imports, which take seconds.

import time

_STARTED_S = time.perf_counter()

import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax

from experiments.lib import Options, option, reporting, run
from experiments.lib.driver import require_fitting, serve
from experiments.lib.options import as_dict
from experiments.lib.serving_figures import request_rows, run_figures
from experiments.lib.serving_options import EngineOptions, WorkloadOptions, engine_facts
from experiments.lib.serving_report import (
    plot_occupancy,
    plot_timeline,
    print_completions,
    summary,
    tables,
)
from paged_jax import Engine
from paged_jax.observability.chrome_trace import ChromeTrace
from paged_jax.observability.observer import IterationLog, watch
from paged_jax.observability.profiler import iteration_mark, profile
from paged_jax.observability.prometheus import start_metrics_server


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Options):
    warm_up: Literal["background", "before"] = option(
        "background", "Steps are compiled while requests are served, or all of them before."
    )
    metrics_port: int | None = option(
        None,
        "Prometheus metrics are at this port of 127.0.0.1; 0: a free one.",
        least=0,
        most=65535,
    )
    chrome_trace: bool = option(False, "Write a timeline, trace.json.")
    iteration_log: bool = option(False, "Write iterations.jsonl while the experiment runs.")
    profile: bool = option(False, "Take a profile with jax.profiler.")
    show: int = option(3, "This many completions are printed.", least=0)


def main(config: ServeConfig, asked: WorkloadOptions, answering: EngineOptions) -> None:
    out_dir = Path(config.out_dir)
    params = asked.sampling_params()
    engine = answering.make_engine(seed=config.seed)
    try:
        workload = asked.make_workload(engine, seed=config.seed)
        require_fitting(engine, workload.requests, params)
        for note in workload.notes:
            print(note)
        if config.warm_up == "before":
            engine.warm_up()
        with observed(engine, config):
            served = serve(
                engine,
                workload.requests,
                params,
                priorities=workload.priorities,
                timeout_s=workload.timeout_s,
                mark=iteration_mark if config.profile else nullcontext,
            )
        engine.warm_up()  # what is still to come, so that the next start finds it on disk
    finally:
        engine.close()  # or an error would wait for steps that nobody needs

    figures = run_figures(served, engine, _STARTED_S)
    results = {
        "flags": as_dict(config, asked, answering),
        "environment": reporting.environment(),
        "engine": engine_facts(engine),
        "notes": workload.notes,
        **figures,
        "metrics": {name: n for name, n in engine.metrics().items() if "_bucket{" not in name},
    }
    what = f"{len(workload.requests)} requests ({asked.workload})"
    title = f"{engine.config.name}: {what} on {jax.devices()[0].device_kind}"
    parts = tables(figures)
    command = f"python -m experiments.serve {shlex.join(sys.argv[1:])}".strip()
    reporting.write_json(out_dir, "results.json", results)
    reporting.write_jsonl(out_dir, "requests.jsonl", request_rows(served))
    steps = (replace(step, start_s=step.start_s - served.start_s) for step in served.steps)
    reporting.write_jsonl(out_dir, "steps.jsonl", steps)
    (out_dir / "summary.md").write_text(summary(title, command, workload.notes, parts))
    plot_timeline(served, out_dir, title)
    plot_occupancy(served, engine, out_dir, title)

    print()
    print_completions(served, config.show)
    print(title)
    for name, columns, rows in parts:
        reporting.print_table(name, columns, rows)


@contextmanager
def observed(engine: Engine, config: ServeConfig) -> Iterator[None]:
    """What the options want to see of the engine is written or served while this runs."""
    out_dir = Path(config.out_dir)
    with ExitStack() as stack:
        if config.metrics_port is not None:
            server = stack.enter_context(closing(start_metrics_server(engine, config.metrics_port)))
            print(f"Metrics are at http://127.0.0.1:{server.port}/metrics", flush=True)
        if config.iteration_log:
            stack.enter_context(watch(engine.core, IterationLog(out_dir / "iterations.jsonl")))
        if config.chrome_trace:
            stack.enter_context(
                watch(engine.core, ChromeTrace(out_dir / "trace.json", engine.core))
            )
        if config.profile:
            stack.enter_context(profile(out_dir / "profile"))
        yield


if __name__ == "__main__":
    run(main, ServeConfig, WorkloadOptions, EngineOptions)
