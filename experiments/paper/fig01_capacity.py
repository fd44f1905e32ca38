"""How many sequences fit? KV memory, blocks and batches of a model on a GPU (Figure 1, table 1).

    python -m experiments.paper.fig01_capacity --quick
    python -m experiments.paper.fig01_capacity --model=Llama-3-8B --gpu=H100
    python -m experiments.paper.fig01_capacity --model=Llama-3-70B --gpu=H200 --num_gpus=4
    python -m experiments.paper.fig01_capacity --model=path/to/model --lengths=sharegpt_trace

First the paper's three set-ups: bytes of a token's keys and values, and how many fit. Then yours: a
model by name, or a Hugging Face folder or .gguf file of which the config alone is read; blocks,
slots, and sequences of mean, long (p95) and greatest length. An engine sizes its pool by the same
functions (`paged_jax.memory.sizing`).

Then, unless --simulate=false, for paging and for the paper's baselines: how many sequences run and
what fills the KV memory when more requests come than can be served, and the request rate that is
sustained at a mean latency of --objective_s per output token.

Expect seconds without the simulation, a minute with --quick and ten without, on two cores.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.lib import figures, grid, option, print_rows, print_table, run, write_results
from experiments.lib.claims import Claim, Results, Rows, claim, within_points
from experiments.paper.requests import LENGTHS, draw, note_on_length
from experiments.paper.setups import GIB, SETUPS, SYSTEMS, Deployment, shape_of
from experiments.paper.simulations import Load, SearchOptions, find_panels, overloaded
from paged_jax.memory.sizing import num_blocks_in, num_sequences_in, room_for_kv
from paged_jax.simulation.cost_model import StepWork
from paged_jax.simulation.setups import GPUS, MODEL_SHAPES, ModelShape, find_gpu, find_model_shape


@dataclass(frozen=True, kw_only=True)
class Config(SearchOptions):
    model: str = option(
        "OPT-13B", f"One of {', '.join(MODEL_SHAPES)}, a Hugging Face folder or a .gguf file."
    )
    gpu: str = option("A100-40GB", f"It runs on GPUs of this kind: {', '.join(GPUS)}.")
    num_gpus: int = option(1, "The model is split among so many GPUs.", least=1)
    memory_gib: float | None = option(None, "A GPU's memory (GiB). By default its own.", least=0)
    memory_share: float | None = option(
        None, "Share of the memory for weights and KV. By default 0.9, or what the paper says."
    )
    dtype: Literal["float16", "bfloat16", "float32"] = option("float16", "Type of weights and KV.")
    block_size: int = option(16, "A KV block has so many slots (tokens).", least=1)
    lengths: str = option("sharegpt_served", "Requests have lengths of this kind.", choices=LENGTHS)
    simulate: bool = option(True, "Simulate batches, waste and sustained rates, too.")
    duration_s: float = option(600.0, "Requests arrive for so long (s).", quick=100.0, least=1)


PAPER_SHARES = {"weights": 65, "KV cache": 30, "other": 5}  # percent; OPT-13B on an A100-40GB
ENGINE_SHARE = 0.9  # of a GPU's memory, as `paged_jax.engine.pool_size`
NUM_DRAWN = 4000  # requests whose lengths are looked at


# The paper's set-ups


def setup_rows() -> Rows:
    """The paper's table 1, recomputed."""
    return [
        {
            "setup": setup.name,
            "weights_gib": setup.model.weight_bytes / GIB,
            "kv_gib": setup.kv_bytes / GIB,
            "paper_kv_gib": setup.kv_gib,  # as printed there, in GB
            "kib_per_token": setup.model.kv_bytes_per_token / 1024,
            "slots": setup.num_slots,
            "slots_k": f"{setup.num_slots / 1000:.1f}K",
            "paper_k": f"{setup.paper_num_slots / 1000:.1f}K",
        }
        for setup in SETUPS.values()
    ]


# The model and the GPUs that the options describe


