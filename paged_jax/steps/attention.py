"""How a layer attends to the paged cache: write the new keys and values, then read the tables.

`PagedAttention` is the `attend` that the model calls in a decode or prefill step. It is a frozen
dataclass, so it can be a static argument of jitted functions.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array

from paged_jax.steps.kv_cache import LayerCache
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention, paged_prefill_attention

IntArray = Any  # jax.Array in a step; numpy where the host prepares one


class DecodeIndex(NamedTuple):
    """The slots that the B tokens of a decode step are written to, and the context they see."""

    slots: Array  # i32[B], slot of each token
    block_tables: Array  # i32[B, M]
    context_lens: Array  # i32[B], 0 in padded rows


class PrefillIndex(NamedTuple):
    """The slots that the N tokens of a prefill step are written to, and the context they see.

    The tokens of all prompts are packed one after the other. For attention they are laid out in R
    rows of T tokens, each of one prompt: a long prompt takes several rows, which share its block
    table.
    """

    slots: IntArray  # i32[N], slot of each token
    token_of: IntArray  # i32[R, T], packed index of each query; N stands for none
    place_of: IntArray  # i32[N], its inverse: row * T + column of each token
    block_tables: IntArray  # i32[R, M]
    context_lens: IntArray  # i32[R], tokens up to the row's last one, 0 in padded rows
    query_starts: IntArray  # i32[R], position of the row's first token


@dataclass(frozen=True)
class PagedAttention:
    """Static part of a layer's attention; implementations are named as in `pallas_kernels`."""

    scale: float
    sliding_window: int | None
    decode_impl: str
    prefill_impl: str
    write_impl: str = "auto"
    interpret: bool = False  # run Pallas kernels in Pallas' interpreter

    def decode(
        self, cache: LayerCache, index: DecodeIndex, q: Array, k: Array, v: Array
    ) -> tuple[Array, LayerCache]:
        """q `[B, Hq, D]`, k and v `[B, Hk, D]` -> out `[B, Hq, D]`, cache."""
        cache = self._write(cache, k, v, index.slots)
        out = paged_attention(
            q,
            *cache,
            index.block_tables,
            index.context_lens,
            scale=self.scale,
            sliding_window=self.sliding_window,
            impl=self.decode_impl,
            interpret=self.interpret,
        )
        assert isinstance(out, Array)
        return out, cache

    def prefill(
        self, cache: LayerCache, index: PrefillIndex, q: Array, k: Array, v: Array
    ) -> tuple[Array, LayerCache]:
        """q `[N, Hq, D]`, k and v `[N, Hk, D]` -> out `[N, Hq, D]`, cache."""
        cache = self._write(cache, k, v, index.slots)
        rows = q.at[index.token_of].get(mode="fill", fill_value=0)  # [R, T, Hq, D]
        result = paged_prefill_attention(
            rows,
            *cache,
            index.block_tables,
            index.context_lens,
            index.query_starts,
            scale=self.scale,
            sliding_window=self.sliding_window,
            impl=self.prefill_impl,
            interpret=self.interpret,
        )
        packed = result.out.reshape(-1, *q.shape[1:])[index.place_of]
        return packed, cache

    def _write(self, cache: LayerCache, k: Array, v: Array, slots: Array) -> LayerCache:
        return write_kv(*cache, k, v, slots, impl=self.write_impl, interpret=self.interpret)


def causal_attention(state: None, scale: float, q: Array, k: Array, v: Array) -> tuple[Array, None]:
    """Dense causal attention within each sequence, for training: all `[B, T, heads, D]`."""
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True), state
