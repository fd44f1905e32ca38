"""How many sequences fit? KV memory, blocks and batches of a model on a GPU (Figure 1, table 1).

    python -m experiments.paper.fig01_capacity --quick
    python -m experiments.paper.fig01_capacity --model=Llama-3-8B --gpu=H100 --lengths=sharegpt_trace
    python -m experiments.paper.fig01_capacity --model=Llama-3-70B --gpu=H200 --num_gpus=4 --block_size=32
    python -m experiments.paper.fig01_capacity --model=path/to/model --gpu=A100-80GB --objective_s=0.1

First the paper's three set-ups: bytes of a token's keys and values, and how many fit. Then yours: a
model by name, or a Hugging Face folder or .gguf file of which the config alone is read; blocks,
slots, and sequences of mean, long (p95) and greatest length. An engine sizes its pool by the same
functions (`paged_jax.memory.sizing`).

Then, simulated for this workload: how many sequences run and what fills the KV memory when more
requests come than can be served, and the request rate that is sustained at a mean latency of
--objective_s per output token, for paging and for the paper's baselines. --simulate=false leaves
this out.

Expect seconds without the simulation, a minute with --quick and ten without, on two cores.
--out_dir gets results.json, results.csv and capacity.png.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from absl import flags
from matplotlib.axes import Axes

from experiments.lib import reporting
from experiments.lib.parallel import run_all
from experiments.lib.reporting import preset
from experiments.paper.requests import LENGTHS, check_lengths, draw, note_on_length
from experiments.paper.setups import GIB, SETUPS, Deployment
from experiments.paper.simulations import (
    Load,
    Point,
    Sustained,
    find_sustained,
    first_rate,
    serve_at,
)
from experiments.paper.systems import SYSTEMS, chosen_systems
from paged_jax.memory.sizing import num_blocks_in, num_sequences_in, room_for_kv
from paged_jax.models.config import ModelConfig
from paged_jax.simulation.cost_model import RooflineCost, StepWork
from paged_jax.simulation.setups import (
    GPU,
    GPUS,
    MODEL_SHAPES,
    ModelShape,
    find_gpu,
    find_model_shape,
)

PAPER_SHARES = {"weights": 65, "KV cache": 30, "other": 5}  # percent; OPT-13B on an A100-40GB


class BatchPoint(NamedTuple):
    """Decoding at one batch size, all sequences of the same length."""

    batch_size: int
    step_ms: float
    tokens_per_s: float


def memory_shares(deployment: Deployment) -> dict[str, float]:
    """Percent of the GPUs' memory, by the paper's names."""
    model = deployment.model
    memory = deployment.num_gpus * deployment.gpu.memory_bytes
    weights = 100 * model.weight_bytes / memory
    kv = 100 * deployment.num_slots * model.kv_bytes_per_token / memory
    return {"weights": weights, "KV cache": kv, "other": 100 - weights - kv}


def throughput_by_batch(
    deployment: Deployment, context: int, block_size: int, max_batch_size: int
) -> list[BatchPoint]:
    """Decode steps of 1, 2, 3, ... sequences that attend to `context` tokens each."""
    cost = RooflineCost(deployment.gpu, deployment.model, deployment.num_gpus)
    points = []
    for size in range(1, max_batch_size + 1):
        work = StepWork(
            num_decodes=size,
            decode_context=size * context,
            prefills=(),
            num_first_samples=0,
            block_size=block_size,
        )
        step_s = cost.step_s(work)
        points.append(BatchPoint(size, 1e3 * step_s, size / step_s))
    return points


def plot(
    deployment: Deployment,
    points: Sequence[BatchPoint],
    batch_sizes: Mapping[str, float],
    path: str,
) -> None:
    """Memory on the left; throughput against batch size, with what each system reaches, beside."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=(1, 2), layout="constrained")
    plot_memory(axes[0], deployment)
    axes[1].plot(
        [point.batch_size for point in points],
        [point.tokens_per_s for point in points],
        color="0.6",
    )
    for label, size in batch_sizes.items():
        nearest = points[min(max(round(size), 1), len(points)) - 1]
        axes[1].plot(size, nearest.tokens_per_s, "o", label=f"{label}: {size:.1f}")
    axes[1].set(xlabel="batch size (sequences)", ylabel="tokens/s, decoding", ylim=(0, None))
    if batch_sizes:
        axes[1].legend(fontsize=8, loc="lower right", title="batch that fits")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_memory(axes: Axes, deployment: Deployment) -> None:
    """One bar of what fills the memory, in GiB."""
    memory_gib = deployment.num_gpus * deployment.gpu.memory_bytes / GIB
    bottom = 0.0
    for name, percent in memory_shares(deployment).items():
        height = percent / 100 * memory_gib
        axes.bar(0, height, bottom=bottom, width=0.5)
        axes.annotate(
            f"{name}\n{height:.1f} GiB, {percent:.0f} %", (0, bottom + height / 2),
            ha="center", va="center", fontsize=8,
        )  # fmt: skip
        bottom += height
    axes.set(xlim=(-0.5, 0.5), xticks=[], ylabel="GiB")
    axes.set_title(deployment.name, fontsize=10)


