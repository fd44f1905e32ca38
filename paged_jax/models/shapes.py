"""The parameters of a Llama-family decoder: canonical names and shapes.

Loading checks weights against this list, and the flax model declares its parameters by it.
Kernels are stored [in, out]; query, key and value are fused along out in that order, and so are
gate and up.
"""

import math

from paged_jax.models.config import ModelConfig


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
