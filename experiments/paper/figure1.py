"""What fills a GPU's memory, and what batching is worth: the paper's Figure 1."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.paper.setups import GIB, Deployment
from paged_jax.simulation.cost_model import RooflineCost
from paged_jax.simulation.step_work import StepWork

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
