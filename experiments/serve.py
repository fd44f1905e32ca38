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
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from experiments.lib import Options, option, reporting, run
from experiments.lib.driver import ServedRun, require_fitting, serve
from experiments.lib.options import as_dict
from experiments.lib.serving_figures import batch_size, request_rows, run_figures
from experiments.lib.serving_options import EngineOptions, WorkloadOptions, engine_facts
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


# The run as people read it: tables, completions, summary.md, pictures over time

Row = tuple[object, ...]
Table = tuple[str, tuple[str, ...], list[Row]]  # title, columns, rows

SPREAD = ("mean", "p50", "p99")
KV_NAMES = {
    "token_states": "token states",
    "reserved": "reserved",
    "internal": "internal fragmentation",
    "external": "external fragmentation",
    "free": "free",
}
HELD = tuple(key for key in KV_NAMES if key != "free")


def tables(figures: dict[str, Any]) -> list[Table]:
    """Requests and speed, latencies, and the KV slots by what held them.

    Then, if there are any: latencies by priority, and requests that were not served to their end.
    """
    served: list[Row] = [
        ("requests", figures["requests"]),
        ("of which refused", figures["refused"]),
        ("of which timed out", figures["timed_out"]),
        ("of which failed", figures["failed"]),
        ("input tokens", figures["input_tokens"]),
        ("output tokens", figures["output_tokens"]),
        ("output tokens/s", figures["output_tokens_per_s"]),
        ("wall time (s)", figures["wall_s"]),
        ("of which idle (s)", figures["idle_s"]),
        ("iterations", figures["iterations"]),
        ("mean batch size, of iterations", figures["mean_batch_size"]),
        ("mean batch size, over time", figures["mean_batch_size_over_time"]),
        ("preemptions", figures["preemptions"]),
        ("of which by swap", figures["preemptions_by_swap"]),
        ("tokens computed again", figures["recomputed_tokens"]),
        ("blocks swapped out", figures["swapped_out_blocks"]),
        ("found in the prefix cache (%)", _times(100, figures["prefix_hit_rate"])),
        ("blocks copied on write", figures["sharing"].copies),
        ("host share of the step (%)", _times(100, figures["host_fraction"])),
        ("host work per iteration (ms)", _times(1e3, figures["host_s_per_iteration"])),
        ("padding in prefill (% of tokens)", _times(100, figures["prefill_padding"])),
        ("compilations after warm-up", figures["compilations_after_warmup"]),
        ("waited for compilation (s)", figures["warm_up_wait_s"]),
        ("first completion after (s, since the start)", figures["first_completion_s"]),
    ]
    latency: dict[str, tuple[str, float]] = {
        "time to first token (s)": ("ttft_s", 1),
        "time per token after the first (ms)": ("tpot_s", 1e3),
        "token to token, all requests (ms)": ("inter_token_s", 1e3),
        "normalised: per output token, waiting included (ms)": ("normalised_latency_s", 1e3),
    }
    latencies = [_spread_row(name, figures[key], factor) for name, (key, factor) in latency.items()]
    usage = figures["kv_usage"] or {}
    slots: list[Row] = [(name, _times(100, usage.get(key))) for key, name in KV_NAMES.items()]
    found: list[Table] = [
        ("Served", ("figure", "value"), served),
        ("Latency", ("of", *SPREAD), latencies),
        ("KV slots", ("held as", "share of the pool over time (%)"), slots),
    ]
    if len(by_priority := figures["ttft_s_by_priority"]) > 1:
        rows = [_spread_row(str(priority), spread) for priority, spread in by_priority.items()]
        found.append(("Time to first token by priority (s)", ("priority", *SPREAD), rows))
    if rows := [tuple(row.values()) for row in figures["shortfalls"]]:
        found.append(("Not served to their end", ("requests that", "why", "requests"), rows))
    return found


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _spread_row(name: str, spread: dict[str, float | None], factor: float = 1.0) -> Row:
    return name, *(_times(factor, value) for value in spread.values())


def print_completions(run: ServedRun, count: int) -> None:
    """The first `count` prompts and what became of them."""
    shortened = partial(textwrap.shorten, width=400, placeholder=" …")
    for served in run.served[:count]:
        prompt = served.request.prompt or f"({served.request.num_prompt_tokens} random tokens)"
        print(f"{served.request_id}: {shortened(prompt)}")
        if served.output is None:
            print(f"  refused: {served.refusal}\n")
            continue
        if served.output.error is not None:
            print(f"  failed: {served.output.error}")
        for completion in served.output.outputs:
            num_tokens, reason = len(completion.token_ids), completion.finish_reason
            print(textwrap.indent(textwrap.fill(shortened(completion.text), 98), "  "))
            print(f"  ({num_tokens} tokens, {reason})\n")


