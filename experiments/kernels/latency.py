"""How fast attention kernels are: the paper's figures 18a and 18b, at the level of the kernel.

    python -m experiments.kernels.latency
    python -m experiments.kernels.latency --impl=xla --batch=8,32 --context=64,128,256
    python -m experiments.kernels.latency --geometry=llama3-8b --block_size=8,16,32,64,128
    python -m experiments.kernels.latency --geometry=32/8/128,opt-13b --impl=mosaic_gpu,cudnn_paged

One step's attention of a single layer, all rows at the same context length, over blocks at random
places; --queries is for prefills. Every output is compared with float32 attention before anything
is timed. Beside the implementations of paged attention stand `contiguous` (the same kernel body
over contiguous caches), `xla_contiguous` (two plain products), `jax_paged` (JAX's own kernel),
`cudnn_paged` and `cudnn_contiguous`. A kernel that does not run here is a row that says why.

GB/s counts the keys and values of the contexts, once each; copy_fraction divides it by the copy
bandwidth measured in the same run. ratio is the time over the contiguous baseline's: the paper's
kernel took 1.20 to 1.26 of FasterTransformer's (batch 8 and 32, context 64 to 256).

Expect a table in about a minute on two CPU cores. --out_dir gets results.json, results.csv and
latency.png. Exit code 1: a kernel was wrong or failed.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax
from absl import flags
from tqdm import tqdm

from experiments.kernels import baselines as contenders
from experiments.kernels import latency_tables as figures
from experiments.kernels import timing
from experiments.kernels.latency_tables import tables
from experiments.kernels.measure import Row, empty_row, measure, with_ratios
from experiments.kernels.shapes import GEOMETRIES, Shape, parse_geometry
from experiments.lib import reporting
from paged_jax import prefer_vector_loops


class Defaults(NamedTuple):
    """What a kind of device measures in about a minute."""

    impl: list[str]
    baseline: str
    geometry: str
    dtype: str
    batch: list[str]
    context: list[str]


CPU = Defaults(
    impl=["xla"],
    baseline="xla_contiguous",
    geometry="smollm2",
    dtype="float32",
    batch=["8", "32"],
    context=["64", "256", "1024"],
)
GPU = Defaults(
    impl=["mosaic_gpu", "xla", "jax_paged", "cudnn_paged"],
    baseline="contiguous",
    geometry="llama3-8b",
    dtype="bfloat16",
    batch=["8", "32", "64"],
    context=["64", "256", "4096"],
)

_IMPL = flags.DEFINE_list(
    "impl", None, f"What to measure; default {','.join(CPU.impl)}, on a GPU {','.join(GPU.impl)}."
)
_BASELINE = flags.DEFINE_string(
    "baseline", None, f"What ratio divides by; default {CPU.baseline}, on a GPU {GPU.baseline}."
)
_GEOMETRY = flags.DEFINE_list(
    "geometry",
    None,
    f"Names ({', '.join(GEOMETRIES)}) or query heads/KV heads/head size; default {CPU.geometry}, "
    f"on a GPU {GPU.geometry}.",
)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "float16"], "Default float32, on a GPU bfloat16."
)
_BATCH = flags.DEFINE_list("batch", None, "Batch sizes; default 8,32, on a GPU 8,32,64.")
_CONTEXT = flags.DEFINE_list(
    "context", None, "Context lengths; default 64,256,1024, on a GPU 64,256,4096."
)
_BLOCK_SIZE = flags.DEFINE_list("block_size", ["8", "16", "128"], "Block sizes, in tokens.")
_QUERIES = flags.DEFINE_integer(
    "queries", 1, "Queries at the end of each context; more than one: a prefill.", lower_bound=1
)
_SECONDS = flags.DEFINE_float("seconds", 0.3, "About how long each case is timed.", lower_bound=0.0)
_INTERPRET = flags.DEFINE_bool(
    "interpret", False, "Run Pallas kernels in the interpreter: shows that they run, not how fast."
)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/kernel_latency", "Where the results go.")


def cases(defaults: Defaults, baseline: str) -> Iterator[tuple[str, Shape]]:
    """(name, shape), the baseline first; contiguous caches have no block size to vary."""
    impls = list(dict.fromkeys([baseline, *(_IMPL.value or defaults.impl)]))
    for name in impls:
        contenders.check_name(name)
    block_sizes = reporting.integers(_BLOCK_SIZE, 1)
    batches = reporting.integers(_BATCH, 1) if _BATCH.value else map(int, defaults.batch)
    contexts = reporting.integers(_CONTEXT, 1) if _CONTEXT.value else map(int, defaults.context)
    batches, contexts = list(batches), list(contexts)
    dtype = _DTYPE.value or defaults.dtype
    for text in _GEOMETRY.value or [defaults.geometry]:
        geometry = parse_geometry(text)
        for batch in batches:
            for context in contexts:
                for name in impls:
                    sizes = block_sizes[:1] if name in contenders.CONTIGUOUS else block_sizes
                    for size in sizes:
                        yield name, Shape(geometry, batch, context, size, dtype, _QUERIES.value)


def run_case(name: str, shape: Shape, bandwidth: float) -> Row:
    """A fault of one case is its row's verdict: the others go on."""
    try:
        return measure(
            name, shape, bandwidth=bandwidth, seconds=_SECONDS.value, interpret=_INTERPRET.value
        )
    except Exception as error:
        verdict = f"failed: {type(error).__name__}: {error}".split("\n")[0]
        return empty_row(name, shape, jax.devices()[0].device_kind, verdict)


def main() -> None:
    prefer_vector_loops()  # as an engine's
    defaults = GPU if jax.default_backend() == "gpu" else CPU
    baseline = _BASELINE.value or defaults.baseline
    planned = list(cases(defaults, baseline))
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    bandwidth = timing.copy_bandwidth()
    print(f"copy bandwidth of {jax.devices()[0].device_kind}: {1e-9 * bandwidth:,.1f} GB/s")

    rows = []
    with tqdm(planned, unit="case") as bar:
        for name, shape in bar:
            bar.set_postfix_str(f"{name}, {shape}")
            rows.append(run_case(name, shape, bandwidth))
    rows = with_ratios(rows, baseline)

    for table in tables(rows):
        reporting.print_table(*table)
    reporting.write_cases(
        [row._asdict() for row in rows],
        out_dir,
        _IMPL,
        copy_gb_per_s=1e-9 * bandwidth,
        baseline=baseline,
        paper_ratio=figures.PAPER_RATIO,
    )
    figures.plot(rows, baseline, out_dir / "latency.png")
    print(f"results in {out_dir}")
    if any(row.verdict.startswith(("wrong", "failed")) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    reporting.run(main)
