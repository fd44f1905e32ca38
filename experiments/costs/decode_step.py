"""What paging costs a decode step: the same model over a paged and over a contiguous KV cache.

    python -m experiments.costs.decode_step
    python -m experiments.costs.decode_step --batch=1,8,32 --context=64,512 --block_size=1,16,64
    python -m experiments.costs.decode_step --context=64 --table_tokens=64,2048

Each case times whole decode steps (model, attention, cache write, greedy sampling), with all rows
at the same context length and blocks scattered over the pool. The contiguous step keeps
`[batch, kv_heads, context, head_dim]` per layer and attends with two plain products. The two are
timed in turn, round by round, so that a noisy machine slows both. `--table_tokens` widens the block
table beyond the context, which should cost nothing.

Expect two minutes on two CPU cores. --out_dir gets results.json, results.csv and ratio.png.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.kernels.baselines import two_products
from experiments.lib import Options, figures, grid, option, report, run
from experiments.lib.claims import Claim, Results
from experiments.lib.paired import ratio_spread
from paged_jax.config import EngineConfig
from paged_jax.engine.build import AttentionChoice, choose_attention
from paged_jax.executor.buckets import MIN_PREFILL_TOKENS
from paged_jax.executor.sampling_rows import SamplingArrays, sampling_rows
from paged_jax.loading import load_model
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import Params, nest
from paged_jax.steps import kv_cache
from paged_jax.steps.attention import DecodeIndex, PagedAttention
from paged_jax.steps.kv_cache import LayerCache
from paged_jax.steps.model_steps import decode_step


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    model: str = option("smollm2", "The model's name or path.")
    dtype: str = option("float32", "Weights and cache have this dtype.")
    attention: str = option("auto", "This implementation of paged attention is timed.")
    batch: tuple[int, ...] = option((1, 8, 32), "Batch sizes.", quick=(8,), least=1)
    context: tuple[int, ...] = option((64, 512), "Context lengths (tokens).", quick=(64,), least=1)
    block_size: tuple[int, ...] = option((16,), "Block sizes (tokens).", least=1)
    table_tokens: tuple[int, ...] = option((0,), "Table widths (0: the context).", least=0)
    rounds: int = option(10, "Each step of a case is timed so often.", least=1)


class Shape(NamedTuple):
    """A case's sizes; lengths in tokens."""

    batch: int
    context: int
    block_size: int
    table_tokens: int


class ContiguousAttention(PagedAttention):
    """Decode attention over one block for each sequence, `[B, Hk, L, D]`, which needs no table."""

    def decode(
        self, cache: LayerCache, index: DecodeIndex, q: Array, k: Array, v: Array
    ) -> tuple[Array, LayerCache]:
        rows, lens = jnp.arange(len(q)), index.context_lens
        keys = cache[0].at[rows, :, lens - 1].set(k)
        values = cache[1].at[rows, :, lens - 1].set(v)
        return two_products(self.scale, q[:, None], keys, values, lens)[:, 0], (keys, values)


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


def make_steppers(shape: Shape, config: Config) -> list[Callable[[], float]]:
    """A contiguous and a paged step over random caches of `batch` rows of `context` tokens.

    Each makes one step and returns its seconds, until the tokens are on the host.
    """
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
    sampling = SamplingArrays(model.vocab_size).batch(sampling_rows([], batch), [], [])

    def stepper(
        attention: PagedAttention, rows: int, row_tokens: int, head_size: int, tables: Any
    ) -> Callable[[], float]:
        empty = kv_cache.create(
            num_layers=model.num_layers,
            num_blocks=rows,
            num_kv_heads=model.num_kv_heads,
            block_size=row_tokens,
            head_dim=head_size,
            dtype=config.dtype,
        )
        key = jax.random.key(config.seed)
        cache = jax.tree.map(lambda x: jax.random.normal(key, x.shape, x.dtype), empty)
        args = jax.device_put((tokens, context_lens - 1, tables, context_lens, sampling))
        history = jnp.zeros((1, 1), jnp.int32)  # of no row

        def seconds() -> float:
            nonlocal cache, history
            start = time.perf_counter()
            cache, sampled, history = decode_step(
                params, cache, *args, history, config=model, attention=attention
            )
            np.asarray(sampled.tokens)
            return time.perf_counter() - start

        return seconds

    contiguous = ContiguousAttention(model.head_dim**-0.5, None, "contiguous", "none")
    own_block = np.arange(batch, dtype=np.int32)[:, None]
    return [
        stepper(contiguous, batch, context, model.head_dim, own_block),
        stepper(choice.attention, num_blocks, block_size, choice.cache_head_size, tables),
    ]


def measure(shape: Shape, config: Config) -> dict[str, Any]:
    """Time the two steps in turn; lengths in tokens."""
    steppers = make_steppers(shape, config)
    for step in steppers:
        step()  # compiles
        step()
    contiguous, paged = np.array([[step() for step in steppers] for _ in range(config.rounds)]).T
    low, ratio, high = ratio_spread(paged, contiguous)
    return shape._asdict() | {
        "contiguous_ms": 1e3 * float(np.median(contiguous)),
        "paged_ms": 1e3 * float(np.median(paged)),
        "ratio": ratio,  # median over rounds of paged / contiguous
        "ratio_low": low,  # quartiles of the same
        "ratio_high": high,
    }


def label(row: dict[str, Any]) -> str:
    extra = row["table_tokens"] - row["context"]
    table = f", table + {extra}" if extra else ""
    return f"batch {row['batch']}, block {row['block_size']}{table}"


def main(config: Config) -> None:
    sizes = product(config.batch, config.context, config.block_size, config.table_tokens)
    shapes = [Shape(b, c, s, max(w, c)) for b, c, s, w in sizes]
    attention = sorted({attention_of(shape, config).attention.decode_impl for shape in shapes})
    rows = grid(partial(measure, config=config), shapes, config, unit="case")
    report(f"Decode step of {load(config)[0].name}", rows, config, attention=attention)
    labels = "context length (tokens)", "paged / contiguous step time"
    with figures.panel(config.out_dir, "ratio.png", *labels, ylim=(0, None)) as axes:
        in_order = sorted(rows, key=itemgetter(*Shape._fields))
        figures.lines(axes, figures.series(in_order, "context", "ratio", label))
        axes.axhline(1, color="grey", linewidth=0.8)


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
