"""What an engine is made of: scheduler and executor over one memory manager and one cache."""

import jax

from paged_jax import kv_cache, pool_size
from paged_jax.attention_choice import AttentionChoice
from paged_jax.executor.buckets import prefill_buckets
from paged_jax.executor.jax_executor import JaxExecutor
from paged_jax.limits import Limits
from paged_jax.loading import LoadedModel
from paged_jax.loading.arrays import weight_dtype
from paged_jax.memory.policies import PAGED, make_memory
from paged_jax.models.config import ModelConfig
from paged_jax.models.split import Params, nest
from paged_jax.scheduling.scheduler import Scheduler


def build(
    config: ModelConfig,
    limits: Limits,
    attention: AttentionChoice,
    max_model_len: int,
) -> tuple[Scheduler, JaxExecutor]:
    """An idle scheduler and an executor without parameters; names as in `paged_jax.Engine`."""
    head_size = attention.cache_head_size
    num_blocks = pool_size.num_blocks(config, limits, max_model_len, cache_head_size=head_size)
    num_swap_blocks = limits.swap_space_blocks or 0
    if limits.memory_policy == PAGED:  # others swap nothing
        num_swap_blocks = pool_size.num_swap_blocks(
            config, limits, num_blocks, cache_head_size=head_size
        )
    memory = make_memory(
        limits.memory_policy,
        num_blocks + 1,
        limits.block_size,
        max_model_len=max_model_len,
        enable_prefix_caching=limits.enable_prefix_caching,
        num_swap_blocks=num_swap_blocks,
    )
    cache = kv_cache.create(
        num_layers=config.num_layers,
        num_blocks=num_blocks + 1,
        num_kv_heads=config.num_kv_heads,
        block_size=limits.block_size,
        head_dim=head_size,
        dtype=limits.dtype,
    )
    buckets = prefill_buckets(limits.max_num_batched_tokens)
    scheduler = Scheduler(
        memory,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_prefill_seqs=limits.max_prefill_seqs,
        eos_token_ids=config.eos_token_ids,
        watermark=limits.watermark,
        prefill_sizes=buckets,
        enable_prefix_caching=limits.enable_prefix_caching,
        policy=limits.scheduling_policy,
        preemption_mode=limits.preemption_mode,
        enable_chunked_prefill=limits.enable_chunked_prefill,
        target_inter_token_s=limits.target_inter_token_s,
        max_num_waiting=limits.max_num_waiting,
    )
    executor = JaxExecutor(
        config,
        cache,
        memory,
        attention=attention.attention,
        max_num_seqs=limits.max_num_seqs,
        prefill_buckets=buckets,
        max_prefill_seqs=limits.max_prefill_seqs,
        max_model_len=max_model_len,
    )
    return scheduler, executor


def device_params(model: LoadedModel, dtype: str) -> Params:
    """A model's weights on the device."""
    kind = weight_dtype(dtype)
    return nest({n: jax.device_put(x.astype(kind, copy=False)) for n, x in model.weights.items()})
