"""What changes logits before a token is drawn, in vLLM's order: masks, biases, logits processors,
then penalties. No row's logits depend on another row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

ArrayLike = Array | np.ndarray

# (logits f32[V], token_ids i32[H], num_tokens i32[], num_prompt_tokens i32[]) -> logits f32[V], of
# one sequence: `token_ids[:num_tokens]` are its tokens, the prompt's first. The rest is V, which
# indexed updates (`.at[]`) leave out.
LogitsProcessor = Callable[[Array, Array, Array, Array], Array]

MAX_BIASES = 512  # of a row
NO_SLOT = int(np.iinfo(np.int32).max)  # beyond any history


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBiases:
    """What is added to single logits of each row, while the row's output is short enough."""

    tokens: ArrayLike  # i32[B, MAX_BIASES]
    values: ArrayLike  # f32[B, MAX_BIASES]
    until: ArrayLike  # i32[B, MAX_BIASES], applies while so many outputs are not there; 0: never


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitRules:
    """What changes the logits of B rows, and which parts of the work any of them needs."""

    repetition_penalty: ArrayLike  # f32[B], 1: off
    presence_penalty: ArrayLike  # f32[B], 0: off
    frequency_penalty: ArrayLike  # f32[B], 0: off
    slots: ArrayLike  # i32[B], the row's tokens are `history[slot]`; NO_SLOT: they are not needed
    biases: TokenBiases  # read if `is_biased`
    allowed: ArrayLike  # u32[B, ceil(V / 32)], bit masks as in TokenConstraint; read if `is_masked`
    processors: ArrayLike  # bool[B, P], which logits processors the row wants
    is_changed: ArrayLike  # bool[], some row has a rule of any kind
    is_masked: ArrayLike  # bool[], some row has a mask
    is_biased: ArrayLike  # bool[], some row has biases
    is_penalised: ArrayLike  # bool[], some row has penalties


def change_logits(
    logits: Array,
    positions: Array,
    num_prompt_tokens: Array,
    rules: LogitRules,
    history: Array,
    processors: Sequence[LogitsProcessor],
) -> Array:
    """`logits` `f32[B, V]` of the tokens at `positions` `i32[B]`, by the rules of each row.

    num_prompt_tokens: `i32[B]`. history: `i32[any, H]`, tokens by slot and position.
    """
    index = positions + 1 - num_prompt_tokens  # of the output token to come

    def tokens() -> Array:
        """`i32[B, H]`; V where there is no token."""
        V = logits.shape[1]
        rows = history.at[rules.slots].get(mode="fill", fill_value=V)
        is_token = jnp.arange(rows.shape[1])[None] <= positions[:, None]
        return jnp.where(is_token, rows, V)

    def process(wanted: Array, processor: LogitsProcessor, logits: Array) -> Array:
        def processed() -> Array:
            rows = jax.vmap(processor)(logits, tokens(), positions + 1, num_prompt_tokens)
            return jnp.where(wanted[:, None], rows, logits)

        return lax.cond(jnp.any(wanted), processed, lambda: logits)

    changed = lax.cond(rules.is_masked, lambda: _mask(logits, rules), lambda: logits)
    changed = lax.cond(
        rules.is_biased, lambda x: _bias(x, index, rules.biases), lambda x: x, changed
    )
    for wanted, processor in zip(jnp.asarray(rules.processors).T, processors, strict=True):
        changed = process(wanted, processor, changed)
    return lax.cond(
        rules.is_penalised,
        lambda x: _penalise(x, tokens(), num_prompt_tokens, rules),
        lambda x: x,
        changed,
    )


def _mask(logits: Array, rules: LogitRules) -> Array:
    V = logits.shape[1]
    words = jnp.repeat(jnp.asarray(rules.allowed), 32, axis=1, total_repeat_length=V)
    bits = words >> (jnp.arange(V, dtype=jnp.uint32) % 32)[None]
    return jnp.where(bits & 1 != 0, logits, -jnp.inf)


def _bias(logits: Array, index: Array, biases: TokenBiases) -> Array:
    applies = index[:, None] < jnp.asarray(biases.until)
    tokens = jnp.where(applies, biases.tokens, logits.shape[1])
    rows = jnp.arange(len(logits))[:, None]
    return logits.at[rows, tokens].add(biases.values, mode="drop")


def _penalise(logits: Array, tokens: Array, num_prompt_tokens: Array, rules: LogitRules) -> Array:
    B, V = logits.shape
    is_output = jnp.arange(tokens.shape[1])[None] >= num_prompt_tokens[:, None]

    def counts(tokens: Array) -> Array:  # f32[B, V]
        rows = jnp.arange(B)[:, None]
        return jnp.zeros((B, V), jnp.float32).at[rows, tokens].add(1.0, mode="drop")

    def column(x: ArrayLike) -> Array:
        return jnp.asarray(x)[:, None]

    outputs = counts(jnp.where(is_output, tokens, V))
    penalty = jnp.where(counts(tokens) > 0, column(rules.repetition_penalty), 1.0)
    logits = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits -= column(rules.frequency_penalty) * outputs
    return logits - column(rules.presence_penalty) * (outputs > 0)
