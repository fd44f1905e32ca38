"""A run as people read it: completions, tables, summary.md, and pictures over time."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lib import reporting
from experiments.lib.driver import ServedRun
from experiments.lib.serving_figures import batch_size
from paged_jax import Engine

# matplotlib is imported where it draws, so that the first completion does not wait for it.

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
    from experiments.lib import figures

    figure, panels = figures.panels(num_panels, size=(9, height), sharex=True)
    yield list(panels[:, 0])
    figure.suptitle(title)
    for axes in panels[:, 0]:
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False)
    panels[-1, 0].set_xlabel("time (s)")
    figures.save(figure, path.parent, path.name)
