"""What a GGUF file may say: each key is read, harmless or refused; end tokens; RoPE scaling."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import TokenType

from paged_jax import Engine, SamplingParams
from paged_jax.loading import load_config
from paged_jax.loading.byte_tokenizer import CHARACTER_TO_BYTE
from paged_jax.loading.gguf_file import GgufFile
from paged_jax.loading.gguf_model import GgufTensors, read_gguf_config
from paged_jax.loading.gguf_tokenizer import read_gguf_tokenizer
from paged_jax.loading.weights import assemble
from paged_jax.models.config import ModelConfig
from paged_jax.models.rope import inv_freq
from tests.loading.loading_models import LLAMA, QWEN2, random_tensors, write_gguf

HF = LLAMA | {"vocab_size": 300}
NORMAL, CONTROL, USER_DEFINED = TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED
FIRST = 256  # the ids of special tokens start here

OpenFile = Callable[..., GgufFile]


def vocabulary(*special: str, kind: int = CONTROL, **more: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer whose special tokens follow the 256 bytes."""
    tokens = [*CHARACTER_TO_BYTE, *special]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(NORMAL)] * FIRST + [int(kind)] * len(special),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": FIRST,
        "tokenizer.ggml.eos_token_id": FIRST,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


@pytest.fixture
def open_file(tmp_path: Path) -> OpenFile:
    """A file of a small model with this metadata; None leaves a key out."""
    path = write_gguf(tmp_path / "m.gguf", HF, random_tensors(HF))

    def with_metadata(metadata: dict[str, Any]) -> GgufFile:
        file = GgufFile(path)
        changed = file.metadata | metadata
        file.metadata = {key: value for key, value in changed.items() if value is not None}
        return file

    return with_metadata


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED, NORMAL])
@pytest.mark.parametrize(
    "text",
    [
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001
    ],
)
def test_a_token_whose_text_ends_a_turn_ends_generation(
    text: str, kind: int, open_file: OpenFile
) -> None:
    """Whatever its type and the metadata say; it is matched whole, and never shown."""
    file = open_file(vocabulary("<s>", "<think>", text, kind=kind))
    assert read_gguf_config(file).eos_token_ids == (FIRST, FIRST + 2)
    tokenizer = read_gguf_tokenizer(file)
    assert tokenizer.encode(f"a{text}") == [ord("a"), FIRST + 2]
    assert tokenizer.decode([97, FIRST + 2], skip_special_tokens=True) == "a"


def test_end_tokens_that_the_metadata_names_come_first_and_each_once(open_file: OpenFile) -> None:
    names = {"eos_token_id": 259, "eot_token_id": 257, "eom_token_id": 40, "eos_token_ids": [41]}
    special = ("<|im_end|>", "<|eot_id|>", "<|im_start|>", "<|endoftext|>")
    file = open_file(vocabulary(*special, **names))
    assert read_gguf_config(file).eos_token_ids == (259, 257, 40, 41, 256)
    read_gguf_tokenizer(file)


def test_separators_of_files_and_openers_of_turns_do_not_end_generation(
    open_file: OpenFile,
) -> None:
    special = ("<|endoftext|>", "<|im_start|>", "<|file_sep|>", "<|fim_pad|>", "<|repo_name|>")
    file = open_file(vocabulary(*special, fim_pad_token_id=259))
    assert read_gguf_config(file).eos_token_ids == (256,)
    read_gguf_tokenizer(file)


def test_sentencepiece_files_without_special_ids_have_the_usual_ones(open_file: OpenFile) -> None:
    ids = {f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "eos")}
    metadata = ids | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"],
        "tokenizer.ggml.token_type": [2, 3, 3, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0],
        "tokenizer.ggml.add_space_prefix": False,
    }
    config = read_gguf_config(open_file(metadata))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert read_gguf_tokenizer(open_file(metadata)).encode("a") == [1, 3]


