"""How fast attention kernels are: the paper's figures 18a and 18b, at the level of the kernel.

    python -m experiments.kernels.latency
    python -m experiments.kernels.latency --impl=xla --batch=8,32 --context=64,128,256
    python -m experiments.kernels.latency --geometry=llama3-8b --block_size=8,16,32,64,128
    python -m experiments.kernels.latency --geometry=32/8/128,opt-13b --impl=mosaic_gpu,cudnn_paged

One step's attention of a single layer, all rows at the same context length, over blocks at random
places. Every output is compared with float32 attention before anything is timed. Beside the
implementations of paged attention stand the baselines of `experiments/kernels/baselines.py`:
`contiguous`, `xla_contiguous`, `cudnn_contiguous`, `jax_paged` and `cudnn_paged`. A kernel that
does not run here is a row that says why. `experiments/kernels/measure.py` explains the columns.

Expect a table and latency.png in about a minute on two CPU cores. Exit code 1: a kernel was wrong
or failed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Self

import jax
import numpy as np

from experiments.kernels.baselines import CONTIGUOUS, check_name
from experiments.kernels.measure import Row, copy_bandwidth, empty_row, measure, tables, with_ratios
from experiments.kernels.shapes import DTYPES, GEOMETRY_HELP, Shape, parse_geometry
from experiments.lib import Options, figures, grid, option, print_rows, run, write_results
from experiments.lib.claims import Claim, Results
from paged_jax import prefer_vector_loops

# What a CPU and a GPU measure in about a minute.
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "impl": (("xla",), ("mosaic_gpu", "xla", "jax_paged", "cudnn_paged")),
    "baseline": ("xla_contiguous", "contiguous"),
    "geometry": (("smollm2",), ("llama3-8b",)),
    "dtype": ("float32", "bfloat16"),
    "batch": ((8, 32), (8, 32, 64)),
    "context": ((64, 256, 1024), (64, 256, 4096)),
}

# Figure 18a: the paper's kernel over FasterTransformer's, at batch 8 and 32, context 64 to 256.
PAPER_RATIO = (1.20, 1.26)


def by_device(name: str, text: str, **limits: Any) -> Any:
    """An option with the default of the device's kind, which `Config.resolved` fills in."""
    cpu, gpu = (",".join(map(str, np.atleast_1d(default))) for default in DEFAULTS[name])
    return option(None, f"{text} By default {cpu}, on a GPU {gpu}.", **limits)


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    impl: tuple[str, ...] = by_device("impl", "These implementations are measured.")
    baseline: str = by_device("baseline", "Ratios divide by the time of this implementation.")
    geometry: tuple[str, ...] = by_device("geometry", GEOMETRY_HELP)
    dtype: str = by_device("dtype", "Inputs have this dtype.", choices=DTYPES)
    batch: tuple[int, ...] = by_device("batch", "Batch sizes.", least=1)
    context: tuple[int, ...] = by_device("context", "Context lengths, in tokens.", least=1)
    block_size: tuple[int, ...] = option((8, 16, 128), "Tokens of a block.", quick=(16,), least=1)
    queries: int = option(1, "Queries at a context's end. Several make a prefill.", least=1)
    seconds: float = option(0.3, "Each case is timed for about so long (s).", quick=0.1, least=0)
    interpret: bool = option(False, "Pallas kernels run, slowly, in the interpreter.")
    out_dir: str = option("out/kernel_latency", "Folder for the results.")

    def resolved(self) -> Self:
        """With the defaults of the device that is here."""
        is_gpu = jax.default_backend() == "gpu"
        missing = [name for name in DEFAULTS if getattr(self, name) is None]
        return replace(self, **{name: DEFAULTS[name][is_gpu] for name in missing})


