"""On-device sampling: from logits to the next token of each row.

A sample depends on its row's seed and the token's index alone, never on the batch, the row or a
preemption. All modes live in one program: branches are chosen on the device, so that no mix of
requests compiles anything new, and a greedy batch pays for an arg-max only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from paged_jax.steps.logits import ArrayLike, LogitRules, LogitsProcessor, change_logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of B rows, and which parts of the work any of them needs."""

    temperature: ArrayLike  # f32[B], 0: greedy
    top_k: ArrayLike  # i32[B], 0: off
    top_p: ArrayLike  # f32[B], 1: off
    min_p: ArrayLike  # f32[B], 0: off
    seed: ArrayLike  # u32[B]
    num_prompt_tokens: ArrayLike  # i32[B]
    rules: LogitRules  # what changes the logits first
    draws: ArrayLike  # bool[], some row samples at random
    filters: ArrayLike  # bool[], some row has top_k, top_p or min_p
    wants_logprobs: ArrayLike  # bool[]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """Next tokens; log-probabilities are those of the raw logits, 0 where no row wants any."""

    tokens: Array  # i32[B]
    logprobs: Array  # f32[B], of the sampled tokens
    top_tokens: Array  # i32[B, K], most likely first
    top_logprobs: Array  # f32[B, K]
    is_valid: Array  # bool[B], whether the token means anything
    is_finite: Array  # bool[B], whether the raw logits are: none NaN or inf, not all -inf


def sample(
    logits: Array,
    positions: ArrayLike,
    batch: SamplingBatch,
    history: ArrayLike,
    *,
    num_logprobs: int,
    processors: Sequence[LogitsProcessor] = (),
) -> Sampled:
    """Sample from `logits` `f32[B, V]` of the tokens at `positions` `i32[B]`.

    history: `i32[any, H]`, tokens by slot and position, the tokens at `positions` included.

    Parameters act in vLLM's order: rules (`paged_jax.steps.logits`), temperature, min_p, top_k,
    top_p. Tokens that tie with the last token that top_k or top_p keeps are kept too.

    A row's largest logit tells whether all are finite, as NaN counts as the largest. The arg-max
    has found it already, so the check costs B reads. Rules may leave out a token that is NaN: where
    some row has rules, the check takes a pass over the vocabulary. Rules may also leave no token.
    """
    positions = jnp.asarray(positions)
    index = positions + 1 - jnp.asarray(batch.num_prompt_tokens)  # of the sampled token
    rules, is_changed = batch.rules, batch.rules.is_changed
    adjusted = lax.cond(
        is_changed,
        lambda: change_logits(
            logits,
            positions,
            jnp.asarray(batch.num_prompt_tokens),
            rules,
            jnp.asarray(history),
            processors,
        ),
        lambda: logits,
    )
    greedy = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    largest = lax.cond(
        is_changed, lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32), lambda: greedy
    )
    is_finite = _is_finite_at(logits, largest)
    tokens = lax.cond(
        batch.draws,
        lambda: jnp.where(batch.temperature == 0, greedy, _draw(adjusted, index, batch)),
        lambda: greedy,
    )
    B, V = logits.shape
    num_logprobs = min(num_logprobs, V)
    logprobs, top_tokens, top_logprobs = lax.cond(
        batch.wants_logprobs,
        lambda: log_probabilities(logits, tokens, num_logprobs),
        lambda: (
            jnp.zeros((B,), jnp.float32),
            jnp.zeros((B, num_logprobs), jnp.int32),
            jnp.zeros((B, num_logprobs), jnp.float32),
        ),
    )
    is_valid = is_finite & _is_finite_at(adjusted, greedy)
    return Sampled(tokens, logprobs, top_tokens, top_logprobs, is_valid, is_finite)


def _is_finite_at(logits: Array, tokens: Array) -> Array:
    return jnp.isfinite(jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0])


def _draw(logits: Array, index: Array, batch: SamplingBatch) -> Array:
    """A random token of each row, by adding Gumbel noise to the logits and taking the largest."""
    temperature = jnp.asarray(batch.temperature)[:, None]
    # The largest logit is 0 then, so that no temperature above 0 makes two of them infinite.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = logits / jnp.where(temperature > 0, temperature, 1)
    scaled = lax.cond(batch.filters, lambda: _filter(scaled, batch), lambda: scaled)

    def noise(seed: Array, index: Array) -> Array:  # the same under all of JAX's settings
        key = jax.random.wrap_key_data(jnp.stack([jnp.uint32(0), seed]), impl="threefry2x32")
        with jax.threefry_partitionable(True):
            return jax.random.gumbel(
                jax.random.fold_in(key, index), logits.shape[1:], jnp.float32, "low"
            )

    noisy = scaled + jax.vmap(noise)(jnp.asarray(batch.seed), index)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def _filter(logits: Array, batch: SamplingBatch) -> Array:
    """Minus infinity for tokens that min_p, top_k and top_p leave out; the largest logit is 0."""
    min_p, top_k, top_p = (jnp.asarray(x)[:, None] for x in (batch.min_p, batch.top_k, batch.top_p))
    keep = logits >= jnp.log(min_p)
    order = _order(logits)

    def cut(keep: Array, weights: Array, target: Array, active: Array) -> Array:
        threshold = _threshold(order, jnp.where(keep, weights, 0), target)
        return keep & (~active | (order >= threshold))

    V = logits.shape[1]
    k = jnp.minimum(top_k, jnp.sum(keep, axis=-1, keepdims=True)).astype(jnp.float32)
    keep = cut(keep, jnp.ones_like(logits), k, (top_k > 0) & (top_k < V))
    weights = jnp.exp(logits)
    mass = jnp.sum(jnp.where(keep, weights, 0), axis=-1, keepdims=True)
    # At least the best token's weight, 1, is needed to reach it: one is always kept.
    target = jnp.maximum(top_p * mass, jnp.finfo(jnp.float32).tiny)
    keep = cut(keep, weights, target, top_p < 1)
    return jnp.where(keep, logits, -jnp.inf)


def _order(x: Array) -> Array:
    """Unsigned integers `u32` in the order of the floats `f32`."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _threshold(order: Array, weights: Array, target: Array) -> Array:
    """The largest t such that weights of `order >= t` reach `target`; bit by bit, exactly.

    order `u32[B, V]`, weights `f32[B, V]`, target `f32[B, 1]` -> `u32[B, 1]`. Needs no
    sort: sorting a vocabulary costs far more than 32 sums over it.
    """

    def refine(i: int, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1 << 31) >> jnp.uint32(i))
        reached = jnp.sum(jnp.where(order >= candidate, weights, 0), axis=-1, keepdims=True)
        return jnp.where(reached >= target, candidate, threshold)

    return lax.fori_loop(0, 32, refine, jnp.zeros_like(target, jnp.uint32))


def log_probabilities(logits: Array, tokens: ArrayLike, num: int) -> tuple[Array, Array, Array]:
    """(log-probabilities of `tokens`, the `num` most likely tokens, their log-probabilities)."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top_tokens = lax.top_k(logprobs, num)
    sampled = jnp.take_along_axis(logprobs, jnp.asarray(tokens)[:, None], axis=-1)[:, 0]
    return sampled, top_tokens.astype(jnp.int32), top_logprobs
