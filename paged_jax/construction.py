"""What an engine is made of: scheduler and executor over one memory manager and one cache."""

import jax

from paged_jax import kv_cache, pool_size
from paged_jax.attention_choice import AttentionChoice
from paged_jax.config import EngineConfig
from paged_jax.executor.buckets import prefill_buckets
from paged_jax.executor.jax_executor import JaxExecutor
from paged_jax.loading import LoadedModel
from paged_jax.loading.arrays import weight_dtype
from paged_jax.memory.policies import PAGED, make_memory
from paged_jax.models.config import ModelConfig
from paged_jax.models.split import Params, nest
from paged_jax.scheduling.scheduler import Scheduler


def build(
    config: ModelConfig, options: EngineConfig, attention: AttentionChoice
) -> tuple[Scheduler, JaxExecutor]:
    """An idle scheduler and an executor without parameters; names as in `paged_jax.Engine`."""
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
    buckets = prefill_buckets(options.max_num_batched_tokens)
    scheduler = Scheduler(
        memory, options, eos_token_ids=config.eos_token_ids, prefill_sizes=buckets
    )
    executor = JaxExecutor(
        config,
        cache,
        memory,
        attention=attention.attention,
        max_num_seqs=options.max_num_seqs,
        prefill_buckets=buckets,
        max_prefill_seqs=options.max_prefill_seqs,
        max_model_len=options.max_model_len,
    )
    return scheduler, executor


def device_params(model: LoadedModel, dtype: str) -> Params:
    """A model's weights on the device."""
    kind = weight_dtype(dtype)
    return nest({n: jax.device_put(x.astype(kind, copy=False)) for n, x in model.weights.items()})
