"""A Llama-family model in a GGUF file: its config from the metadata, its tensors by name.

llama.cpp rotates neighbouring pairs of a head where Hugging Face rotates its two halves. Files of
the "llama" architecture (Mistral's included) therefore hold query and key rows permuted, which is
undone here; "qwen2" files are stored as they were.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_jax.loading.gguf_file import GgufFile
from paged_jax.loading.gguf_metadata import GgufMetadata
from paged_jax.loading.gguf_tokenizer import end_tokens, special_token_id
from paged_jax.loading.weights import FloatArray, Naming
from paged_jax.models.config import ModelConfig, RopeScaling

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
# One divisor per frequency: Llama 3.1's scaling, and LongRoPE's two.
_ROPE_FACTORS = "rope_freqs.weight"
_LONGROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
_QUANTIZATION_VERSION = 2  # what the `gguf` package decodes


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The config of the model in a file.

    Raises ValueError for another architecture, mixtures of experts, and metadata that is missing,
    does not fit, or changes what the model computes in a way that is not supported.
    """
    metadata = GgufMetadata(file.metadata)
    try:
        _check_file(metadata)
        arch = metadata.get("general.architecture")
        if arch not in _ARCHITECTURES:
            raise ValueError(
                f"model architecture {arch!r} is not supported; supported: "
                f"{', '.join(_ARCHITECTURES)}"
            )
        config = _config(file, metadata, arch)
        metadata.refuse_unread(arch)
        return config
    except (ValueError, TypeError, ArithmeticError) as error:  # a size that is none
        raise ValueError(f"{file.path}: {error}") from error


def _config(file: GgufFile, metadata: GgufMetadata, arch: str) -> ModelConfig:
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
        raise ValueError(f"missing {', '.join(missing)}")
    if metadata.get(f"{arch}.expert_count"):
        raise ValueError("mixtures of experts are not supported")
    if not metadata.get(f"{arch}.attention.causal", True):
        raise ValueError(f"{arch}.attention.causal=False is not supported")
    values = {field: _size(metadata, f"{arch}.{key}") for field, key in sizes.items()}
    num_heads = values["num_heads"]
    head_dim = metadata.get(f"{arch}.attention.key_length", values["hidden_size"] // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        size = metadata.get(f"{arch}.{key}", head_dim)
        if size != head_dim:
            raise ValueError(f"{arch}.{key}={size} is not the head size {head_dim}")
    scaling = _rope_scaling(file, metadata, arch)
    if scaling is not None:
        length = scaling.usable_length(values["max_position_embeddings"])
        values["max_position_embeddings"] = length
    return ModelConfig(
        **values,
        num_kv_heads=_size(metadata, f"{arch}.attention.head_count_kv", num_heads),
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        head_dim=head_dim,
        rope_theta=metadata.get(f"{arch}.rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        sliding_window=metadata.get(f"{arch}.attention.sliding_window") or None,
        bos_token_id=special_token_id(metadata, "bos"),
        eos_token_ids=end_tokens(metadata),
        name=metadata.get("general.name", file.path.stem),
    )


class GgufTensors:
    """The file's tensors, query and key rows in Hugging Face's order (a `TensorSource`)."""

    naming = GGUF

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.where = str(file.path)
        self._file = file
        self._permuted_heads: dict[str, int] = {}
        if file.metadata["general.architecture"] == "llama":
            self._permuted_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        kind = config.rope_scaling.kind if config.rope_scaling else ""
        of_rope = {"factors": (_ROPE_FACTORS,), "longrope": _LONGROPE_FACTORS}.get(kind, ())
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tensor.shape for name, tensor in file.tensors.items() if name not in of_rope
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


def _check_file(metadata: GgufMetadata) -> None:
    """ValueError for a file that is not a whole model, or of another quantisation version."""
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"general.type is {kind!r}: the file holds no model")
    num_parts = metadata.get("split.count", 1)
    if not isinstance(num_parts, int) or num_parts > 1:
        raise ValueError(
            f"the file is one of {num_parts!r:.80} parts of a model (split.count); join them: "
            "llama-gguf-split --merge FIRST_PART WHOLE"
        )
    version = metadata.get("general.quantization_version", _QUANTIZATION_VERSION)
    if version != _QUANTIZATION_VERSION:
        raise ValueError(
            f"general.quantization_version {version} is not supported, only {_QUANTIZATION_VERSION}"
        )


def _size(metadata: GgufMetadata, key: str, default: Any = None) -> Any:
    """A size, of which a file may have one for each layer. ValueError if they differ."""
    value = metadata.get(key, default)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ValueError(f"{key}={value}: sizes that differ by layer are not supported")
    return value[0]


def _rope_scaling(file: GgufFile, metadata: GgufMetadata, arch: str) -> RopeScaling | None:
    """As llama.cpp reads it. ValueError for a combination that is not computed here.

    The betas of YaRN hold too, which llama.cpp reads for other architectures alone.
    """
    prefix = f"{arch}.rope.scaling"
    kind = metadata.get(f"{prefix}.type", "linear")
    old_factor = metadata.get(f"{arch}.rope.scale_linear")  # the key before `scaling` had a type
    factor = metadata.get(f"{prefix}.factor", old_factor) or 1.0
    original = metadata.get(f"{prefix}.original_context_length")
    is_plain = kind == "none" or (kind == "linear" and factor == 1)
    if _ROPE_FACTORS in file.tensors:
        if not is_plain:
            raise ValueError(f"{_ROPE_FACTORS} beside RoPE scaling {kind!r} is not supported")
        return RopeScaling(kind="factors", factors=_frequency_factors(file, _ROPE_FACTORS))
    if is_plain:
        return None
    context_length = metadata[f"{arch}.context_length"]
    match kind:
        case "yarn":
            extrapolation = metadata.get(f"{prefix}.yarn_ext_factor", 1.0)
            if extrapolation not in (1, -1):  # -1 stands for the default
                raise ValueError(f"{prefix}.yarn_ext_factor={extrapolation} is not supported")
            return RopeScaling(
                kind,
                factor,
                original or context_length,
                beta_fast=metadata.get(f"{prefix}.yarn_beta_fast", 32.0),
                beta_slow=metadata.get(f"{prefix}.yarn_beta_slow", 1.0),
            )
        case "longrope":
            missing = [name for name in _LONGROPE_FACTORS if name not in file.tensors]
            if missing or factor != 1:
                raise ValueError(
                    f"RoPE scaling 'longrope' needs the tensors {', '.join(_LONGROPE_FACTORS)} and "
                    f"no factor; missing: {', '.join(missing) or 'none'}, factor: {factor}"
                )
            short, long = (_frequency_factors(file, name) for name in _LONGROPE_FACTORS)
            return RopeScaling(
                kind,
                original_max_position_embeddings=original or context_length,
                attention_factor=metadata.get(f"{prefix}.attn_factor", 1.0),
                factors=short,
                long_factors=long,
            )
        case _:
            return RopeScaling(kind, factor, original)


def _frequency_factors(file: GgufFile, name: str) -> tuple[float, ...]:
    return tuple(float(factor) for factor in file.read(name))
