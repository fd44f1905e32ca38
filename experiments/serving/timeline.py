"""Batch size and KV use over time, as a picture."""

from collections.abc import Iterator
from pathlib import Path

from experiments.serving.driver import ServedRun
from experiments.serving.figures import batch_size

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
