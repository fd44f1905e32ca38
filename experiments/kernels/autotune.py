"""Search for the fastest tuning of an attention kernel on this GPU, and enter it into the table.

    python -m experiments.kernels.autotune --geometry=llama3-8b --batch=64 --context=4096
    python -m experiments.kernels.autotune --impl=triton --dtype=float32 --block_size=4

From the tuning that the kernel would choose, groups of parameters are varied in turn, every
combination of a group, until none is faster. Each candidate runs in a process that is killed when
it takes too long; its values are compared with float32 attention before it is timed. The fastest
is then timed once more beside the present choice, for longer, and its entry is written where it
is faster by --least_gain. Times of GPUs that are not here are not guessed: without one, --dry_run
shows the search in the interpreter, on whose times nothing depends, and writes no entry.

A kernel without a table (triton) gets no entry: its rule is in its file. --out_dir gets
results.json and results.csv with a row for each candidate, and candidates.jsonl as they come.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from absl import flags

from experiments.kernels.gpu_checks import spoils_process
from experiments.kernels.shapes import GEOMETRIES, Shape, parse_geometry
from experiments.lib import reporting
from pallas_kernels.lab.worker import Outcome, Worker
from pallas_kernels.paged_attention import (
    IMPLEMENTATIONS,
    AttentionOptions,
    Call,
    cache_head_size,
    refusal,
)
from pallas_kernels.paged_attention.mosaic_gpu import tuning
from pallas_kernels.targets import Target

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


_IMPL = flags.DEFINE_string("impl", "mosaic_gpu", "The kernel to tune.")
_GEOMETRY = flags.DEFINE_string(
    "geometry", "llama3-8b", f"{', '.join(GEOMETRIES)}, or query heads/KV heads/head size."
)
_BATCH = flags.DEFINE_integer("batch", 64, "Sequences.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", 4096, "Tokens of each.", lower_bound=1)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Tokens of a block.", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16", "float32"], "Of all.")
_TABLE = flags.DEFINE_string("table", str(TABLE), "The table that gets the entry.")
_LEAST_GAIN = flags.DEFINE_float("least_gain", 0.01, "Part of the time to save, for an entry.")
_SECONDS = flags.DEFINE_float("seconds", 0.05, "How long to time a candidate.", lower_bound=0)
_TIME_LIMIT_S = flags.DEFINE_float("time_limit_s", 300, "For the ", lower_bound=1)
_CHECK_LIMIT_S = flags.DEFINE_float("check_limit_s", 40, "For one candidate.", lower_bound=1)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Without a GPU, in the interpreter; no entry.")
_OUT_DIR = flags.DEFINE_string("out_dir", "out/autotune", "Where the results go.")


class Tuner:
    """Measures candidates for a shape in a process of their own, and keeps a row of each.

    The rows so far are always in out_dir/candidates.jsonl.
    """

    def __init__(
        self, worker: Worker, impl: str, shape: Shape, facts: Mapping[str, Any], out_dir: Path
    ):
        self.worker, self.impl, self.shape, self.facts = worker, impl, shape, facts
        self.out_dir = out_dir
        self.rows: list[dict[str, Any]] = []
        self.deadline = time.monotonic() + _TIME_LIMIT_S.value

    def call(self, candidate: Any | None = None) -> Call:
        """What the kernel is asked to do."""
        shape, (Hq, Hk, D) = self.shape, self.shape.geometry
        options = AttentionOptions(D**-0.5, interpret=_DRY_RUN.value, tuning=candidate)
        M = shape.blocks_per_row
        return Call(
            *(shape.batch, 1, Hq, Hk, cache_head_size(self.impl, D)),
            *(shape.block_size, shape.batch * M, M, jnp.dtype(shape.dtype)),
            *(options, self.facts["target"]),
        )

    def seconds(self, candidate: Any) -> float:
        """Of a call; infinity where the candidate does not do, or the time is up."""
        if time.monotonic() > self.deadline:
            return math.inf
        return self.measure(candidate, _SECONDS.value)

    def measure(self, candidate: Any, seconds: float) -> float:
        """Time a candidate for about `seconds`."""
        if reason := refusal(self.impl, self.call(candidate)):
            return self._enter(candidate, Outcome("raised", reason=f"refused: {reason}"))
        settings = (self.facts["copy_gb_per_s"], seconds, _DRY_RUN.value, candidate)
        outcome = self.worker.call(
            "experiments.kernels.gpu_jobs:latency",
            (self.impl, self.shape, *settings),
            _CHECK_LIMIT_S.value,
        )
        if spoils_process(f"{outcome.status}: {outcome.reason}"):
            self.worker.close()
        return self._enter(candidate, outcome)

    def _enter(self, candidate: Any, outcome: Outcome) -> float:
        row = outcome.value
        time_us = row.time_us if row is not None else None
        verdict = row.verdict if row is not None else outcome.reason or outcome.status
        self.rows.append({**dataclasses.asdict(candidate), "time_us": time_us, "verdict": verdict})
        reporting.write_jsonl(self.out_dir, "candidates.jsonl", self.rows)
        figure = "no time" if time_us is None else f"{time_us:.1f} µs"
        print(f"{figure}, {candidate}: {verdict}", flush=True)
        return math.inf if time_us is None else 1e-6 * time_us


def main() -> None:
    shape = Shape(
        parse_geometry(_GEOMETRY.value),
        *(_BATCH.value, _CONTEXT.value, _BLOCK_SIZE.value, _DTYPE.value),
    )
    module = IMPLEMENTATIONS.module(_IMPL.value)
    if not hasattr(module, "default_tuning"):
        raise ValueError(f"attention {_IMPL.value!r} has nothing to tune")
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    with Worker() as worker:
        outcome = worker.call("experiments.kernels.gpu_jobs:facts", (), 120)
        if outcome.value is None:
            raise ValueError(f"JAX does not start: {outcome.reason}\n{outcome.details}")
        target: Target | None = outcome.value["target"]
        if target is None and not _DRY_RUN.value:
            raise ValueError(
                "no GPU here, and how fast a kernel is can only be measured on one; registers and "
                "occupancy (experiments.kernels.check) do not order tunings by their speed. "
                "--dry_run shows the search in the interpreter"
            )
        if target is not None and _DRY_RUN.value:
            raise ValueError(f"--dry_run is for a machine without a GPU; here is a {target.name}")
        tuner = Tuner(worker, _IMPL.value, shape, outcome.value, out_dir)
        start = module.default_tuning(tuner.call())
        best = search(start, tuner.seconds)
        again = {each: tuner.measure(each, 10 * _SECONDS.value) for each in {start, best}}
    if math.isinf(again[best]):
        raise ValueError(f"no tuning of {_IMPL.value} does {shape}: {tuner.rows[-1]['verdict']}")

    gain = 1 - again[best] / again[start]
    print(f"{shape}: {best}, {100 * gain:.1f} % faster than {start}")
    reporting.write_cases(tuner.rows, out_dir, _IMPL, best=best, start=start, gain=gain)
    if target is None or _IMPL.value not in TABLE_IMPLS or not gain > _LEAST_GAIN.value:
        print("no entry written")
    else:
        key = tuning.table_key(tuner.call(), target)
        write_entry(Path(_TABLE.value), key, dataclasses.asdict(best))
        print(f"entry {key!r} written to {_TABLE.value}")


if __name__ == "__main__":
    reporting.run(main)
