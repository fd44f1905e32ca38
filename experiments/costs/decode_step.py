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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.lib import figures
from experiments.lib.claims import Claim, Results
from experiments.lib.experiment import grid, run
from experiments.lib.options import Options, option
from experiments.lib.reporting import report
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


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    model: str = option("smollm2", "The model's name or path.")
    dtype: str = option("float32", "Weights and cache have this dtype.")
    attention: str = option("auto", "This implementation of paged attention is timed.")
    batch: tuple[int, ...] = option((1, 8, 32), "Batch sizes.", quick=(8,), least=1)
    context: tuple[int, ...] = option(
        (64, 512), "Context lengths, in tokens.", quick=(64,), least=1
    )
    block_size: tuple[int, ...] = option((16,), "Block sizes, in tokens.", least=1)
    table_tokens: tuple[int, ...] = option(
        (0,), "Widths of the block table, in tokens. With 0 it is as wide as the context.", least=0
    )
    rounds: int = option(10, "Each step of a case is timed so often.", least=1)


class Shape(NamedTuple):
    """A case's sizes; lengths in tokens."""

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
    """The places of each row's new token and the end of its context."""

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
        """Wall time of one step, until its tokens are on the host."""
        start = time.perf_counter()
        self._cache, sampled = self._step(self._cache)
        np.asarray(sampled.tokens)
        return time.perf_counter() - start


@cache
def load(config: Config) -> tuple[ModelConfig, Params]:
    """The model; ValueError for one that the contiguous step cannot run."""
    model = load_model(config.model, config.dtype)
    if model.config.sliding_window is not None:
        raise ValueError(
            f"{model.config.name} has a sliding window, which the contiguous step leaves out; "
            "choose a model without"
        )
    return model.config, nest({name: jax.device_put(x) for name, x in model.weights.items()})


def attention_of(shape: Shape, config: Config) -> AttentionChoice:
    """The paged attention that the options ask for; ValueError where it refuses."""
    options = EngineConfig(
        dtype=config.dtype,
        block_size=shape.block_size,
        max_num_seqs=shape.batch,
        max_num_batched_tokens=max(MIN_PREFILL_TOKENS, shape.batch),
        max_model_len=shape.table_tokens,
        max_prefill_seqs=1,
        attention=config.attention,
        prefill_attention="xla",  # not run
    )
    return choose_attention(load(config)[0], options)


def make_steppers(shape: Shape, config: Config) -> tuple[Stepper, Stepper]:
    """(contiguous, paged) steps over random caches of ``batch`` rows of ``context`` tokens."""
    batch, context, block_size, table = shape
    model, params = load(config)
    choice = attention_of(shape, config)
    rng = np.random.default_rng(config.seed)
    blocks_per_row = -(-context // block_size)
    num_blocks = batch * blocks_per_row + 1
    tokens = rng.integers(model.vocab_size, size=batch, dtype=np.int32)
    context_lens = np.full(batch, context, np.int32)
    tables = np.zeros((batch, max(blocks_per_row, -(-table // block_size))), np.int32)
    tables[:, :blocks_per_row] = 1 + rng.permutation(num_blocks - 1).reshape(batch, -1)
    history = np.zeros((batch, 1), np.int32)
    sampling = jax.device_put(sampling_batch(sampling_rows([], batch), history))

    def random_cache(rows: int, row_tokens: int, head_size: int) -> PagedKVCache:
        empty = kv_cache.create(
            num_layers=model.num_layers,
            num_blocks=rows,
            num_kv_heads=model.num_kv_heads,
            block_size=row_tokens,
            head_dim=head_size,
            dtype=config.dtype,
        )
        key = jax.random.key(config.seed)
        return jax.tree.map(lambda x: jax.random.normal(key, x.shape, x.dtype), empty)

    args = jax.device_put((tokens, context_lens - 1))
    attend = partial(contiguous_attention, model.head_dim**-0.5)
    tables, context_lens = jax.device_put((tables, context_lens))

    def contiguous(cache: PagedKVCache) -> tuple[PagedKVCache, Sampled]:
        return contiguous_step(
            params, cache, *args, context_lens, sampling, config=model, attend=attend
        )

    def paged(cache: PagedKVCache) -> tuple[PagedKVCache, Sampled]:
        return decode_step(
            *(params, cache, *args, tables, context_lens, sampling),
            config=model,
            attention=choice.attention,
        )

    return (
        Stepper(contiguous, random_cache(batch, context, model.head_dim)),
        Stepper(paged, random_cache(num_blocks, block_size, choice.cache_head_size)),
    )


def measure(shape: Shape, config: Config) -> Case:
    """Time the two steps in turn."""
    steppers = make_steppers(shape, config)
    for stepper in steppers:
        stepper.seconds()  # compiles
        stepper.seconds()
    seconds = np.array([[s.seconds() for s in steppers] for _ in range(config.rounds)])
    contiguous_ms, paged_ms = 1e3 * np.median(seconds, axis=0)
    low, ratio, high = np.quantile(seconds[:, 1] / seconds[:, 0], [0.25, 0.5, 0.75])
    return Case(*shape, *map(float, (contiguous_ms, paged_ms, ratio, low, high)))


def plot(cases: Sequence[Case], out_dir: str) -> None:
    """Ratio against context, a line for each batch, block size and table width."""
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for case in sorted(cases):
        extra = case.table_tokens - case.context
        label = f"batch {case.batch}, block {case.block_size}" + (
            f", table + {extra}" if extra else ""
        )
        lines[label].append((case.context, case.ratio))
    figure, [[axes]] = figures.panels(size=(6, 4))
    figures.lines(axes, lines)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(
        xlabel="context length (tokens)", ylabel="paged / contiguous step time", ylim=(0, None)
    )
    axes.legend(fontsize=8)
    figures.save(figure, out_dir, "ratio.png")


def main(config: Config) -> None:
    sizes = product(config.batch, config.context, config.block_size, config.table_tokens)
    shapes = [Shape(b, c, s, max(w, c)) for b, c, s, w in sizes]
    implementations = {attention_of(shape, config).attention.decode_impl for shape in shapes}
    cases = grid(partial(measure, config=config), shapes, config, unit="case")
    report(
        f"Decode step of {load(config)[0].name}",
        cases,
        config,
        attention=sorted(implementations),
    )
    plot(cases, config.out_dir)


def claims(results: Results) -> Iterator[Claim]:
    """The paper gives no figure of a whole step."""
    ratios = [case["ratio"] for case in results["cases"]]
    yield Claim(
        "a whole decode step, paged over contiguous",
        "not given",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        note="on this device",
    )


if __name__ == "__main__":
    run(main, Config)