def summary(title: str, command: str, notes: Sequence[str], parts: Sequence[Table]) -> str:
    """The text of `summary.md`."""
    return "\n".join(
        [
            f"# {title}\n",
            f"    {command}\n",
            *(["".join(f"- {note}\n" for note in notes)] if notes else []),
            *(f"## {name}\n\n{reporting.markdown_table(of, rows)}" for name, of, rows in parts),
            "![batch size and KV use over time](timeline.png)\n",
            "![what the blocks held over time](occupancy.png)\n",
        ]
    )


# Batch size and KV slots over time


class TimelinePoint(NamedTuple):
    """What holds from `time_s`, in seconds since the run's start, until the next point."""

    time_s: float
    batch_size: int
    num_waiting: int
    percents: tuple[float, ...]  # of the pool's slots, for each of `HELD`


def timeline(run: ServedRun) -> Iterator[TimelinePoint]:
    """A point for each iteration; zeros follow one after which there is nothing to do."""
    for step in run.steps:
        shares = step.usage.shares()
        percents = tuple(100 * shares[key] for key in HELD)
        start_s = step.start_s - run.start_s
        yield TimelinePoint(start_s, batch_size(step), step.num_waiting, percents)
        if not step.num_running and not step.num_waiting:
            yield TimelinePoint(start_s + step.wall_s, 0, 0, (0.0,) * len(percents))


def plot_timeline(run: ServedRun, out_dir: Path, title: str) -> None:
    """Above, sequences in the batch and waiting ones; below, the KV slots by what holds them."""
    times, sizes, waiting, shares = zip(*timeline(run), strict=True)
    with _over_time(out_dir / "timeline.png", title, 2, height=3) as (batch, memory):
        batch.step(times, sizes, where="post", label="in the batch")
        batch.step(times, waiting, where="post", color="0.6", label="waiting")
        _mark(batch, run, "num_preempted", 0, "r|", "preemption")
        batch.set_ylabel("sequences")
        batch.yaxis.get_major_locator().set_params(integer=True)

        percents = zip(HELD, zip(*shares, strict=True), strict=True)
        held = {KV_NAMES[key]: each for key, each in percents if any(each)}
        memory.stackplot(times, *held.values(), labels=list(held), step="post")
        memory.set_ylabel("KV slots (% of the pool)")


# Blocks over time


class Occupancy(NamedTuple):
    """Blocks after an iteration, and when, in seconds since the run's start."""

    time_s: float
    used: int  # held by sequences that run, or pinned
    cached: int  # free, but they keep a prefix
    free: int  # all others of the pool
    host: int  # of the host's pool, held by sequences that are swapped out


def occupancy(run: ServedRun, num_blocks: int) -> Iterator[Occupancy]:
    """An entry for each iteration on a pool of so many blocks."""
    for step in run.steps:
        yield Occupancy(
            step.start_s + step.wall_s - run.start_s,
            used=num_blocks - step.num_free_blocks,
            cached=step.num_cached_blocks,
            free=step.num_free_blocks - step.num_cached_blocks,
            host=step.num_used_swap_blocks,
        )


def plot_occupancy(run: ServedRun, engine: Engine, out_dir: Path, title: str) -> None:
    """Blocks in use, cached and free; below, the blocks of the host's pool, if it has any."""
    memory = engine.core.scheduler.memory
    num_blocks, num_host_blocks = memory.num_total_blocks, memory.num_swap_blocks
    times, used, cached, _, swapped = zip(*occupancy(run, num_blocks), strict=True)
    num_panels = 2 if num_host_blocks else 1
    with _over_time(out_dir / "occupancy.png", title, num_panels, height=3.5) as (pool, *host):
        pool.stackplot(times, used, cached, labels=["in use", "cached"], step="post")
        pool.axhline(num_blocks, color="0.4", linestyle="--", label="pool")
        _mark(pool, run, "num_preempted", num_blocks, "r|", "preemption")
        _mark(pool, run, "num_resumed", num_blocks, "g|", "swapped in")
        pool.set_ylabel("blocks")
        for axes in host:
            axes.step(times, swapped, where="post", label="swapped out")
            axes.axhline(num_host_blocks, color="0.4", linestyle="--", label="host pool")
            axes.set_ylabel("host blocks")


def _mark(axes: Any, run: ServedRun, counter: str, height: float, style: str, label: str) -> None:
    """A mark at `height` for each iteration that counted something."""
    times = [step.start_s - run.start_s for step in run.steps if getattr(step, counter)]
    if times:
        axes.plot(times, [height] * len(times), style, markersize=14, label=label)


@contextmanager
def _over_time(path: Path, title: str, num_panels: int, height: float) -> Iterator[list[Any]]:
    """The panels of a figure over time, below each other; saved with legends at the end."""
    from experiments.lib import figures  # here, so that the first completion does not wait for it

    figure, panels = figures.panels(num_panels, size=(9, height), sharex=True)
    yield list(panels[:, 0])
    figure.suptitle(title)
    for axes in panels[:, 0]:
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False)
    panels[-1, 0].set_xlabel("time (s)")
    figures.save(figure, path.parent, path.name)


if __name__ == "__main__":
    run(main, ServeConfig, WorkloadOptions, EngineOptions)
