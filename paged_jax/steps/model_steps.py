"""The jitted steps: decode, prefill, the head that samples a prefilled prompt's first token, the
scores of a prompt's own tokens, copies of blocks, and tokens passed from one step to the next.

They are pure functions of parameters, cache and static-shaped arrays, compiled once for each bucket
of rows or tokens. The cache is donated: it is updated in place, never copied. So is the history
`i32[any, max_model_len]`, which has a row (a slot) for each sequence whose sampling depends on its
tokens so far, and holds them by position.
"""

from functools import partial

import jax
from jax import Array, lax

from paged_jax.models.config import ModelConfig
from paged_jax.models.params import Params, bind
from paged_jax.steps.attention import DecodeIndex, PagedAttention, PrefillIndex
from paged_jax.steps.kv_cache import PagedKVCache, copy_blocks, slots_of
from paged_jax.steps.logits import LogitsProcessor
from paged_jax.steps.sampling import Sampled, SamplingBatch, log_probabilities, sample
from pallas_kernels.numerics import default_numerics

NUM_LOGPROBS = 20  # most likely tokens that a step reports where any row asks for them


@partial(
    jax.jit,
    static_argnames=("config", "attention", "processors"),
    donate_argnames=("cache", "history"),
)
@default_numerics()
def decode_step(
    params: Params,
    cache: PagedKVCache,
    tokens: Array,  # i32[B], the last token of each sequence
    positions: Array,  # i32[B], its position
    block_tables: Array,  # i32[B, M]
    context_lens: Array,  # i32[B], positions + 1, or 0 in padded rows
    sampling: SamplingBatch,
    history: Array,  # i32[any, H]; the rows' tokens before these
    *,
    config: ModelConfig,
    attention: PagedAttention,
    processors: tuple[LogitsProcessor, ...] = (),
) -> tuple[PagedKVCache, Sampled, Array]:
    """One token for each row: write its keys and values, attend to its context, sample the next.

    A padded row has context length 0 and a table of zeros: it writes to the null block. The cache
    and the history are donated; the history comes back with `tokens` written to the rows' slots.
    The work grows with `context_lens`, not the width M of the tables.
    """
    model = bind(config, params)
    slots = slots_of(block_tables, positions, cache.block_size)
    index = DecodeIndex(slots, block_tables, context_lens)
    hidden, layers = model(tokens, positions, attention.decode, cache.layers, index)
    history = history.at[sampling.rules.slots, positions].set(tokens, mode="drop")
    sampled = sample(
        model.logits(hidden),
        positions,
        sampling,
        history,
        num_logprobs=NUM_LOGPROBS,
        processors=processors,
    )
    return PagedKVCache.of_layers(layers), sampled, history


@partial(jax.jit, static_argnames=("config", "attention"), donate_argnames=("cache",))
@default_numerics()
def prefill_step(
    params: Params,
    cache: PagedKVCache,
    tokens: Array,  # i32[N], chunks of several prompts, packed
    positions: Array,  # i32[N]
    index: PrefillIndex,
    last: Array,  # i32[L], packed index of each chunk's last token
    *,
    config: ModelConfig,
    attention: PagedAttention,
) -> tuple[PagedKVCache, tuple[Array, Array]]:
    """Chunks of prompts, after the tokens that their tables hold: write, attend, no sampling.

    Returns the cache (donated) and hidden states of each chunk's last token, `[L, E]`, and of all
    tokens, `[N, E]`.
    """
    model = bind(config, params)
    hidden, layers = model(tokens, positions, attention.prefill, cache.layers, index)
    return PagedKVCache.of_layers(layers), (hidden[last], hidden)


@partial(jax.jit, static_argnames=("config", "processors"))
@default_numerics()
def head_step(
    params: Params,
    hidden: Array,  # [L, E], from prefill_step
    rows: Array,  # i32[B], rows of hidden that complete their prompt
    positions: Array,  # i32[B], positions of the prompts' last tokens
    sampling: SamplingBatch,
    history: Array,  # i32[any, H]; the prompts' tokens
    *,
    config: ModelConfig,
    processors: tuple[LogitsProcessor, ...] = (),
) -> Sampled:
    """Sample the first token of prompts that a prefill step has completed."""
    return sample(
        bind(config, params).logits(hidden[rows]),
        positions,
        sampling,
        history,
        num_logprobs=NUM_LOGPROBS,
        processors=processors,
    )


@partial(jax.jit, donate_argnames=("history",))
def remember_step(
    history: Array,  # i32[any, H]
    tokens: Array,  # i32[H], of one sequence
    slots: Array,  # i32[N], filled up with NO_SLOT
) -> Array:
    """Write a sequence's tokens to slots of the history, which is donated."""
    return history.at[slots].set(tokens, mode="drop")


@partial(jax.jit, static_argnames=("config",))
@default_numerics()
def score_step(
    params: Params,
    hidden: Array,  # [N, E], from prefill_step
    tokens: Array,  # i32[N], the token that follows each
    *,
    config: ModelConfig,
) -> tuple[Array, Array, Array]:
    """Log-probabilities `f32[N]` of a prompt's tokens; likeliest tokens `i32[N, K]`, theirs."""
    num = min(NUM_LOGPROBS, config.vocab_size)
    return log_probabilities(bind(config, params).logits(hidden), tokens, num)


@partial(jax.jit, donate_argnames=("cache",))
def copy_step(
    cache: PagedKVCache,
    sources: Array,  # i32[N], blocks
    targets: Array,  # i32[N], distinct, but for the null block where N was filled up
) -> PagedKVCache:
    """Copy-on-write (Kwon et al., section 4.4), all blocks at once; the cache is donated."""
    return copy_blocks(cache, sources, targets)


@jax.jit
def hold_step(
    held: Array,  # i32[N]
    tokens: Array,  # i32[B], sampled by a step
    start: Array,  # i32[]
) -> Array:
    """`held` with `tokens` from `start` on, for `take_step`; the host does not see the tokens."""
    return lax.dynamic_update_slice(held, tokens, (start,))


@jax.jit
def take_step(
    held: Array,  # i32[N], from hold_step
    places: Array,  # i32[B]
) -> Array:
    """The tokens `i32[B]` at these places: the input of a decode step whose rows have moved."""
    return held[places]