def test_a_chat_model_stops_at_the_end_of_its_turn(tmp_path: Path) -> None:
    """Its logits are all the same, so that it says token 0, which no id of the metadata names."""
    tensors = random_tensors(HF)
    tensors["model.norm.weight"][:] = 0
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["<|im_end|>", *CHARACTER_TO_BYTE, "ab"],
        "tokenizer.ggml.token_type": [int(CONTROL)] + [int(NORMAL)] * 257,
        "tokenizer.ggml.merges": ["a b"],
    }
    path = write_gguf(tmp_path / "chat.gguf", HF, tensors, metadata=metadata)
    engine = Engine(str(path), warm_up=False, max_num_seqs=1)
    [output] = engine.generate("hi", SamplingParams(temperature=0, max_tokens=8), progress=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids == [0]
    assert output.outputs[0].text == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.logit_scale", 0.5),
        ("llama.residual_scale", 0.2),
        ("llama.attention.scale", 0.1),
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.attention.max_alibi_bias", 8.0),
        ("llama.attention.sliding_window_pattern", 4),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.final_logit_softcapping", 30.0),
        ("llama.rope.scale", 2.0),
        ("llama.rope.scaling.alpha", 1000.0),
        ("llama.rope.scaling.attn_factor", 1.2),
        ("llama.rope.scaling.yarn_ext_factor", 1.0),
        ("llama.rope.scaling.yarn_beta_fast", 16.0),
        ("llama.rope.scaling.yarn_log_multiplier", 0.1),
        ("llama.rope.dimension_sections", [16, 24, 24]),
        ("llama.tensor_data_layout", "jploski"),
        ("llama.use_parallel_residual", True),
        ("llama.pooling_type", 3),
        ("llama.something_new", "yes"),
        ("tokenizer.ggml.add_sep_token", True),
        ("tokenizer.ggml.add_space_prefix", True),  # read for SentencePiece alone
        ("tokenizer.ggml.remove_extra_whitespaces", True),
        ("tokenizer.ggml.precompiled_charsmap", [1, 2, 3]),
        ("tokenizer.something_new", 1),
    ],
)
def test_what_may_change_the_output_and_is_not_read_is_refused(
    key: str, value: Any, open_file: OpenFile
) -> None:
    file = open_file(vocabulary("<s>") | {key: value})
    read = read_gguf_tokenizer if key.startswith("tokenizer.") else read_gguf_config
    with pytest.raises(ValueError, match=f"{key}=.* is not supported") as error:
        read(file)
    assert str(error.value).startswith(f"{file.path}: {key}={value!r} ")
    assert "\n" not in str(error.value)


def test_what_changes_nothing_is_accepted(open_file: OpenFile) -> None:
    general = (
        "author",
        "license",
        "url",
        "file_type",
        "tags",
        "base_model.0.name",
        "sampling.temp",
    )
    nothing = {
        "llama.vocab_size": 300,
        "llama.expert_used_count": 2,
        "llama.rope.scaling.finetuned": True,
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 8.0,
        "llama.rope.scaling.original_context_length": 128,
        "llama.rope.scaling.attn_factor": 1.0,
        "llama.rope.scaling.yarn_ext_factor": 0.0,
        "llama.logit_scale": 1.0,
        "llama.attention.scale": 0.0,
        "llama.attention.causal": True,
        "llama.attention.sliding_window": 0,
        "llama.pooling_type": 0,
        "llama.tensor_data_layout": "Meta AI original pth",
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_sep_token": False,
        "tokenizer.ggml.scores": [0.0] * 257,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.prefix_token_id": 4,
        "tokenizer.ggml.token_type_count": 1,
        "tokenizer.huggingface.json": "{}",
        "quantize.imatrix.file": "calibration.dat",
        "general.type": "model",
        "general.quantization_version": 2,
        "split.count": 1,
    }
    plain = open_file(vocabulary("<s>"))
    file = open_file(vocabulary("<s>") | nothing | {f"general.{name}": "x" for name in general})
    assert read_gguf_config(file) == read_gguf_config(plain)
    assert read_gguf_tokenizer(file).encode("a b") == read_gguf_tokenizer(plain).encode("a b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.type": "adapter"}, "general.type is 'adapter': the file holds no model"),
        ({"general.type": "mmproj"}, "general.type is 'mmproj'"),
        ({"split.count": 3}, "one of 3 parts of a model .* llama-gguf-split --merge"),
        ({"general.quantization_version": 1}, "quantization_version 1 is not supported, only 2"),
        ({"llama.attention.causal": False}, "llama.attention.causal=False is not supported"),
        (
            {"llama.attention.head_count": [4, 2]},
            r"head_count=\[4, 2\]: sizes that differ by layer",
        ),
        ({"llama.attention.head_count_kv": [2, 4]}, r"head_count_kv=\[2, 4\]: sizes that differ"),
    ],
)
def test_files_that_hold_another_kind_of_model_are_refused(
    change: dict[str, Any], message: str, open_file: OpenFile
) -> None:
    with pytest.raises(ValueError, match=message):
        read_gguf_config(open_file(change))


def test_sizes_that_are_given_for_each_layer_may_be_the_same(open_file: OpenFile) -> None:
    each = {"llama.attention.head_count": [4, 4], "llama.attention.head_count_kv": [2, 2]}
    assert read_gguf_config(open_file(each)) == read_gguf_config(open_file({}))


def test_big_endian_files_are_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    with pytest.raises(ValueError, match="the file is big-endian; convert it"):
        load_config(str(path))


def test_unknown_types_of_tokens_are_refused(open_file: OpenFile) -> None:
    with pytest.raises(ValueError, match=r"token_type has unknown types \[9\]"):
        read_gguf_tokenizer(open_file(vocabulary("<s>", kind=9)))


