"""A Hugging Face model directory: config.json and safetensors, in one file or in shards."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paged_jax.loading.weights import FloatArray, Naming, file_parts, weight_dtype
from paged_jax.models.config import ModelConfig, token_ids

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

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = ("F64", "F32", "F16", "BF16")
# Files that name a quantisation where config.json does not -> the method that writes them.
_QUANTISATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


def read_hf_config(directory: Path) -> ModelConfig:
    """The config of the model in a directory.

    A generation_config.json has the last word on the end tokens, as in transformers; the
    tokenizer's eos token is one of them, as in vLLM. Raises ValueError if there is no config.json
    or it cannot be used, and for quantised weights.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json: not a Hugging Face model directory")
    hf = _read_json(path)
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos = _read_json(generation).get("eos_token_id")
        if eos is not None:
            hf["eos_token_id"] = list(token_ids(eos))
    _refuse_quantised(directory, hf)
    try:
        config = ModelConfig.from_hf(hf, name=directory.resolve().name)
        eos = _eos_of_tokenizer(directory)
        if eos is None or eos in config.eos_token_ids or eos >= config.vocab_size:
            return config
        return dataclasses.replace(config, eos_token_ids=(*config.eos_token_ids, eos))
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from error


def _refuse_quantised(directory: Path, hf: Mapping[str, Any]) -> None:
    files = _QUANTISATION_FILES.items()
    found = {method: name for name, method in files if (directory / name).is_file()}
    if settings := hf.get("quantization_config") or hf.get("compression_config"):
        named = settings if isinstance(settings, dict) else {}
        found = {named.get("quant_method", "an unnamed method"): "config.json"}
    for method, source in found.items():
        raise ValueError(
            f"{directory}: the weights are quantised ({method}, says {source}), which is not "
            "supported; use the model's float weights, or a GGUF file of it"
        )


def _eos_of_tokenizer(directory: Path) -> int | None:
    """The id of the eos token that tokenizer_config.json names.

    A chat model whose config.json is still its base model's ends its turns with that token alone.
    """
    path = directory / "tokenizer_config.json"
    settings = _read_json(path) if path.is_file() else {}
    eos = settings.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if text is None:
        return None
    for index, token in settings.get("added_tokens_decoder", {}).items():
        if token["content"] == text:
            return int(index)
    path = directory / "tokenizer.json"  # transformers 5 keeps the added tokens here alone
    added = _read_json(path).get("added_tokens", []) if path.is_file() else []
    return next((token["id"] for token in added if token["content"] == text), None)


class HfTensors:
    """The tensors of a directory (a `TensorSource`).

    Raises ValueError if files are missing, damaged or hold something else than floats.
    """

    naming = HUGGING_FACE

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self.where = str(directory)
        self._home: dict[str, Any] = {}  # tensor -> its open file
        for path in _weight_files(directory):
            try:
                file = safe_open(path, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
            self._home.update(dict.fromkeys(file.keys(), file))
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(file.get_slice(name).get_shape())
            for name, file in self._home.items()
            if not name.endswith("rotary_emb.inv_freq")  # old files keep what config.json says
        }
        if config.tie_word_embeddings:
            self._drop_tied_head()

    def read(self, name: str) -> FloatArray:
        """The tensor as stored. Raises ValueError if it is not of floats."""
        file = self._home[name]
        dtype = file.get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ValueError(
                f"{self.where}: {name} is of type {dtype}; supported: {', '.join(_DTYPES)}"
            )
        tensor: FloatArray = file.get_tensor(name)
        return tensor

    def _drop_tied_head(self) -> None:
        """Some files of tied models keep the head as well: fine if it is the embedding."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if head not in self.shapes or embedding not in self.shapes:
            return
        if not np.array_equal(self.read(head), self.read(embedding)):
            raise ValueError(
                f"{self.where}: config.json says tie_word_embeddings, but {head} differs from "
                f"{embedding}; set tie_word_embeddings to false to use it"
            )
        self.shapes = {name: shape for name, shape in self.shapes.items() if name != head}


def write_hf_weights(
    directory: Path, config: ModelConfig, weights: Mapping[str, FloatArray], dtype: str
) -> None:
    """Write canonical parameters to `directory/model.safetensors`, not fused, in `dtype`."""
    target = weight_dtype(dtype)
    tensors = {
        name: np.ascontiguousarray(tensor, target)
        for name, tensor in to_hf_tensors(config, weights).items()
    }
    save_file(tensors, directory / _SINGLE, metadata={"format": "pt"})


def to_hf_tensors(config: ModelConfig, weights: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Hugging Face name -> tensor, for all parameters of `expected_shapes(config)`."""
    tensors: dict[str, FloatArray] = {}
    for canonical, parts in file_parts(config, HUGGING_FACE).items():
        parameter = weights[canonical]
        rows = parameter.T if canonical.endswith(".kernel") else parameter
        start = 0
        for part in parts:
            end = start + part.shape[0]
            tensors[part.name] = rows[start:end]
            start = end
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map")
        paths = [directory / name for name in sorted(set(weight_map.values()))]
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise ValueError(f"{directory}: missing shards named in {_INDEX}: {', '.join(absent)}")
        return paths
    if not (directory / _SINGLE).is_file():
        raise ValueError(
            f"{directory} has neither {_SINGLE} nor {_INDEX}; weights in other formats must be "
            "converted to safetensors first"
        )
    return [directory / _SINGLE]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
