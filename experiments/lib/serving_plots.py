"""Batch size and KV use over time, as a picture."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.lib.driver import ServedRun
from experiments.lib.serving_figures import batch_size
from paged_jax.engine.engine import Engine


class Occupancy(NamedTuple):
    """Blocks after an iteration, and when, in seconds since the run's start."""

    time_s: float
    used: int  # held by sequences that run, or pinned
    cached: int  # free, but they keep a prefix
    free: int  # all others of the pool
    host: int  # of the host's pool, held by those swapped out


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


def plot_occupancy(run: ServedRun, engine: Engine, path: str | Path, title: str) -> None:
    """Blocks in use, cached and free; below, those of the host's pool, if it has any."""
    # Imported here, so that the first completion does not wait for it.
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    memory = engine.core.scheduler.memory
    entries = list(occupancy(run, memory.num_total_blocks))
    times = [entry.time_s for entry in entries]
    num_rows = 2 if memory.num_swap_blocks else 1
    figure, axes = plt.subplots(
        num_rows, 1, sharex=True, squeeze=False, figsize=(9, 3.5 * num_rows), layout="constrained"
    )
    figure.suptitle(title)
    pool = axes[0, 0]
    pool.stackplot(
        times,
        [entry.used for entry in entries],
        [entry.cached for entry in entries],
        labels=["in use", "cached"],
        step="post",
    )
    pool.axhline(memory.num_total_blocks, color="0.4", linestyle="--", label="pool")
    for name, color, field in (
        ("preemption", "r", "num_preempted"),
        ("swapped in", "g", "num_resumed"),
    ):
        marked = [step.start_s - run.start_s for step in run.steps if getattr(step, field)]
        if marked:
            height = memory.num_total_blocks
            pool.plot(marked, [height] * len(marked), f"{color}|", markersize=12, label=name)
    pool.set_ylabel("blocks")
    if memory.num_swap_blocks:
        host = axes[1, 0]
        host.step(times, [entry.host for entry in entries], where="post", label="swapped out")
        host.axhline(memory.num_swap_blocks, color="0.4", linestyle="--", label="host pool")
        host.set_ylabel("host blocks")
    for each in axes[:, 0]:
        each.set_ylim(bottom=0)
        each.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False)
    axes[-1, 0].set_xlabel("time (s)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


# Bottom to top; what is left of the pool is free.
_KINDS = ("token states", "reserved", "internal fragmentation", "external fragmentation")


def plot_timeline(run: ServedRun, path: str | Path, title: str) -> None:
    """Above, the sequences in the batch and those that wait; below, what holds the KV slots."""
    # Imported here, so that the first completion does not wait for it.
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    points = list(timeline(run))
    times = [point[0] for point in points]
    figure, (batch, memory) = plt.subplots(2, 1, sharex=True, figsize=(9, 6), layout="constrained")
    figure.suptitle(title)

    batch.step(times, [point[1] for point in points], where="post", label="in the batch")
    batch.step(times, [point[2] for point in points], where="post", color="0.6", label="waiting")
    preempted = [step.start_s - run.start_s for step in run.steps if step.num_preempted]
    if preempted:
        batch.plot(preempted, [0] * len(preempted), "r|", markersize=14, label="preemption")
    batch.set_ylabel("sequences")
    batch.yaxis.get_major_locator().set_params(integer=True)

    shares = zip(*(point[3] for point in points), strict=True)
    held = {kind: share for kind, share in zip(_KINDS, shares, strict=True) if any(share)}
    memory.stackplot(times, *held.values(), labels=list(held), step="post")
    memory.set_ylabel("KV slots (% of the pool)")
    memory.set_xlabel("time (s)")
    for axes in (batch, memory):
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


Point = tuple[float, int, int, tuple[float, ...]]


def timeline(run: ServedRun) -> Iterator[Point]:
    """(seconds, batch size, waiting, % of the pool of each kind), each until the next one.

    An iteration after which there is nothing to do is followed by zeros.
    """
    for step in run.steps:
        usage, start_s = step.usage, step.start_s - run.start_s
        slots = (usage.token_states, usage.reserved, usage.internal, usage.external)
        shares = tuple(100 * count / usage.total for count in slots)
        yield start_s, batch_size(step), step.num_waiting, shares
        if not step.num_running and not step.num_waiting:
            yield start_s + step.wall_s, 0, 0, (0.0,) * len(_KINDS)
