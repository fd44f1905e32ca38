"""Model configs: from config.json of transformers 4 and 5, against transformers' own reading."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from paged_jax.models.config import ModelConfig, RopeScaling
from paged_jax.models.params import expected_shapes, num_parameters
from paged_jax.models.rope import inv_freq

GOLDENS = Path(__file__).parents[1] / "goldens"

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL = SIZES | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = SIZES | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LONGROPE: dict[str, Any] = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    "hf",
    [
        LLAMA,
        LLAMA | {"num_key_value_heads": None, "head_dim": 32, "rope_theta": 5e5},
        LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        LLAMA | {"eos_token_id": [5, 6], "bos_token_id": None, "rms_norm_eps": 1e-5},
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
        MISTRAL,
        MISTRAL | {"sliding_window": None, "rope_theta": 1e6},
        MISTRAL | {"sliding_window": 128},
        QWEN2 | {"tie_word_embeddings": True, "rope_theta": 1e6},
        QWEN2 | {"sliding_window": 64, "use_sliding_window": False},
        QWEN2 | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0},
        QWEN2 | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 28},
    ],
)
def test_config_json_reads_as_in_transformers(hf: dict[str, Any]) -> None:
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(hf)))
    ours = ModelConfig.from_hf(hf)
    layer_types = getattr(theirs, "layer_types", None) or ["sliding_attention"]
    eos = theirs.eos_token_id
    is_qwen2 = theirs.model_type == "qwen2"
    assert ours == ModelConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_layers=theirs.num_hidden_layers,
        num_heads=theirs.num_attention_heads,
        num_kv_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None)
        or theirs.hidden_size // theirs.num_attention_heads,
        max_position_embeddings=theirs.max_position_embeddings,
        rms_norm_eps=theirs.rms_norm_eps,
        rope_theta=theirs.rope_parameters["rope_theta"],
        tie_word_embeddings=theirs.tie_word_embeddings,
        attention_bias=is_qwen2 or getattr(theirs, "attention_bias", False),
        attention_out_bias=getattr(theirs, "attention_bias", False),
        mlp_bias=getattr(theirs, "mlp_bias", False),
        sliding_window=getattr(theirs, "sliding_window", None)
        if "sliding_attention" in layer_types
        else None,
        bos_token_id=theirs.bos_token_id,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


@pytest.mark.parametrize("hf", [LLAMA, MISTRAL, QWEN2])
def test_config_saved_by_transformers_5_reads_back(hf: dict[str, Any], tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(**hf).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert ModelConfig.from_hf(saved) == ModelConfig.from_hf(hf)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: Ll"),
        ({"architectures": None, "model_type": "phi3"}, "phi3 is not supported"),
        ({"hidden_size": None, "vocab_size": None}, "missing vocab_size, hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"head_dim": 15}, "even head_dim, got 15"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1, got 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer >= 1, got 0"),
        ({"num_key_value_heads": 0}, "num_kv_heads must be an integer >= 1, got 0"),
        ({"vocab_size": 320.5}, "vocab_size must be an integer >= 1, got 320.5"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
        ({"eos_token_id": 320}, "special token id 320 is outside the vocabulary of 320"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
            r"differ by layer \(full_attention, sliding_attention\)",
        ),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "'mrope' is not supported"),
        (
            {"rope_scaling": LONGROPE | {"long_factor": None}},
            r"'longrope' needs positive frequency factors, got \(\)",
        ),
        (
            {"rope_scaling": LONGROPE | {"short_factor": [1.0]}},
            "head_dim=16 needs 8 RoPE frequency factors, got 1",
        ),
        ({"rope_scaling": {"type": "linear"}}, "'linear' has no factor"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor must be a positive number"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}},
            "low_freq_factor=4.0, high_freq_factor=None",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(LLAMA | change)


def test_window_in_some_layers_is_refused() -> None:
    windows = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    with pytest.raises(ValueError, match="sliding window in 2 of 3 layers"):
        ModelConfig.from_hf(QWEN2 | windows)


@pytest.mark.parametrize("name", json.loads((GOLDENS / "loading_rope.json").read_text()))
def test_rotary_frequencies_equal_transformers(name: str) -> None:
    golden = json.loads((GOLDENS / "loading_rope.json").read_text())[name]
    config = ModelConfig.from_hf(LLAMA | golden["config"])
    frequencies, attention_factor = inv_freq(config)
    assert frequencies.dtype == np.float32
    # One unit in the last place, from powers of float32 in another library.
    np.testing.assert_allclose(frequencies, golden["inv_freq"], rtol=3e-7)
    assert attention_factor == pytest.approx(golden["attention_factor"], rel=1e-12)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"type": "linear", "factor": 4, "original_max_position_embeddings": 128}, 512),
        ({"type": "linear", "factor": 0.5}, 512),
        ({"type": "yarn", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "yarn", "original_max_position_embeddings": 128}, 512),
        ({"type": "yarn", "factor": 1.5, "original_max_position_embeddings": 511}, 766),
        (LONGROPE | {"original_max_position_embeddings": 128}, 512),
        (LONGROPE | {"original_max_position_embeddings": 512, "factor": 4.0}, 2048),
        (LONGROPE | {"type": "su", "original_max_position_embeddings": 128}, 512),
        ({"type": "dynamic", "factor": 4.0}, 512),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            512,
        ),
    ],
)
def test_usable_length_follows_the_scaling_and_is_stretched_once(
    rope: dict[str, Any], length: int
) -> None:
    """Whether the config states the original length, as here 512, or the stretched one."""
    for key in ("rope_scaling", "rope_parameters"):
        assert ModelConfig.from_hf(LLAMA | {key: rope}).max_position_embeddings == length


def test_longrope_is_chosen_once_by_the_longest_sequence_that_is_served() -> None:
    rope = LONGROPE | {"original_max_position_embeddings": 128}
    config = ModelConfig.from_hf(LLAMA | {"rope_scaling": rope})
    plain, _ = inv_freq(ModelConfig.from_hf(LLAMA))
    for num_tokens, divisor in ((512, 2), (129, 2), (128, 1), (2, 1)):
        frequencies, factor = inv_freq(config.served_up_to(num_tokens))
        np.testing.assert_allclose(frequencies * divisor, plain, rtol=1e-6)
        assert factor == inv_freq(config)[1]
    yarn = ModelConfig.from_hf(LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert yarn.served_up_to(100) is yarn


def test_frequency_factors_divide() -> None:
    factors = tuple(1.0 + i for i in range(8))
    scaling = RopeScaling(kind="factors", factors=factors)
    plain = ModelConfig.from_hf(LLAMA)
    scaled = ModelConfig(**{**plain.__dict__, "rope_scaling": scaling})
    np.testing.assert_allclose(inv_freq(scaled)[0] * factors, inv_freq(plain)[0], rtol=1e-6)
    with pytest.raises(ValueError, match="head_dim=32 needs 16 RoPE frequency factors, got 8"):
        ModelConfig(**{**plain.__dict__, "rope_scaling": scaling, "head_dim": 32})


def test_shapes_of_a_model_with_everything() -> None:
    config = ModelConfig.from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 8})
    shapes = expected_shapes(config)
    assert shapes["layers.2.attention.qkv.kernel"] == (64, 64)
    assert shapes["layers.2.attention.qkv.bias"] == (64,)
    assert shapes["layers.2.attention.out.kernel"] == (32, 64)
    assert shapes["layers.2.mlp.gate_up.kernel"] == (64, 192)
    assert shapes["layers.2.mlp.down.bias"] == (64,)
    assert shapes["lm_head.kernel"] == (64, 320)
    assert len(shapes) == 3 + 3 * 10
    layer = 64 * 64 + 64 + 32 * 64 + 64 + 64 * 192 + 192 + 96 * 64 + 64 + 2 * 64
    assert num_parameters(config) == 2 * 320 * 64 + 64 + 3 * layer