def described_model(config: Config) -> ModelShape:
    bytes_per_value = 4 if config.dtype == "float32" else 2
    try:
        return replace(find_model_shape(config.model), bytes_per_value=bytes_per_value)
    except ValueError as unknown:
        if not Path(config.model).exists():
            raise ValueError(f"{unknown}; or the path of a folder or a .gguf file") from None
    from paged_jax.loading import load_config  # takes seconds

    return shape_of(load_config(config.model), bytes_per_value)


def plan(config: Config) -> tuple[Deployment, dict[str, float]]:
    """The deployment that the options describe, and the figures of its memory."""
    model, gpu, num_gpus = described_model(config), find_gpu(config.gpu), config.num_gpus
    if config.memory_gib is not None:
        gpu = replace(gpu, memory_bytes=int(config.memory_gib * GIB))
    block_size, share = config.block_size, config.memory_share
    if share is None:
        described = model, gpu, num_gpus
        papers = [s.share for s in SETUPS.values() if (s.model, s.gpu, s.num_gpus) == described]
        share = [*papers, ENGINE_SHARE][0]
    room = room_for_kv(num_gpus * gpu.memory_bytes, model.weight_bytes, share=share)
    num_blocks = num_blocks_in(room, model.kv_bytes_per_token * block_size)
    if num_blocks < 1:
        raise ValueError(
            f"{model.name} takes {model.weight_bytes / GIB:.1f} GiB in {config.dtype}: of "
            f"{num_gpus} x {gpu.name} that leaves {room / GIB:.1f} GiB for the KV cache; use more "
            "--num_gpus or a GPU with more memory"
        )
    requests = draw(config.lengths, NUM_DRAWN, model.max_model_len, config.seed)
    # The last token of an output needs no slot.
    slots = [request.num_prompt_tokens + request.max_tokens - 1 for request in requests]
    mean, p95 = round(float(np.mean(slots))), int(np.percentile(slots, 95))
    lengths = {"mean": mean, "p95": p95, "greatest": model.max_model_len}
    return Deployment(model, gpu, num_gpus, num_blocks * block_size), {
        "weights (GiB)": model.weight_bytes / GIB,
        "share of the memory for weights and KV": share,
        "memory for KV (GiB)": room / GIB,
        "KV per token (KiB)": model.kv_bytes_per_token / 1024,
        f"blocks of {block_size} slots": num_blocks,
        "KV slots (tokens)": num_blocks * block_size,
    } | {
        f"sequences of {name} length ({length})": num_sequences_in(num_blocks, block_size, length)
        for name, length in lengths.items()
    }


def memory_shares(deployment: Deployment) -> dict[str, float]:
    """Percent of the GPUs' memory, by the paper's names."""
    model, memory = deployment.model, deployment.memory_bytes
    weights = 100 * model.weight_bytes / memory
    kv = 100 * deployment.num_slots * model.kv_bytes_per_token / memory
    return {"weights": weights, "KV cache": kv, "other": 100 - weights - kv}


# Batches


def overloaded_row(load: Load) -> dict[str, Any]:
    """A system when more requests come than it can serve."""
    run = overloaded(load)
    tokens, reserved, internal, external, _ = run.memory_shares.values()
    return {
        "system": SYSTEMS[load.system].label,
        "batch_size": run.mean_batch_size,
        "tokens_percent": 100 * tokens,  # of the pool
        "waste_percent": 100 * (reserved + internal + external),
        "free_percent": 100 * (1 - tokens - reserved - internal - external),
    }


def system_rows(config: Config, deployment: Deployment) -> Rows:
    """Each simulated system, overloaded, and the rate (requests/s) that it sustains."""
    size = config.block_size
    loads = config.loads_of(deployment, config.lengths, config.duration_s, block_size=size)
    # Paging, which comes last, takes longest.
    full = grid(overloaded_row, loads[::-1], config, unit="system", processes=config.processes)
    [searches] = find_panels({(): loads}, config).values()
    return [row | {"rate": found.rate} for row, found in zip(full[::-1], searches, strict=True)]