def points(config: Config) -> list[tuple[str, Shape]]:
    """(implementation, shape); the baseline first. Contiguous caches have no block size to vary."""
    names = list(dict.fromkeys([config.baseline, *config.impl]))
    for name in names:
        check_name(name)
    return [
        (name, Shape(geometry, batch, context, size, config.dtype, config.queries))
        for geometry in map(parse_geometry, config.geometry)
        for batch in config.batch
        for context in config.context
        for name in names
        for size in (config.block_size[:1] if name in CONTIGUOUS else config.block_size)
    ]


@cache
def copy_gb_per_s() -> float:
    """The device's copy bandwidth, measured once."""
    return 1e-9 * copy_bandwidth()


def measure_point(point: tuple[str, Shape], config: Config) -> Row:
    """A fault of one point is its row's verdict: the others go on."""
    try:
        return measure(*point, copy_gb_per_s(), config.seconds, config.interpret, seed=config.seed)
    except Exception as error:
        verdict = f"failed: {type(error).__name__}: {error}".split("\n")[0]
        return empty_row(*point, jax.devices()[0].device_kind, verdict)


def plot(rows: Sequence[Row], config: Config) -> None:
    """Times over the baseline's against context, and times against block size."""

    def label(row: dict[str, Any]) -> str:
        return "{implementation}, {geometry}, batch {batch}".format_map(row)

    def with_block(row: dict[str, Any]) -> str:
        return label(row) + (f", block {row['block_size']}" if row["block_size"] else "")

    compared = [row for row in rows if row.ratio and row.implementation != config.baseline]
    ratios = figures.series(compared, "context", "ratio", with_block)
    paged = [row for row in rows if row.block_size and row.time_us]
    times = figures.series(
        paged, "block_size", "time_us", lambda row: f"{label(row)}, context {row['context']}"
    )
    figure, [[left, right]] = figures.panels(1, 2, size=(6, 5.5))
    figures.band(left, *PAPER_RATIO, label="paper, figure 18a")
    left.axhline(1, color="grey", linewidth=0.8)
    for panel, lines in ((left, ratios), (right, times)):
        figures.lines(panel, {label: sorted(points) for label, points in lines.items()})
        figures.powers_of_two(panel, (x for points in lines.values() for x, _ in points))
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=6, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.15))
    left.set(xlabel="context length (tokens)", ylabel=f"time / {config.baseline}", ylim=(0, None))
    right.set(xlabel="block size (tokens)", ylabel="time (µs)", yscale="log")
    figures.save(figure, config.out_dir, "latency.png")


def main(config: Config) -> int:
    prefer_vector_loops()  # as an engine does
    config = config.resolved()
    planned = points(config)
    print(f"copy bandwidth of {jax.devices()[0].device_kind}: {copy_gb_per_s():,.1f} GB/s")
    rows = grid(partial(measure_point, config=config), planned, config, unit="case")
    rows = with_ratios(rows, config.baseline)
    for title, lines in tables(rows).items():
        print_rows(title, lines)
    found = {"copy_gb_per_s": copy_gb_per_s(), "baseline": config.baseline}
    write_results(rows, config, **found, paper_ratio=PAPER_RATIO)
    plot(rows, config)
    return int(any(row.verdict.startswith(("wrong", "failed")) for row in rows))


def claims(results: Results) -> Iterator[Claim]:
    """The paged kernel beside a contiguous one; a CPU's says nothing of a GPU's."""
    device = results["environment"]["device_kind"]
    is_gpu = results["environment"]["device_platform"] == "gpu"
    ratios = [
        row["ratio"]
        for row in results["cases"]
        if row["ratio"] is not None
        and row["block_size"] == 16
        and row["batch"] in (8, 32)
        and row["context"] <= 256
    ]
    if ratios:
        low, high = results["paper_ratio"]
        yield Claim(
            "time of the paged attention kernel over a contiguous one, batch 8 and 32",
            f"{low:.2f} to {high:.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f} on {device}",
            "at most the paper's",
            max(ratios) <= high if is_gpu else None,
            "" if is_gpu else "XLA's gather on a CPU is another kernel on another device",
        )


if __name__ == "__main__":
    run(main, Config)
