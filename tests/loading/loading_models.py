"""Small random models on disk, for the loading tests."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from paged_jax.loading.gguf_model import GGUF
from paged_jax.loading.hf_directory import HUGGING_FACE
from paged_jax.loading.weights import file_parts
from paged_jax.models.config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}

Tensors = dict[str, np.ndarray[Any, Any]]


def random_tensors(hf: dict[str, Any]) -> Tensors:
    """Hugging Face's tensors of a config, [out, in]."""
    rng = np.random.default_rng(0)
    parts = file_parts(ModelConfig.from_hf(hf), HUGGING_FACE)
    return {
        part.name: rng.standard_normal(part.shape, np.float32)
        for group in parts.values()
        for part in group
    }


def write_directory(
    folder: Path, hf: dict[str, Any], tensors: Tensors, num_shards: int = 1
) -> Path:
    """A Hugging Face directory without a tokenizer; with an index where there are shards."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    home = {tensor: names[i % num_shards] for i, tensor in enumerate(tensors)}
    for name in names:
        save_file({key: tensors[key] for key in tensors if home[key] == name}, folder / name)
    index = {"metadata": {}, "weight_map": home}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def pairs_from_halves(tensor: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to query and key rows."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    hf: dict[str, Any],
    tensors: Tensors,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    more_tensors: Tensors | None = None,
) -> Path:
    """The same model as llama.cpp would convert it; norms and biases stay float32."""
    config = ModelConfig.from_hf(hf)
    arch = hf["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    theirs = file_parts(config, HUGGING_FACE)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    for name, group in file_parts(config, GGUF).items():
        for part, source in zip(group, theirs[name], strict=True):
            tensor = tensors[source.name]
            num_heads = heads.get(part.name.split(".")[-2])
            if arch == "llama" and num_heads is not None:
                tensor = pairs_from_halves(tensor, num_heads)
            if tensor.ndim == 1:
                writer.add_tensor(part.name, tensor)
            else:
                quantized = gguf.quantize(tensor, quantization)
                writer.add_tensor(part.name, quantized, raw_dtype=quantization)
    for name, tensor in (more_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