def test_all_chat_templates_are_kept_by_name(open_file: OpenFile) -> None:
    templates = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "with tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = read_gguf_tokenizer(open_file(vocabulary("<s>") | templates))
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "with tools"}
    assert tokenizer.get_chat_template() == "plain"
    assert tokenizer.get_chat_template(tools=[{}]) == "with tools"
    del templates["tokenizer.chat_template.tool_use"]
    assert read_gguf_tokenizer(open_file(vocabulary("<s>") | templates)).chat_template == "plain"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("keys", "rope", "length"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}, 512),
        ({"scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}, 512),
        ({"scale_linear": 4.0}, {"type": "linear", "factor": 4.0}, 512),
        ({"scaling.type": "linear", "scaling.factor": 0.0}, {"type": "default"}, 128),
        ({"scaling.type": "linear"}, {"type": "default"}, 128),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, YARN, 512),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 32,
                "scaling.yarn_beta_fast": 24.0,
                "scaling.yarn_beta_slow": 2.0,
                "scaling.yarn_ext_factor": 1.0,
                "scaling.yarn_attn_factor": 1.0,
            },
            YARN | {"original_max_position_embeddings": 32, "beta_fast": 24.0, "beta_slow": 2.0},
            128,
        ),
    ],
)
def test_rope_scaling_reads_as_from_the_config_json(
    keys: dict[str, Any], rope: dict[str, Any], length: int, open_file: OpenFile
) -> None:
    config = read_gguf_config(open_file({f"llama.rope.{key}": v for key, v in keys.items()}))
    theirs = ModelConfig.from_hf(HF | {"rope_scaling": rope})
    assert config.rope_scaling == theirs.rope_scaling
    assert config.max_position_embeddings == theirs.max_position_embeddings == length


@pytest.mark.parametrize("hf", [HF, QWEN2])
def test_longrope_reads_its_factors_from_tensors(hf: dict[str, Any], tmp_path: Path) -> None:
    short, long = np.linspace(1, 1.5, 8), np.linspace(1, 4, 8)
    prefix = f"{hf['model_type']}.rope.scaling"
    path = write_gguf(
        tmp_path / "m.gguf",
        hf,
        random_tensors(hf),
        metadata={
            f"{prefix}.type": "longrope",
            f"{prefix}.original_context_length": 32,
            f"{prefix}.attn_factor": 1.25,
        },
        more_tensors={
            "rope_factors_short.weight": short.astype(np.float32),
            "rope_factors_long.weight": long.astype(np.float32),
        },
    )
    rope = {
        "type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": 32,
        "attention_factor": 1.25,
    }
    config, theirs = load_config(str(path)), ModelConfig.from_hf(hf | {"rope_scaling": rope})
    assert config.max_position_embeddings == theirs.max_position_embeddings == 128
    for length in (32, 128):
        ours, factor = inv_freq(config.served_up_to(length))
        expected, expected_factor = inv_freq(theirs.served_up_to(length))
        np.testing.assert_allclose(ours, expected, rtol=1e-6)
        assert factor == expected_factor == 1.25


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scaling.type": "longrope"}, "'longrope' needs the tensors rope_factors_short.weight, "),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_ext_factor": 0.0},
            "yarn_ext_factor=0.0 is not supported",
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_attn_factor": 1.2},
            "yarn_attn_factor=1.2 is not supported",
        ),
    ],
)
def test_rope_scaling_that_is_not_computed_is_refused(
    keys: dict[str, Any], message: str, open_file: OpenFile
) -> None:
    with pytest.raises(ValueError, match=message):
        read_gguf_config(open_file({f"llama.rope.{key}": v for key, v in keys.items()}))


def test_longrope_tensors_beside_another_scaling_are_refused(tmp_path: Path) -> None:
    factors = {"rope_factors_long.weight": np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", HF, random_tensors(HF), more_tensors=factors)
    file = GgufFile(path)
    config = read_gguf_config(file)
    with pytest.raises(ValueError, match=r"1 unexpected \(rope_factors_long.weight"):
        assemble(GgufTensors(file, config), config, "float32")


def test_frequency_factors_beside_another_scaling_are_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", HF, random_tensors(HF), more_tensors=factors)
    file = GgufFile(path)
    file.metadata["llama.rope.scaling.type"] = "linear"
    assert read_gguf_config(file).rope_scaling is not None
    file.metadata["llama.rope.scaling.factor"] = 8.0
    with pytest.raises(ValueError, match=r"rope_freqs.weight beside RoPE scaling 'linear'"):
        read_gguf_config(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.alignment", 0, "general.alignment must be a number of bytes, at least 1, got 0"),
        ("general.alignment", 2.5, "general.alignment must be a number of bytes"),
        ("general.alignment", "x", "general.alignment must be a number of bytes"),
        ("split.count", "x", "is one of 'x' parts of a model"),
        ("llama.rope.scaling.original_context_length", math.inf, "infinity to integer"),
    ],
)
def test_numbers_that_are_none_are_refused(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    metadata = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0, key: value}
    path = write_gguf(tmp_path / "m.gguf", HF, random_tensors(HF), metadata=metadata)
    with pytest.raises(ValueError, match=message):
        read_gguf_config(GgufFile(path))
