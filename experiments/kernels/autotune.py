"""Search for the fastest tuning of an attention kernel on this GPU, and enter it into the table.

    python -m experiments.kernels.autotune --geometry=llama3-8b --batch=64 --context=4096
    python -m experiments.kernels.autotune --impl=triton --dtype=float32 --block_size=4

The search starts at the tuning that the kernel would choose. It varies groups of parameters in
turn, every combination of a group, until none is faster. Each candidate runs in a process that is
killed when it takes too long; its values are compared with float32 attention before it is timed.
The fastest is then timed for longer beside the present choice, and gets an entry where it is faster
by --least_gain. A kernel without a table (triton) gets no entry: its rule is in its file.

Results have a row for each candidate; candidates.jsonl gets them as they come.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from experiments.kernels.gpu_plan import MEASURE, spoils_process
from experiments.kernels.measure import facts_from
from experiments.kernels.shapes import DTYPES, GEOMETRY_HELP, Shape, parse_geometry
from experiments.lib import Options, option, run, write_results
from experiments.lib.reporting import write_jsonl
from pallas_kernels.lab.worker import Worker
from pallas_kernels.paged_attention import IMPLEMENTATIONS, Call, cache_head_size, refusal
from pallas_kernels.paged_attention.mosaic_gpu import tuning
from pallas_kernels.targets import Target

# The values that are tried of each parameter, and the parameters that are varied together.
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

NO_GPU = (
    "no GPU here, and how fast a kernel is can only be measured on one; registers and occupancy "
    "(experiments.kernels.check) do not order tunings by their speed. --dry_run shows the search "
    "in the interpreter"
)
TABLE = Path(tuning.__file__).with_name("tuning_table.json")
TABLE_IMPLS = ("mosaic_gpu",)  # the kernels that read the table


def neighbours[T](start: T, group: Sequence[str]) -> Iterator[T]:
    """`start` with every combination of the group's parameters that its class takes."""
    names = [name for name in group if hasattr(start, name)]
    for values in product(*(CHOICES[name] for name in names)):
        try:
            yield dataclasses.replace(start, **dict(zip(names, values, strict=True)))  # type: ignore[type-var]
        except ValueError:
            continue


def search[T](start: T, measure: Callable[[T], float]) -> T:
    """The fastest tuning, found by varying one group after the other until nothing is gained.

    `measure` gives seconds, or infinity for a tuning that does not work.
    """
    best, before, seconds = start, None, functools.cache(measure)
    while best != before:
        before = best
        for group in GROUPS:
            best = min((best, *neighbours(best, group)), key=seconds)
    return best


def write_entry(path: Path, key: str, entry: Mapping[str, int]) -> None:
    """Put an entry into a table, which is sorted by key and keeps its other entries."""
    table = json.loads(path.read_text()) if path.exists() else {}
    table[key] = dict(entry)
    path.write_text(json.dumps(dict(sorted(table.items())), indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    impl: str = option("mosaic_gpu", "This kernel is tuned.")
    geometry: str = option("llama3-8b", GEOMETRY_HELP)
    batch: int = option(64, "So many sequences attend.", least=1)
    context: int = option(4096, "Each sequence has so many tokens.", least=1)
    block_size: int = option(16, "A block has so many tokens.", least=1)
    dtype: str = option("bfloat16", "All arrays have this dtype.", choices=DTYPES)
    table: str = option(str(TABLE), "The table that gets the entry.")
    least_gain: float = option(0.01, "An entry has to save at least this part of the time.")
    seconds: float = option(0.05, "A candidate is timed for so long (s).", least=0)
    time_limit_s: float = option(300.0, "The search ends after so long (s).", quick=60.0, least=1)
    check_limit_s: float = option(40.0, "One candidate may take so long (s).", least=1)
    dry_run: bool = option(False, "Search without a GPU, in the interpreter, and write no entry.")


@dataclass
class Tuner:
    """Measures candidates for a shape in a process of their own, and keeps a row of each."""

    worker: Worker
    shape: Shape
    facts: Mapping[str, Any]
    config: Config
    rows: list[dict[str, Any]] = field(default_factory=list)

    def call(self, candidate: Any | None = None) -> Call:
        """The call that the kernel gets with this tuning."""
        width = cache_head_size(self.config.impl, self.shape.geometry.head_size)
        options = {"interpret": self.config.dry_run, "tuning": candidate}
        return self.shape.call(self.facts["target"], width, **options)

    def measure(self, candidate: Any, seconds: float, deadline: float = math.inf) -> float:
        """A call's time; infinity where the candidate does not work, or the deadline has passed."""
        if time.monotonic() > deadline:
            return math.inf
        config, time_us = self.config, None
        if reason := refusal(config.impl, self.call(candidate)):
            verdict = f"refused: {reason}"
        else:
            case = (config.impl, self.shape, self.facts["copy_gb_per_s"])
            arguments = (*case, seconds, config.dry_run, candidate, config.seed)
            outcome = self.worker.call(MEASURE, arguments, config.check_limit_s)
            verdict = outcome.reason or outcome.status
            if outcome.value is not None:
                time_us, verdict = outcome.value.time_us, outcome.value.verdict
            elif spoils_process(f"{outcome.status}: {outcome.reason}"):
                self.worker.close()
        self.rows.append({**asdict(candidate), "time_us": time_us, "verdict": verdict})
        write_jsonl(config.out_dir, "candidates.jsonl", self.rows)
        figure = "no time" if time_us is None else f"{time_us:.1f} µs"
        print(f"{figure}, {candidate}: {verdict}", flush=True)
        return math.inf if time_us is None else 1e-6 * time_us


def main(config: Config) -> None:
    geometry = parse_geometry(config.geometry)
    shape = Shape(geometry, config.batch, config.context, config.block_size, config.dtype)
    module = IMPLEMENTATIONS.module(config.impl)
    if not hasattr(module, "default_tuning"):
        raise ValueError(f"attention {config.impl!r} has nothing to tune")
    with Worker() as worker:
        facts = facts_from(worker)
        target: Target | None = facts["target"]
        if target is None and not config.dry_run:
            raise ValueError(NO_GPU)
        if target is not None and config.dry_run:
            raise ValueError(f"--dry_run is for a machine without a GPU; here is a {target.name}")
        tuner = Tuner(worker, shape, facts, config)
        start, deadline = (
            module.default_tuning(tuner.call()),
            time.monotonic() + config.time_limit_s,
        )
        best = search(start, lambda each: tuner.measure(each, config.seconds, deadline))
        again = {each: tuner.measure(each, 10 * config.seconds) for each in {start, best}}
    if math.isinf(again[best]):
        raise ValueError(f"no tuning of {config.impl} does {shape}: {tuner.rows[-1]['verdict']}")

    gain = 1 - again[best] / again[start]
    print(f"{shape}: {best}, {100 * gain:.1f} % faster than {start}")
    write_results(tuner.rows, config, best=best, start=start, gain=gain)
    if target is None or config.impl not in TABLE_IMPLS or not gain > config.least_gain:
        print("no entry written")
    else:
        key = tuning.table_key(tuner.call(), target)
        write_entry(Path(config.table), key, asdict(best))
        print(f"entry {key!r} written to {config.table}")


if __name__ == "__main__":
    run(main, Config)
