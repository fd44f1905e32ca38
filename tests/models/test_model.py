"""The flax model against Hugging Face's, feature by feature, on small models of random weights.

The models and what Hugging Face computes with them were recorded by scripts/record_goldens.py.
"""

import jax
import numpy as np
import pytest

from paged_jax import Engine
from paged_jax.loading.hf_directory import HfTensors, to_hf_tensors, write_hf_weights
from paged_jax.models.params import expected_shapes, flatten, init_params, nest, num_parameters
from tests.models.hf_parity import (
    RANDOM_MODELS,
    SMALL_MODEL_TOLERANCE,
    assert_same_continuation,
    dense_logits,
    device_params,
    greedy,
    load_random_model,
    read_goldens,
)

# Models with a paged path of their own: heads, windows, rotary factors on cached keys.
THROUGH_THE_ENGINE = (
    "mha",
    "mqa",
    "rope_linear_original",
    "rope_yarn",
    "rope_yarn_original",
    "rope_longrope",
    "qwen2_window",
    "mistral_window",
)


def test_every_feature_has_a_recorded_model():
    features = {folder.name for folder in RANDOM_MODELS}
    assert {"gqa", "mha", "mqa", "tied", "rope_linear", "rope_llama3", "rope_yarn"} <= features
    assert set(THROUGH_THE_ENGINE) <= features


@pytest.mark.parametrize("folder", RANDOM_MODELS, ids=lambda folder: folder.name)
def test_logits_at_every_position_are_those_of_hugging_face(folder):
    model, goldens = load_random_model(folder), read_goldens(folder / "goldens.npz")
    ours = dense_logits(model.config, device_params(model), goldens["tokens"])
    assert goldens["logits"].std() > 0.5, "weights too small to tell anything"
    np.testing.assert_allclose(ours, goldens["logits"], rtol=0, atol=SMALL_MODEL_TOLERANCE)


@pytest.mark.parametrize("name", THROUGH_THE_ENGINE)
def test_greedy_continuations_through_the_paged_cache_are_those_of_hugging_face(name):
    [folder] = [folder for folder in RANDOM_MODELS if folder.name == name]
    goldens = read_goldens(folder / "goldens.npz")
    tokens = goldens["continuation"]
    prompt = goldens["tokens"][0, : -len(tokens)].tolist()
    engine = Engine(
        load_random_model(folder),
        max_num_seqs=1,
        max_num_batched_tokens=16,
        dtype="float32",
        warm_up=False,
    )
    [output] = greedy(engine, [prompt], len(tokens))
    assert_same_continuation(output, tokens, goldens["top_two_logits"])


@pytest.mark.parametrize("name", ["rope_linear_original", "rope_yarn_original", "rope_longrope"])
def test_an_engine_serves_the_length_that_the_scaling_stretches_to(name):
    [folder] = [folder for folder in RANDOM_MODELS if folder.name == name]
    model = load_random_model(folder)
    assert Engine(model, warm_up=False).max_model_len == 128
    assert Engine(model, warm_up=False, max_model_len=100).max_model_len == 100
    with pytest.raises(ValueError, match="max_model_len must be between 2 and 128"):
        Engine(model, warm_up=False, max_model_len=129)


@pytest.mark.parametrize("folder", RANDOM_MODELS, ids=lambda folder: folder.name)
def test_the_modules_declare_the_expected_parameters(folder):
    config = load_random_model(folder).config
    params = flatten(init_params(config, seed=0))
    assert {name: x.shape for name, x in params.items()} == expected_shapes(config)
    assert sum(x.size for x in params.values()) == num_parameters(config)


def test_initial_parameters_follow_the_seed():
    config = load_random_model(RANDOM_MODELS[0]).config
    once, again, other = (jax.tree.leaves(init_params(config, seed)) for seed in (3, 3, 4))
    assert all(np.array_equal(x, y) for x, y in zip(once, again, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(once, other, strict=True))


@pytest.mark.parametrize("folder", RANDOM_MODELS, ids=lambda folder: folder.name)
def test_exported_weights_are_those_of_the_directory(folder, tmp_path):
    model = load_random_model(folder)
    parameters = flatten(nest(model.weights))
    write_hf_weights(tmp_path, model.config, parameters, "bfloat16")
    exported, stored = HfTensors(tmp_path, model.config), HfTensors(folder, model.config)
    assert exported.shapes == stored.shapes
    for name in stored.shapes:
        assert np.array_equal(exported.read(name), stored.read(name)), name
    tensors = to_hf_tensors(model.config, parameters)
    assert {name: x.shape for name, x in tensors.items()} == stored.shapes
