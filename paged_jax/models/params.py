"""A model as a pure function and a parameter pytree.

The modules are split once. Jitted steps call the methods of `bind(config, params)`: the modules
over a plain nested dict of arrays.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.models.config import ModelConfig
from paged_jax.models.llama import Llama

# Nested by the names of the modules' attributes; layers by number.
Params = dict[str | int, Any]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical parameter name -> shape, in model order."""
    E, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    attention_width = config.num_heads * config.head_dim
    qkv_width = attention_width + 2 * config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed.embedding": (V, E)}
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        shapes[f"{layer}.attention_norm.scale"] = (E,)
        shapes[f"{layer}.attention.qkv.kernel"] = (E, qkv_width)
        if config.attention_bias:
            shapes[f"{layer}.attention.qkv.bias"] = (qkv_width,)
        shapes[f"{layer}.attention.out.kernel"] = (attention_width, E)
        if config.attention_out_bias:
            shapes[f"{layer}.attention.out.bias"] = (E,)
        shapes[f"{layer}.mlp_norm.scale"] = (E,)
        shapes[f"{layer}.mlp.gate_up.kernel"] = (E, 2 * F)
        shapes[f"{layer}.mlp.down.kernel"] = (F, E)
        if config.mlp_bias:
            shapes[f"{layer}.mlp.gate_up.bias"] = (2 * F,)
            shapes[f"{layer}.mlp.down.bias"] = (E,)
    shapes["final_norm.scale"] = (E,)
    if not config.tie_word_embeddings:
        shapes["lm_head.kernel"] = (E, V)
    return shapes


def num_parameters(config: ModelConfig) -> int:
    """Weights the model holds; a tied head counts once."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


@cache
def _abstract_model(config: ModelConfig) -> tuple[Any, Any]:
    """(graph definition, state of shapes) of a model that is never allocated."""
    return nnx.split(
        nnx.eval_shape(lambda: Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(params=0)))
    )


def bind(config: ModelConfig, params: Params) -> Llama:
    """The modules over these parameters. Cheap while tracing, not meant for use outside of it."""
    graphdef, state = _abstract_model(config)
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy: it is filled in place
    nnx.replace_by_pure_dict(state, params)
    model: Llama = nnx.merge(graphdef, state)
    return model


def init_params(config: ModelConfig, seed: int, dtype: Any = jnp.float32) -> Params:
    """Randomly initialised parameters, for training and tests."""
    model = Llama(config, dtype=dtype, rngs=nnx.Rngs(params=seed))
    params: Params = nnx.to_pure_dict(nnx.state(model))
    return params


def nest(weights: Mapping[str, Any]) -> Params:
    """`{"layers.0.mlp.down.kernel": x}` -> `{"layers": {0: {"mlp": ...}}}`."""
    params: Params = {}
    for name, value in weights.items():
        *path, last = (int(part) if part.isdigit() else part for part in name.split("."))
        node = params
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return params


def flatten(params: Params) -> dict[str, np.ndarray]:
    """The inverse of `nest`, as numpy arrays."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {".".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in leaves}