_QUICK = flags.DEFINE_bool("quick", False, "Short simulated runs.")
_MODEL = flags.DEFINE_string(
    "model", "OPT-13B", f"{', '.join(MODEL_SHAPES)}, a Hugging Face folder or a .gguf file."
)
_GPU = flags.DEFINE_string("gpu", "A100-40GB", f"One of {', '.join(GPUS)}.")
_NUM_GPUS = flags.DEFINE_integer("num_gpus", 1, "Among which the model is split.", lower_bound=1)
_MEMORY_GIB = flags.DEFINE_float(
    "memory_gib", None, "Memory of each GPU; default: its own.", lower_bound=0
)
_MEMORY_SHARE = flags.DEFINE_float(
    "memory_share",
    None,
    "Share of the memory that weights and KV may take; default: 0.9 as an engine's, or what the "
    "paper's table says for its set-ups.",
)
_DTYPE = flags.DEFINE_enum("dtype", "float16", ["float16", "bfloat16", "float32"], "Of both.")
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Slots (tokens) of a KV block.", lower_bound=1)
_LENGTHS_FLAG = flags.DEFINE_enum(
    "lengths", "sharegpt_served", LENGTHS, "Whose lengths requests have."
)
_SIMULATE = flags.DEFINE_bool("simulate", True, "Also batches, waste and sustained rates.")
_SYSTEMS = flags.DEFINE_list(
    "systems", ["orca_max", "orca_pow2", "orca_oracle", "paged"], "What is simulated."
)
_OBJECTIVE_S = flags.DEFINE_float(
    "objective_s", 0.1, "Mean latency per output token that counts as sustained.", lower_bound=1e-3
)
_DURATION_S = flags.DEFINE_float(
    "duration_s", None, "How long requests arrive; default: 600, or 100 with --quick.",
    lower_bound=1,
)  # fmt: skip
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths and arrivals.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/capacity", "Where the results go.")

ENGINE_SHARE = 0.9  # of a GPU's memory, as `paged_jax.engine.pool_size`
OVERLOAD = 20  # times as many requests as a first guess says are served
NUM_DRAWN = 4000  # requests whose lengths are looked at


class SetupRow(NamedTuple):
    """A row of the paper's table 1, recomputed."""

    setup: str
    weights_gib: float
    kv_gib: float
    paper_kv_gib: int  # as printed there, in GB
    kib_per_token: float
    slots: int
    slots_k: str
    paper_k: str


class SystemRow(NamedTuple):
    """A simulated system: overloaded, and at the rate that it sustains (requests/s)."""

    system: str
    batch_size: float  # mean over time
    tokens_percent: float  # of the pool: token states
    waste_percent: float  # reserved, internal and external
    free_percent: float
    rate: float | None


def thousands(count: int) -> str:
    return f"{count / 1000:.1f}K"


def paper_rows() -> list[SetupRow]:
    return [
        SetupRow(
            setup.deployment.name,
            setup.model.weight_bytes / GIB,
            setup.kv_bytes / GIB,
            setup.kv_gib,
            setup.model.kv_bytes_per_token / 1024,
            setup.num_slots,
            thousands(setup.num_slots),
            thousands(setup.paper_num_slots),
        )
        for setup in SETUPS.values()
    ]


def shape_of(config: ModelConfig, bytes_per_value: int) -> ModelShape:
    """A Llama-family model as the cost model sees it."""
    return ModelShape(
        config.name,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
        config.max_position_embeddings,
        is_gated=True,
        has_tied_embeddings=config.tie_word_embeddings,
        bytes_per_value=bytes_per_value,
    )


def described_gpu() -> GPU:
    gpu = find_gpu(_GPU.value)
    if _MEMORY_GIB.value is None:
        return gpu
    return replace(gpu, memory_bytes=int(_MEMORY_GIB.value * GIB))


def described_model() -> ModelShape:
    bytes_per_value = 4 if _DTYPE.value == "float32" else 2
    try:
        return replace(find_model_shape(_MODEL.value), bytes_per_value=bytes_per_value)
    except ValueError as unknown:
        if not Path(_MODEL.value).exists():
            raise ValueError(f"{unknown}; or the path of a folder or a .gguf file") from None
    from paged_jax.loading import load_config  # takes seconds

    return shape_of(load_config(_MODEL.value), bytes_per_value)


def memory_share(model: ModelShape, gpu: GPU) -> float:
    """What weights and KV may take of the memory."""
    if _MEMORY_SHARE.value is not None:
        share: float = _MEMORY_SHARE.value
        return share
    setup = SETUPS.get(model.name)
    described = None if setup is None else (setup.model, setup.gpu, setup.num_gpus)
    if setup is not None and described == (model, gpu, _NUM_GPUS.value):
        return setup.share
    return ENGINE_SHARE


