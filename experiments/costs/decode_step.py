"""What paging costs a decode step: the same model over a paged and over a contiguous KV cache.

    python -m experiments.costs.decode_step
    python -m experiments.costs.decode_step --batch=1,8,32 --context=64,512 --block_size=1,16,64
    python -m experiments.costs.decode_step --context=64 --table_tokens=64,2048

Each case times whole decode steps (model, attention, cache write, greedy sampling) on the default
device, with all rows at the same context length and blocks scattered over the pool. The contiguous
step keeps `[batch, kv_heads, context, head_dim]` per layer and attends with two plain products. The
two are timed in turn, round by round, so that a noisy machine slows both; the ratio is the median
over rounds. `--table_tokens` widens the block table beyond the context, which should cost nothing.

Expect a table in about two minutes on two CPU cores. --out_dir gets results.json, results.csv and
ratio.png.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import flags
from jax import Array
from tqdm import tqdm

from experiments.lib import reporting
from paged_jax.config import EngineConfig
from paged_jax.engine.build import AttentionChoice, choose_attention
from paged_jax.executor.buckets import MIN_PREFILL_TOKENS
from paged_jax.executor.sampling_rows import sampling_batch, sampling_rows
from paged_jax.loading import load_model
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import Params, bind, nest
from paged_jax.steps import kv_cache
from paged_jax.steps.kv_cache import LayerCache, PagedKVCache
from paged_jax.steps.model_steps import NUM_LOGPROBS, decode_step
from paged_jax.steps.sampling import Sampled, SamplingBatch, sample

_MODEL = flags.DEFINE_string("model", "smollm2", "A model's name or path.")
_DTYPE = flags.DEFINE_string("dtype", "float32", "Of weights and cache.")
_ATTENTION = flags.DEFINE_string("attention", "auto", "The paged attention to time.")
_BATCH = flags.DEFINE_list("batch", ["1", "8", "32"], "Batch sizes.")
_CONTEXT = flags.DEFINE_list("context", ["64", "512"], "Context lengths, in tokens.")
_BLOCK_SIZE = flags.DEFINE_list("block_size", ["16"], "Block sizes, in tokens.")
_TABLE_TOKENS = flags.DEFINE_list(
    "table_tokens", ["0"], "Widths of the block table, in tokens; 0: as wide as the context."
)
_ROUNDS = flags.DEFINE_integer("rounds", 10, "Timed steps of each kind and case.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of tokens and of the order of the blocks.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/decode_step", "Where the results go.")


class Shape(NamedTuple):
    """What a case runs; lengths in tokens."""

    batch: int
    context: int
    block_size: int
    table_tokens: int


class Case(NamedTuple):
    """One row of the table; lengths in tokens, times in milliseconds (medians)."""

    batch: int
    context: int
    block_size: int
    table_tokens: int
    contiguous_ms: float
    paged_ms: float
    ratio: float  # median over rounds of paged / contiguous
    ratio_low: float  # quartiles of the same
    ratio_high: float


class ContiguousIndex(NamedTuple):
    """What a layer of the contiguous step needs to know."""

    positions: Array  # i32[B]
    context_lens: Array  # i32[B]


def contiguous_attention(
    scale: float, cache: LayerCache, index: ContiguousIndex, q: Array, k: Array, v: Array
) -> tuple[Array, LayerCache]:
    """Decode attention over one row of memory for each sequence: caches ``[B, Hk, L, D]``."""
    B, Hq, D = q.shape
    _, Hk, L, _ = cache[0].shape
    rows = jnp.arange(B)
    keys = cache[0].at[rows, :, index.positions].set(k)
    values = cache[1].at[rows, :, index.positions].set(v)
    grouped = q.reshape(B, Hk, Hq // Hk, D)
    # Keys first, as in the paged kernel: the faster product on a CPU.
    scores = jnp.einsum("bhld,bhgd->bhlg", keys, grouped, preferred_element_type=jnp.float32)
    scores = scale * scores.swapaxes(2, 3)
    visible = jnp.arange(L) < index.context_lens[:, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bhgl,bhld->bhgd", weights.astype(values.dtype), values)
    return out.reshape(q.shape), (keys, values)


@partial(jax.jit, static_argnames=("config", "attend"), donate_argnames=("cache",))
def contiguous_step(
    params: Params,
    cache: PagedKVCache,
    tokens: Array,  # i32[B]
    positions: Array,  # i32[B]
    context_lens: Array,  # i32[B]
    sampling: SamplingBatch,
    *,
    config: ModelConfig,
    attend: Callable[..., Any],
) -> tuple[PagedKVCache, Sampled]:
    """`decode_step` with ``[B, Hk, L, D]`` caches in place of blocks and tables."""
    model = bind(config, params)
    index = ContiguousIndex(positions, context_lens)
    hidden, layers = model(tokens, positions, attend, cache.layers, index)
    sampled = sample(model.logits(hidden), positions, sampling, num_logprobs=NUM_LOGPROBS)
    return PagedKVCache.of_layers(layers), sampled


class Stepper:
    """A jitted step and the cache that goes in and out of it."""

    def __init__(self, step: Callable[..., Any], cache: PagedKVCache):
        self._step, self._cache = step, cache

    def seconds(self) -> float:
        """Run once; wall time until the tokens are there."""
        start = time.perf_counter()
        self._cache, sampled = self._step(self._cache)
        np.asarray(sampled.tokens)
        return time.perf_counter() - start


def attention_of(config: ModelConfig, shape: Shape) -> AttentionChoice:
    """The paged attention that the flags ask for; ValueError where it refuses."""
    options = EngineConfig(
        dtype=_DTYPE.value,
        block_size=shape.block_size,
        max_num_seqs=shape.batch,
        max_num_batched_tokens=max(MIN_PREFILL_TOKENS, shape.batch),
        max_model_len=shape.table_tokens,
        max_prefill_seqs=1,
        attention=_ATTENTION.value,
        prefill_attention="xla",  # not run
    )
    return choose_attention(config, options)


def make_steppers(
    config: ModelConfig, params: Params, shape: Shape, choice: AttentionChoice
) -> tuple[Stepper, Stepper]:
    """(contiguous, paged) steps over random caches of ``batch`` rows of ``context`` tokens."""
    batch, context, block_size, table = shape
    rng = np.random.default_rng(_SEED.value)
    blocks_per_row = -(-context // block_size)
    num_blocks = batch * blocks_per_row + 1
    tokens = rng.integers(config.vocab_size, size=batch, dtype=np.int32)
    context_lens = np.full(batch, context, np.int32)
    tables = np.zeros((batch, max(blocks_per_row, -(-table // block_size))), np.int32)
    tables[:, :blocks_per_row] = 1 + rng.permutation(num_blocks - 1).reshape(batch, -1)
    history = np.zeros((batch, 1), np.int32)
    sampling = jax.device_put(sampling_batch(sampling_rows([], batch), history))

    def random_cache(rows: int, row_tokens: int, head_size: int) -> PagedKVCache:
        empty = kv_cache.create(
            num_layers=config.num_layers,
            num_blocks=rows,
            num_kv_heads=config.num_kv_heads,
            block_size=row_tokens,
            head_dim=head_size,
            dtype=_DTYPE.value,
        )
        key = jax.random.key(_SEED.value)
        return jax.tree.map(lambda x: jax.random.normal(key, x.shape, x.dtype), empty)

    scale = config.head_dim**-0.5
    args = jax.device_put((tokens, context_lens - 1))
    contiguous = partial(contiguous_attention, scale)
    tables, context_lens = jax.device_put((tables, context_lens))
    return (
        Stepper(
            lambda cache: contiguous_step(
                params, cache, *args, context_lens, sampling, config=config, attend=contiguous
            ),
            random_cache(batch, context, config.head_dim),
        ),
        Stepper(
            lambda cache: decode_step(
                params,
                cache,
                *args,
                tables,
                context_lens,
                sampling,
                config=config,
                attention=choice.attention,
            ),
            random_cache(num_blocks, block_size, choice.cache_head_size),
        ),
    )


def run_case(config: ModelConfig, params: Params, shape: Shape, choice: AttentionChoice) -> Case:
    """Time the two steps in turn."""
    steppers = make_steppers(config, params, shape, choice)
    for stepper in steppers:
        stepper.seconds()  # compiles
        stepper.seconds()
    seconds = np.array([[s.seconds() for s in steppers] for _ in range(_ROUNDS.value)])
    contiguous_ms, paged_ms = 1e3 * np.median(seconds, axis=0)
    ratios = seconds[:, 1] / seconds[:, 0]
    low, ratio, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return Case(
        *shape,
        *(float(x) for x in (contiguous_ms, paged_ms, ratio, low, high)),
    )


def plot(cases: list[Case], path: str) -> None:
    """Ratio against context, a line for each batch, block size and table width."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    groups = sorted({(c.batch, c.block_size, c.table_tokens - c.context) for c in cases})
    for batch, block_size, extra in groups:
        chosen = [
            c
            for c in cases
            if (c.batch, c.block_size, c.table_tokens - c.context) == (batch, block_size, extra)
        ]
        label = f"batch {batch}, block {block_size}" + (f", table + {extra}" if extra else "")
        axes.plot([c.context for c in chosen], [c.ratio for c in chosen], "o-", label=label)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="context length (tokens)", ylabel="paged / contiguous step time")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    batches = reporting.integers(_BATCH, 1)
    contexts = reporting.integers(_CONTEXT, 1)
    block_sizes = reporting.integers(_BLOCK_SIZE, 1)
    widths = reporting.integers(_TABLE_TOKENS, 0)
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    model = load_model(_MODEL.value, _DTYPE.value)
    if model.config.sliding_window is not None:
        raise ValueError(
            f"{model.config.name} has a sliding window, which the contiguous step leaves out; "
            "choose a model without"
        )
    params = nest({name: jax.device_put(x) for name, x in model.weights.items()})

    grid = [
        Shape(b, c, s, max(w, c))
        for b in batches
        for c in contexts
        for s in block_sizes
        for w in widths
    ]
    choices = [attention_of(model.config, shape) for shape in grid]
    cases = []
    with tqdm(zip(grid, choices, strict=True), total=len(grid), unit="case") as bar:
        for shape, choice in bar:
            bar.set_postfix_str(
                f"batch {shape.batch}, context {shape.context}, block {shape.block_size}"
            )
            cases.append(run_case(model.config, params, shape, choice))

    reporting.report_cases(
        f"Decode step of {model.config.name}",
        [case._asdict() for case in cases],
        out_dir,
        _MODEL,
        attention=sorted({choice.attention.decode_impl for choice in choices}),
    )
    plot(cases, str(out_dir / "ratio.png"))
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
