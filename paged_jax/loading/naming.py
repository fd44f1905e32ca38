"""How files name the parts of the canonical parameters, and what shapes those parts have.

Files keep one [out, in] matrix per projection; the model keeps [in, out] kernels with query, key
and value fused, gate and up fused (`paged_jax.models.params`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paged_jax.models.config import ModelConfig
from paged_jax.models.params import expected_shapes


@dataclass(frozen=True)
class Naming:
    """One file format's names, without their `.weight` and `.bias`."""

    layer: str  # prefix of layer {i}
    modules: Mapping[str, tuple[str, ...]]  # canonical module -> the file's, in fused order


@dataclass(frozen=True)
class Part:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]  # as the file keeps it: [out, in] for a matrix


HUGGING_FACE = Naming(
    layer="model.layers.{i}.",
    modules={
        "embed": ("model.embed_tokens",),
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
        "final_norm": ("model.norm",),
        "lm_head": ("lm_head",),
    },
)

GGUF = Naming(
    layer="blk.{i}.",
    modules={
        "embed": ("token_embd",),
        "attention_norm": ("attn_norm",),
        "attention.qkv": ("attn_q", "attn_k", "attn_v"),
        "attention.out": ("attn_output",),
        "mlp_norm": ("ffn_norm",),
        "mlp.gate_up": ("ffn_gate", "ffn_up"),
        "mlp.down": ("ffn_down",),
        "final_norm": ("output_norm",),
        "lm_head": ("output",),
    },
)


def file_parts(config: ModelConfig, naming: Naming) -> dict[str, list[Part]]:
    """Canonical parameter -> the file's tensors that make it up, in fused order."""
    return {
        name: _parts(name, shape, config, naming) for name, shape in expected_shapes(config).items()
    }


def _parts(
    canonical: str, shape: tuple[int, ...], config: ModelConfig, naming: Naming
) -> list[Part]:
    module, kind = canonical.rsplit(".", 1)
    prefix = ""
    if module.startswith("layers."):
        _, index, module = module.split(".", 2)
        prefix = naming.layer.format(i=index)
    suffix = ".bias" if kind == "bias" else ".weight"
    widths = {
        "attention.qkv": [
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        ],
        "mlp.gate_up": [config.intermediate_size] * 2,
    }.get(module, [shape[-1]])
    names = [prefix + name + suffix for name in naming.modules[module]]
    if kind == "kernel":
        shapes: list[tuple[int, ...]] = [(width, shape[0]) for width in widths]
    elif kind == "embedding":
        shapes = [shape]
    else:
        shapes = [(width,) for width in widths]
    return [Part(name, part_shape) for name, part_shape in zip(names, shapes, strict=True)]