class BatchPoint(NamedTuple):
    """Decoding at one batch size, all sequences of the same length."""

    batch_size: int
    step_ms: float
    tokens_per_s: float


def throughput_by_batch(
    deployment: Deployment, context: int, block_size: int, max_batch_size: int
) -> list[BatchPoint]:
    """Decode steps of 1, 2, 3, ... sequences that attend to `context` tokens each."""
    cost = SYSTEMS["paged"].cost(deployment)

    def point(size: int) -> BatchPoint:
        work = StepWork(size, size * context, (), num_first_samples=0, block_size=block_size)
        step_s = cost.step_s(work)
        return BatchPoint(size, 1e3 * step_s, size / step_s)

    return list(map(point, range(1, max_batch_size + 1)))


def plot(
    deployment: Deployment, points: list[BatchPoint], batch_sizes: dict[str, float], out_dir: str
) -> None:
    """Memory on the left; throughput against batch size, with what each system reaches, beside."""
    figure, [[left, right]] = figures.panels(1, 2, size=(4.5, 3.6), width_ratios=(1, 2))
    bottom = 0.0
    for name, percent in memory_shares(deployment).items():
        height = percent / 100 * deployment.memory_bytes / GIB
        bar = left.bar(0, height, bottom=bottom, width=0.5)
        text = f"{name}\n{height:.1f} GiB, {percent:.0f} %"
        left.bar_label(bar, [text], label_type="center", fontsize=8)
        bottom += height
    left.set(xlim=(-0.5, 0.5), xticks=[], ylabel="GiB")
    left.set_title(deployment.name, fontsize=10)
    sizes, _, speeds = zip(*points, strict=True)
    right.plot(sizes, speeds, color="0.6")
    for label, size in batch_sizes.items():
        nearest = points[min(max(round(size), 1), len(points)) - 1]
        right.plot(size, nearest.tokens_per_s, "o", label=f"{label}: {size:.1f}")
    right.set(xlabel="batch size (sequences)", ylabel="tokens/s, decoding", ylim=(0, None))
    if batch_sizes:
        right.legend(fontsize=8, loc="lower right", title="batch that fits")
    figures.save(figure, out_dir, "capacity.png")


def main(config: Config) -> None:
    deployment, sizes = plan(config)
    setups = setup_rows()
    print_rows("The paper's set-ups (KV slots)", setups)
    print(note_on_length(config.lengths, deployment.model.max_model_len, config.seed))
    print_table(deployment.name, ["figure", "value"], sizes.items())
    systems = system_rows(config, deployment) if config.simulate else []
    if systems:
        within = f"within {config.objective_s:g} s per output token"
        title = f"Simulated, {config.lengths}: overloaded, and the rate sustained {within}"
        print_rows(title, systems)
    batch_sizes = {row["system"]: row["batch_size"] for row in systems}
    largest = max([*batch_sizes.values(), 40.0])
    context = round(deployment.num_slots / largest)
    points = throughput_by_batch(deployment, context, config.block_size, round(1.2 * largest))
    write_results(
        setups,
        config,
        figures=sizes,
        memory_shares=memory_shares(deployment),
        paper_memory_shares=PAPER_SHARES,
        systems=systems,
        throughput=[point._asdict() for point in points],
    )
    plot(deployment, points, batch_sizes, config.out_dir)


def claims(results: Results) -> Iterator[Claim]:
    """The slots of each set-up, and what fills the memory."""
    for row in results["cases"]:
        slots, papers, rule = row["slots_k"], row["paper_k"], "the same three digits"
        yield Claim(f"KV slots: {row['setup']}", papers, slots, rule, slots == papers)
    for name, percent in PAPER_SHARES.items():
        share = results["memory_shares"][name]
        yield claim(
            f"share of the memory: {name}",
            paper=f"about {percent} %",
            found=share,
            ours=f"{share:.1f} %",
            rule=within_points(6, percent),
            note="the paper divides 26 GB of weights, in powers of 1000, by 40 GiB",
        )


if __name__ == "__main__":
    run(main, Config)
