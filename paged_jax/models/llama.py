"""A Llama-family decoder that knows nothing of caches.

The model maps token ids to hidden states and leaves attention to its caller: every layer hands its
query, key and value heads and a state of its own to `attend`, which may write a paged cache and
read it back (serving), or attend within the sequence (training). So one set of modules serves every
experiment.

Letters: `...` any leading axes (tokens), E hidden size, F intermediate size, V vocabulary,
Hq/Hk query/KV heads, D head size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from paged_jax.models.config import ModelConfig
from paged_jax.models.rope import inv_freq

# (state, shared, q [..., Hq, D], k [..., Hk, D], v [..., Hk, D]) -> (out [..., Hq, D], state).
# `state` is the layer's own pytree, `shared` one that all layers see.
Attend = Callable[[Any, Any, Array, Array, Array], tuple[Array, Any]]


class Linear(nnx.Module):
    """`x @ kernel (+ bias)` with the kernel stored `[in, out]`."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool, dtype: Any, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (n_in, n_out), dtype))
        self.bias = nnx.Param(jnp.zeros((n_out,), dtype)) if bias else None

    def __call__(self, x: Array) -> Array:
        y = x @ self.kernel[...]
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm; statistics in float32 as in HF's LlamaRMSNorm."""

    def __init__(self, size: int, *, eps: float, dtype: Any):
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return self.scale[...] * x32.astype(x.dtype)


class Embedding(nnx.Module):
    """Token embedding `[V, E]`, also the output head where the two are tied."""

    def __init__(self, vocab: int, size: int, *, dtype: Any, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (vocab, size), dtype))

    def __call__(self, tokens: Array) -> Array:
        return self.embedding[...][tokens]


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding, half-split; x `[..., H, D]`, cos and sin `f32[..., 1, D/2]`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nnx.Module):
    """Fused QKV projection, rotary embedding, the caller's attention, output projection."""

    def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        n_q, n_kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv = Linear(
            config.hidden_size, n_q + 2 * n_kv, bias=config.attention_bias, dtype=dtype, rngs=rngs
        )
        self.out = Linear(
            n_q, config.hidden_size, bias=config.attention_out_bias, dtype=dtype, rngs=rngs
        )

    def __call__(
        self, x: Array, cos: Array, sin: Array, state: Any, shared: Any, attend: Attend
    ) -> tuple[Array, Any]:
        heads = self.qkv(x).reshape(*x.shape[:-1], -1, self.head_dim)  # [..., Hq + 2 Hk, D]
        n_rotated = self.num_heads + self.num_kv_heads
        q, k = jnp.split(rotate(heads[..., :n_rotated, :], cos, sin), [self.num_heads], axis=-2)
        out, state = attend(state, shared, q, k, heads[..., n_rotated:, :])  # [..., Hq, D]
        return self.out(out.reshape(*x.shape[:-1], -1)), state


class MLP(nnx.Module):
    """SwiGLU with gate and up projections fused."""

    def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs):
        E, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(E, 2 * F, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(F, E, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs):
        norm = {"eps": config.rms_norm_eps, "dtype": dtype}
        self.attention_norm = RMSNorm(config.hidden_size, **norm)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, **norm)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Array, cos: Array, sin: Array, state: Any, shared: Any, attend: Attend
    ) -> tuple[Array, Any]:
        out, state = self.attention(self.attention_norm(x), cos, sin, state, shared, attend)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), state


@partial(jax.jit, static_argnums=(0, 2), inline=False)
def _run_block(
    graphdef: Any, params: Any, attend: Attend, x: Array, cos: Array, sin: Array, *states: Any
) -> tuple[Array, Any]:
    """A layer as a function of its parameters: all layers are alike, so it is traced once."""
    return nnx.merge(graphdef, params)(x, cos, sin, *states, attend)


class Llama(nnx.Module):
    """The decoder: `hidden, states = model(tokens, positions, attend, states, shared)`."""

    def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        V, E = config.vocab_size, config.hidden_size
        self.embed = Embedding(V, E, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.final_norm = RMSNorm(E, eps=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(E, V, bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self, tokens: Array, positions: Array, attend: Attend, states: Sequence[Any], shared: Any
    ) -> tuple[Array, list[Any]]:
        """Hidden states after the last norm `[..., E]` of tokens and positions `i32[...]`.

        `states` holds one pytree for each layer; it comes back as `attend` left it.
        """
        frequencies, scale = inv_freq(self.config)
        angles = positions[..., None, None].astype(jnp.float32) * frequencies  # [..., 1, D/2]
        cos, sin = jnp.cos(angles) * scale, jnp.sin(angles) * scale
        x = self.embed(tokens)
        new_states = []
        for layer, state in zip(self.layers, states, strict=True):
            graphdef, params = nnx.split(layer)
            x, state = _run_block(graphdef, params, attend, x, cos, sin, state, shared)
            new_states.append(state)
        return self.final_norm(x), new_states

    def logits(self, hidden: Array) -> Array:
        """Float32 next-token logits `[..., V]` of hidden states `[..., E]`."""
        if self.lm_head is None:
            table = self.embed.embedding[...]
            return jnp.einsum("...e,ve->...v", hidden, table, preferred_element_type=jnp.float32)
        kernel = self.lm_head.kernel[...]
        return jnp.einsum("...e,ev->...v", hidden, kernel, preferred_element_type=jnp.float32)
