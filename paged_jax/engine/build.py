"""The parts of an engine: attention, and scheduler and executor over one memory and one cache."""

import importlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.config import EngineConfig
from paged_jax.engine import pool_size
from paged_jax.executor.buckets import prefill_buckets
from paged_jax.executor.jax_executor import JaxExecutor
from paged_jax.executor.prefill_arrays import PrefillShape
from paged_jax.loading import LoadedModel
from paged_jax.loading.weights import weight_dtype
from paged_jax.memory.policies import PAGED, make_memory
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import Params, nest
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.steps import kv_cache
from paged_jax.steps.attention import PagedAttention
from paged_jax.steps.logits import LogitsProcessor
from pallas_kernels import kv_write, moves, targets
from pallas_kernels.paged_attention import AttentionOptions, Call, cache_head_size, resolve

# Blocks of the calls that are tried. The size of the pool is not known yet; its steps are checked
# when they are traced.
NUM_BLOCKS = 2


class AttentionChoice(NamedTuple):
    """A layer's attention, and the head size that its implementations want of the cache."""

    attention: PagedAttention
    cache_head_size: int


def choose_attention(config: ModelConfig, engine: EngineConfig) -> AttentionChoice:
    """The implementations that an engine runs; ValueError if one refuses the largest steps."""
    interpret = engine.interpret_kernels
    if interpret:
        # The interpreter imports this module when it first runs. The module adds a setting that
        # jit takes into account: every step that was compiled before would be compiled again.
        importlib.import_module("jax.experimental.pallas.fuser")
    D, dtype, target = config.head_dim, jnp.dtype(engine.dtype), targets.current()
    options = AttentionOptions(D**-0.5, sliding_window=config.sliding_window, interpret=interpret)

    def call(rows: int, num_queries: int, head_size: int) -> Call:
        return Call(
            batch=rows,
            num_queries=num_queries,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=head_size,
            block_size=engine.block_size,
            num_blocks=NUM_BLOCKS,
            max_blocks=-(-engine.max_model_len // engine.block_size),
            dtype=dtype,
            options=options,
            target=target,
        )

    num_tokens = prefill_buckets(engine.max_num_batched_tokens)[-1]
    chunks = PrefillShape.of(num_tokens, engine.max_prefill_seqs)
    decode_shape, prefill_shape = (engine.max_num_seqs, 1), (chunks.num_rows, chunks.row_tokens)
    decode = resolve(engine.attention, call(*decode_shape, D), widen=True)
    prefill = resolve(engine.prefill_attention, call(*prefill_shape, D), widen=True)
    width = max(cache_head_size(decode, D), cache_head_size(prefill, D))
    # They share the cache: neither may refuse the width that the other wants.
    resolve(decode, call(*decode_shape, width))
    resolve(prefill, call(*prefill_shape, width))

    cache = (NUM_BLOCKS, config.num_kv_heads, engine.block_size, width)
    tokens = moves.MoveCall(num_tokens, 2, cache, dtype, moves.MoveOptions(interpret), target)
    write = moves.resolve_move(kv_write.IMPLEMENTATIONS, engine.kv_write, tokens)
    attention = PagedAttention(
        options.scale, config.sliding_window, decode, prefill, write, interpret
    )
    return AttentionChoice(attention, width)


def build(
    config: ModelConfig,
    options: EngineConfig,
    attention: AttentionChoice,
    processors: Mapping[str, LogitsProcessor],
) -> tuple[Scheduler, JaxExecutor]:
    """An idle scheduler, and an executor without parameters."""
    head_size = attention.cache_head_size
    num_blocks = pool_size.num_blocks(config, options, cache_head_size=head_size)
    num_swap_blocks = options.swap_space_blocks or 0
    if options.memory_policy == PAGED:  # others swap nothing
        num_swap_blocks = pool_size.num_swap_blocks(
            config, options, num_blocks, cache_head_size=head_size
        )
    memory = make_memory(
        options.memory_policy,
        num_blocks + 1,
        options.block_size,
        max_model_len=options.max_model_len,
        enable_prefix_caching=options.enable_prefix_caching,
        num_swap_blocks=num_swap_blocks,
    )
    cache = kv_cache.create(
        num_layers=config.num_layers,
        num_blocks=num_blocks + 1,
        num_kv_heads=config.num_kv_heads,
        block_size=options.block_size,
        head_dim=head_size,
        dtype=options.dtype,
    )
    scheduler = Scheduler(
        memory,
        options,
        eos_token_ids=config.eos_token_ids,
        prefill_sizes=prefill_buckets(options.max_num_batched_tokens),
    )
    return scheduler, JaxExecutor(config, options, attention.attention, cache, memory, processors)


def device_params(model: LoadedModel, dtype: str) -> Params:
    """A model's weights on the device."""
    kind = weight_dtype(dtype)
    return nest({n: jax.device_put(x.astype(kind, copy=False)) for n, x in model.weights.items()})
