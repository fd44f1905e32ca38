"""What the kernels are to reach on an H200 or its like, and what they reached."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from experiments.device_check.plan import BASELINE, FULL_BATCH, LONG_CONTEXT, OURS
from experiments.latency.measure import Row
from experiments.latency.shapes import Shape


class Goal(NamedTuple):
    """A figure of a kernel against its target. None: a row that it needs is missing."""

    kernel: str
    what: str
    target: str
    measured: float | None
    met: bool | None


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """For each of our kernels."""

    def find(name: str, shape: Shape) -> Row | None:
        return next((r for r in rows if r.implementation == name and _is_of(r, shape)), None)

    def copy_fraction(name: str, shape: Shape) -> float | None:
        row = find(name, shape)
        return row and row.copy_fraction

    def over(name: str, other: str) -> float | None:
        """Time of one over that of the other, if both were taken in the same way."""
        mine, theirs = find(name, FULL_BATCH), find(other, FULL_BATCH)
        if mine and theirs and mine.time_us and theirs.time_us and mine.method == theirs.method:
            return mine.time_us / theirs.time_us
        return None

    for name in OURS:
        for shape, least in ((FULL_BATCH, 0.85), (LONG_CONTEXT, 0.6)):
            what = f"of copy bandwidth, batch {shape.batch}, context {shape.context}"
            yield _at_least(name, what, least, copy_fraction(name, shape))
        yield _at_most(name, f"time / {BASELINE}", 1.05, over(name, BASELINE))
        yield _at_least(name, "time of jax_paged / time", 1.3, over("jax_paged", name))
        yield _at_most(name, "time / cudnn_paged", 1.05, over(name, "cudnn_paged"))


def _is_of(row: Row, shape: Shape) -> bool:
    place = (row.geometry, row.batch, row.context, row.queries, row.dtype)
    return place == (
        str(shape.geometry),
        shape.batch,
        shape.context,
        shape.queries,
        shape.dtype,
    ) and row.block_size in (None, shape.block_size)


def _at_least(kernel: str, what: str, least: float, measured: float | None) -> Goal:
    met = None if measured is None else measured >= least
    return Goal(kernel, what, f">= {least:g}", measured, met)


def _at_most(kernel: str, what: str, most: float, measured: float | None) -> Goal:
    met = None if measured is None else measured <= most
    return Goal(kernel, what, f"<= {most:g}", measured, met)