def plan() -> tuple[Deployment, dict[str, object]]:
    """What the flags describe, and the figures of its memory."""
    model, gpu, num_gpus = described_model(), described_gpu(), _NUM_GPUS.value
    block_size, share = _BLOCK_SIZE.value, memory_share(model, gpu)
    room = room_for_kv(num_gpus * gpu.memory_bytes, model.weight_bytes, share=share)
    num_blocks = num_blocks_in(room, model.kv_bytes_per_token * block_size)
    if num_blocks < 1:
        raise ValueError(
            f"{model.name} takes {model.weight_bytes / GIB:.1f} GiB in {_DTYPE.value}: of "
            f"{num_gpus} x {gpu.name} that leaves {room / GIB:.1f} GiB for the KV cache; use more "
            "--num_gpus or a GPU with more memory"
        )
    requests = draw(_LENGTHS_FLAG.value, NUM_DRAWN, model.max_model_len, _SEED.value)
    # The last token of an output needs no slot.
    slots = [request.num_prompt_tokens + request.max_tokens - 1 for request in requests]
    mean, p95 = round(float(np.mean(slots))), int(np.percentile(slots, 95))
    figures: dict[str, object] = {
        "weights (GiB)": model.weight_bytes / GIB,
        "share of the memory for weights and KV": share,
        "memory for KV (GiB)": room / GIB,
        "KV per token (KiB)": model.kv_bytes_per_token / 1024,
        f"blocks of {block_size} slots": num_blocks,
        "KV slots (tokens)": num_blocks * block_size,
        f"sequences of mean length ({mean})": num_sequences_in(num_blocks, block_size, mean),
        f"sequences of p95 length ({p95})": num_sequences_in(num_blocks, block_size, p95),
        f"sequences of greatest length ({model.max_model_len})": num_sequences_in(
            num_blocks, block_size, model.max_model_len
        ),
    }
    return Deployment(model, gpu, num_gpus, num_blocks * block_size), figures


def overload(load: Load) -> Point:
    """Many more requests than can be served, for as long as requests arrive."""
    return serve_at(load, OVERLOAD * first_rate(load), cut=True)


def simulate_systems(deployment: Deployment) -> list[SystemRow]:
    duration_s = preset(_DURATION_S, _QUICK.value, quick=100.0, full=600.0)
    loads = [
        Load(
            system.name,
            deployment,
            _LENGTHS_FLAG.value,
            duration_s,
            seed=_SEED.value,
            block_size=_BLOCK_SIZE.value,
        )
        for system in chosen_systems(_SYSTEMS.value)[::-1]  # paging takes longest
    ]
    full = run_all(overload, loads, description="overloaded", unit="system")
    search = partial(find_sustained, objective_s=_OBJECTIVE_S.value)
    sustained: list[Sustained] = run_all(
        search, loads, description="sustained rates", unit="system"
    )
    rows = [
        SystemRow(
            SYSTEMS[load.system].label,
            point.mean_batch_size,
            100 * point.token_states,
            100 * (point.reserved + point.internal + point.external),
            100 * (1 - point.token_states - point.reserved - point.internal - point.external),
            found.rate,
        )
        for load, point, found in zip(loads, full, sustained, strict=True)
    ]
    return rows[::-1]


def main() -> None:
    check_lengths([_LENGTHS_FLAG.value])
    if _SIMULATE.value:
        chosen_systems(_SYSTEMS.value)
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    deployment, figures = plan()
    setups = paper_rows()
    reporting.print_table("The paper's set-ups (KV slots)", SetupRow._fields, setups)
    print(note_on_length(_LENGTHS_FLAG.value, deployment.model.max_model_len, _SEED.value))
    reporting.print_table(deployment.name, ["figure", "value"], figures.items())
    systems = simulate_systems(deployment) if _SIMULATE.value else []
    if systems:
        reporting.print_table(
            f"Simulated, {_LENGTHS_FLAG.value}: overloaded, and the rate sustained within "
            f"{_OBJECTIVE_S.value:g} s per output token",
            SystemRow._fields,
            systems,
        )
    batch_sizes = {row.system: row.batch_size for row in systems}
    context = deployment.num_slots / max([*batch_sizes.values(), 40.0])
    points = throughput_by_batch(
        deployment,
        round(context),
        _BLOCK_SIZE.value,
        max_batch_size=round(1.2 * max([*batch_sizes.values(), 40.0])),
    )
    reporting.write_cases(
        [row._asdict() for row in setups],
        out_dir,
        _QUICK,
        figures=figures,
        memory_shares=memory_shares(deployment),
        paper_memory_shares=PAPER_SHARES,
        systems=[row._asdict() for row in systems],
        throughput=[point._asdict() for point in points],
    )
    plot(deployment, points, batch_sizes, str(out_dir / "capacity.png"))
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
