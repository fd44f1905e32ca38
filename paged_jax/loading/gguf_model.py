"""A Llama-family model in a GGUF file: its config from the metadata, its tensors by name.

llama.cpp rotates neighbouring pairs of a head where Hugging Face rotates its two halves. Files of
the "llama" architecture (Mistral's included) therefore hold query and key rows permuted, which is
undone here; "qwen2" files are stored as they were.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_jax.loading.gguf_file import GgufFile
from paged_jax.loading.weights import FloatArray, Naming
from paged_jax.models.config import ModelConfig, RopeKind, RopeScaling

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

_ARCHITECTURES = ("llama", "qwen2")
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's scaling, one divisor per frequency


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The config of the model in a file.

    Raises ValueError for another architecture, mixtures of experts, and metadata that is missing
    or does not fit.
    """
    metadata = file.metadata
    arch = metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ValueError(
            f"{file.path}: model architecture {arch!r} is not supported; supported: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    sizes = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_layers": "block_count",
        "num_heads": "attention.head_count",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }
    missing = [f"{arch}.{key}" for key in sizes.values() if f"{arch}.{key}" not in metadata]
    if "token_embd.weight" not in file.tensors:
        missing.append("tensor token_embd.weight")
    if missing:
        raise ValueError(f"{file.path}: missing {', '.join(missing)}")
    if metadata.get(f"{arch}.expert_count"):
        raise ValueError(f"{file.path}: mixtures of experts are not supported")
    values = {field: metadata[f"{arch}.{key}"] for field, key in sizes.items()}
    num_heads = values["num_heads"]
    try:
        head_dim = metadata.get(f"{arch}.attention.key_length", values["hidden_size"] // num_heads)
        for key in ("rope.dimension_count", "attention.value_length"):
            size = metadata.get(f"{arch}.{key}", head_dim)
            if size != head_dim:
                raise ValueError(f"{arch}.{key}={size} is not the head size {head_dim}")
        return ModelConfig(
            **values,
            vocab_size=file.tensors["token_embd.weight"].shape[0],
            num_kv_heads=metadata.get(f"{arch}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rope_theta=metadata.get(f"{arch}.rope.freq_base", 10000.0),
            rope_scaling=_rope_scaling(file, arch),
            tie_word_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            attention_out_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            sliding_window=metadata.get(f"{arch}.attention.sliding_window"),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_end_tokens(metadata),
            name=metadata.get("general.name", file.path.stem),
        )
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{file.path}: {error}") from error


class GgufTensors:
    """The file's tensors, query and key rows in Hugging Face's order (a `TensorSource`)."""

    naming = GGUF

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.where = str(file.path)
        self._file = file
        self._permuted_heads: dict[str, int] = {}
        if file.metadata["general.architecture"] == "llama":
            self._permuted_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tensor.shape for name, tensor in file.tensors.items() if name != _ROPE_FACTORS
        }

    def read(self, name: str) -> FloatArray:
        """The tensor in float32."""
        tensor = self._file.read(name)
        num_heads = self._permuted_heads.get(name.split(".")[-2])
        return tensor if num_heads is None else halves_from_pairs(tensor, num_heads)


def halves_from_pairs(tensor: FloatArray, num_heads: int) -> FloatArray:
    """Rows of each head from (x0, y0, x1, y1, ...) to (x0, x1, ..., y0, y1, ...).

    tensor: [num_heads * head_dim, ...], rows along the first axis.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(tensor.shape)


def _end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text, a turn or a message, each once."""
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))


def _rope_scaling(file: GgufFile, arch: str) -> RopeScaling | None:
    metadata = file.metadata
    if _ROPE_FACTORS in file.tensors:
        factors = file.read(_ROPE_FACTORS)
        return RopeScaling(kind="factors", factors=tuple(float(f) for f in factors))
    kind: RopeKind | None = metadata.get(f"{arch}.rope.scaling.type")
    if kind is None or str(kind) == "none":
        return None
    prefix = f"{arch}.rope.scaling"
    return RopeScaling(
        kind=kind,
        factor=metadata.get(f"{prefix}.factor", 1.0),
        original_max_position_embeddings=metadata.get(f"{prefix}.original_context_length"),
    )
