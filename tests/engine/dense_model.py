"""A plain forward pass, without a cache, a scheduler or a batch, to compare the engine with."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.loading import LoadedModel
from paged_jax.models.params import bind, nest
from paged_jax.steps.attention import causal_attention

LENGTH = 384  # what all sequences are filled up to, so that one program does


def dense_logits(model: LoadedModel) -> Callable[[list[int]], np.ndarray]:
    """A function from T tokens to the logits after each of them, ``f32[T, V]``."""
    config = model.config
    params = nest({name: jnp.asarray(x) for name, x in model.weights.items()})

    @jax.jit
    def forward(params, tokens):  # i32[1, LENGTH] -> f32[1, LENGTH, V]
        positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        bound = bind(config, params)
        none = [None] * config.num_layers
        hidden, _ = bound(tokens, positions, causal_attention, none, config.head_dim**-0.5)
        return bound.logits(hidden)

    def logits(tokens: list[int]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(forward(params, padded))[0, : len(tokens)]

    return logits
