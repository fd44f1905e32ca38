"""The search for a kernel's fastest tuning, and the table that it is entered into."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from pallas_kernels.paged_attention import tuning

# What is tried of each parameter that a kernel's tuning has, and which are varied together.
CHOICES: dict[str, Sequence[int]] = {
    "block_kv": (16, 32, 64, 128, 256),
    "kv_heads": (1, 2, 4, 8),
    "query_columns": (8, 16, 32),
    "block_rows": (16, 32, 64),
    "num_stages": (2, 3, 4, 6, 8),
    "num_warps": (2, 4, 8),
    "num_splits": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
}
GROUPS = (
    ("block_kv", "kv_heads", "query_columns", "block_rows"),
    ("num_stages", "num_warps"),
    ("num_splits",),
)

TABLE = Path(tuning.__file__).with_name("tuning_table.json")
TABLE_IMPLS = ("mosaic_gpu",)  # whose choice the table is


def neighbours[T](start: T, group: Sequence[str]) -> Iterator[T]:
    """`start` with every combination of the group's parameters that its class takes."""
    names = [name for name in group if hasattr(start, name)]
    for values in product(*(CHOICES[name] for name in names)):
        try:
            yield dataclasses.replace(start, **dict(zip(names, values, strict=True)))  # type: ignore[type-var]
        except ValueError:
            continue


def search[T](start: T, measure: Callable[[T], float]) -> T:
    """The fastest found by varying one group after the other until nothing is gained.

    `measure` gives seconds, or infinity for what does not do.
    """
    times = {start: measure(start)}
    best = start
    while True:
        before = best
        for group in GROUPS:
            for candidate in neighbours(best, group):
                if candidate not in times:
                    times[candidate] = measure(candidate)
            best = min(times, key=lambda candidate: times[candidate])
        if best == before:
            return best


def write_entry(path: Path, key: str, entry: Mapping[str, int]) -> None:
    """Put an entry into a table, whose others stay; sorted by key."""
    table = json.loads(path.read_text()) if path.exists() else {}
    table[key] = dict(entry)
    path.write_text(json.dumps(dict(sorted(table.items())), indent=2) + "\n")
