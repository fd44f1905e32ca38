"""Which attention an engine runs: decided before its cache exists, whose width depends on it."""

from typing import NamedTuple

import jax.numpy as jnp

from paged_jax.attention import PagedAttention
from paged_jax.executor.buckets import prefill_buckets
from paged_jax.executor.prefill_arrays import PrefillShape
from paged_jax.limits import Limits
from paged_jax.models.config import ModelConfig
from pallas_kernels import targets
from pallas_kernels.paged_attention import AttentionOptions, Call, cache_head_size, resolve


class AttentionChoice(NamedTuple):
    """A layer's attention, and the head size of the cache that its implementations want."""

    attention: PagedAttention
    cache_head_size: int


def choose_attention(
    config: ModelConfig,
    limits: Limits,
    max_model_len: int,
    *,
    decode: str,
    prefill: str,
    interpret: bool,
) -> AttentionChoice:
    """Implementations by name, or "auto", for the largest steps; ValueError where one refuses.

    How many blocks there are is not known yet: here it is two. Steps are checked again as they are
    traced.
    """
    options = AttentionOptions(
        config.head_dim**-0.5, sliding_window=config.sliding_window, interpret=interpret
    )

    def call(rows: int, num_queries: int, head_size: int) -> Call:
        return Call(
            batch=rows,
            num_queries=num_queries,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=head_size,
            block_size=limits.block_size,
            num_blocks=2,
            max_blocks=-(-max_model_len // limits.block_size),
            dtype=jnp.dtype(limits.dtype),
            options=options,
            target=targets.current(),
        )

    largest = prefill_buckets(limits.max_num_batched_tokens)[-1]
    chunks = PrefillShape.of(largest, limits.max_prefill_seqs)
    shapes = ((limits.max_num_seqs, 1), (chunks.num_rows, chunks.row_tokens))
    names = []
    for name, shape in zip((decode, prefill), shapes, strict=True):
        width = config.head_dim if name == "auto" else cache_head_size(name, config.head_dim)
        names.append(resolve(name, call(*shape, width)))
    width = max(cache_head_size(name, config.head_dim) for name in names)
    for name, shape in zip(names, shapes, strict=True):  # they share the cache
        resolve(name, call(*shape, width))
    on_decode, on_prefill = names
    attention = PagedAttention(
        options.scale, config.sliding_window, on_decode, on_prefill, interpret
    )
    return AttentionChoice(attention, width)
