"""Serves a workload with a real model over a paged KV cache, and reports what it measured.

    python -m experiments.serve
    python -m experiments.serve --workload=azure --trace=conv.csv --arrivals=trace --speedup=10
    python -m experiments.serve --workload=lengths --arrivals=poisson --rate=2 --num_requests=200
    python -m experiments.serve --workload=prompts --prompt="Why is the sky blue?"
    python -m experiments.serve --n=4 --temperature=0.8
    python -m experiments.serve --beam_width=4 --enable_prefix_caching=false
    python -m experiments.serve --num_blocks=160 --preemption_mode=swap --chrome_trace
    python -m experiments.serve --num_blocks=160 --memory_policy=orca_max
    python -m experiments.serve --arrivals=poisson --rate=4 --max_num_waiting=8 --timeout_s=20

The first command answers 32 ShareGPT prompts with SmolLM2-135M-Instruct. It ends in about a minute
on two CPU cores; the first start compiles for half a minute more. Requests are added when they
arrive, in real time. A progress bar shows tokens/s and how full the KV pool is.

Expect a few completions, then tables: throughput, batch size, preemptions, host share; latencies
from each request's arrival on; where the KV slots went; which requests were refused, timed out or
failed, and why. --out_dir gets

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
from pathlib import Path

from absl import flags

from experiments.lib import engine_flags, reporting, workload_flags
from experiments.lib.driver import require_fitting, serve
from experiments.lib.engine_flags import engine_facts, make_engine
from experiments.lib.serving_figures import request_rows, run_figures, step_rows
from experiments.lib.serving_plots import plot_occupancy, plot_timeline
from experiments.lib.serving_tables import print_completions, summary, tables
from experiments.lib.workload_flags import SEED, WORKLOAD, lengths, make_workload
from paged_jax import Engine
from paged_jax.observability.chrome_trace import ChromeTrace
from paged_jax.observability.observer import IterationLog, watch
from paged_jax.observability.profiler import iteration_mark, profile
from paged_jax.observability.prometheus import start_metrics_server

engine_flags.define(flags.FLAGS)
for _module in (engine_flags, workload_flags):
    flags.adopt_module_key_flags(_module)

_WARM_UP = flags.DEFINE_enum(
    "warm_up",
    "background",
    ["background", "before"],
    "Compile the steps while serving, those that are needed first; or all of them before, for "
    "figures that no compilation disturbs.",
)

# What is seen of it
_METRICS_PORT = flags.DEFINE_integer(
    "metrics_port",
    None,
    "Serve Prometheus metrics at this port of 127.0.0.1 while it runs; 0: a free one.",
    lower_bound=0,
    upper_bound=65535,
)
_CHROME_TRACE = flags.DEFINE_bool("chrome_trace", False, "Write a timeline, trace.json.")
_ITERATION_LOG = flags.DEFINE_bool("iteration_log", False, "Write iterations.jsonl as it runs.")
_PROFILE = flags.DEFINE_bool("profile", False, "Take a profile with jax.profiler.")
_OUT_DIR = flags.DEFINE_string("out_dir", "out/serve", "Folder for the results.")
_SHOW = flags.DEFINE_integer("show", 3, "How many completions are printed.", lower_bound=0)


def main() -> None:
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    params = workload_flags.sampling_params()
    asked_lengths = lengths()
    engine = make_engine(flags.FLAGS, seed=SEED.value)
    try:
        workload = make_workload(engine, asked_lengths)
        require_fitting(engine, workload.requests, params)
        for note in workload.notes:
            print(note)
        if _WARM_UP.value == "before":
            engine.warm_up()
        with observed(engine, out_dir):
            run = serve(
                engine,
                workload.requests,
                params,
                priorities=workload.priorities,
                timeout_s=workload.timeout_s,
                mark=iteration_mark if _PROFILE.value else nullcontext,
            )
        engine.warm_up()  # what is still to come, so that the next start finds it on disk
    finally:
        engine.close()  # or an error would wait for steps that nobody needs

    environment = reporting.environment()
    figures = run_figures(run, engine, _STARTED_S)
    results = {
        "flags": all_flags(),
        "environment": environment,
        "engine": engine_facts(engine),
        "notes": workload.notes,
        **figures,
        "metrics": {name: n for name, n in engine.metrics().items() if "_bucket{" not in name},
    }
    title = (
        f"{engine.config.name}: {len(workload.requests)} requests ({WORKLOAD.value}) on "
        f"{environment['device_kind']}"
    )
    parts = tables(figures)
    command = f"python -m experiments.serve {shlex.join(sys.argv[1:])}".strip()
    reporting.write_json(out_dir, "results.json", results)
    reporting.write_jsonl(out_dir, "requests.jsonl", request_rows(run))
    reporting.write_jsonl(out_dir, "steps.jsonl", step_rows(run))
    (out_dir / "summary.md").write_text(summary(title, command, workload.notes, parts))
    plot_timeline(run, out_dir / "timeline.png", title)
    plot_occupancy(run, engine, out_dir / "occupancy.png", title)

    print()
    print_completions(run, _SHOW.value)
    print(title)
    for name, columns, rows in parts:
        reporting.print_table(name, columns, rows)
    print(f"Results are in {out_dir}")


@contextmanager
def observed(engine: Engine, out_dir: Path) -> Iterator[None]:
    """What the flags want to see of the engine is written or served while this runs."""
    with ExitStack() as stack:
        if _METRICS_PORT.value is not None:
            server = start_metrics_server(engine, _METRICS_PORT.value)
            stack.enter_context(closing(server))
            print(f"Metrics are at http://127.0.0.1:{server.port}/metrics", flush=True)
        if _ITERATION_LOG.value:
            stack.enter_context(watch(engine.core, IterationLog(out_dir / "iterations.jsonl")))
        if _CHROME_TRACE.value:
            trace = ChromeTrace(out_dir / "trace.json", engine.core)
            stack.enter_context(watch(engine.core, trace))
        if _PROFILE.value:
            stack.enter_context(profile(out_dir / "profile"))
        yield


def all_flags() -> dict[str, object]:
    """Every flag of this experiment, as it was given or by default."""
    return {
        name: value
        for flag in (WORKLOAD, _OUT_DIR)
        for name, value in reporting.flag_values(flag).items()
    } | {name: flags.FLAGS[name].value for name in engine_flags.ENGINE_FLAGS}


if __name__ == "__main__":
    reporting.run(main)
