"""The trained model of tests/fixtures/tiny_lm has learnt, ends by itself, and is Hugging Face's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import jax
import numpy as np
import pytest

from paged_jax import SamplingParams
from paged_jax.loading import load_model
from paged_jax.models.params import num_parameters
from tests.conftest import TINY_LM
from tests.models.hf_parity import (
    GOLDENS,
    assert_last_logits_agree,
    assert_same_continuation,
    dense_logits,
    device_params,
    greedy,
    last_logits,
    read_goldens,
    recorded_prompts,
)

BOS, EOS = 256, 257
SCRIPT = Path(__file__).parents[2] / "scripts" / "train_tiny_lm.py"


@pytest.fixture(scope="module")
def goldens():
    return read_goldens(GOLDENS / "tiny_lm.npz")


def test_it_has_a_million_parameters_and_its_loss_fell(tiny_model):
    assert 0.9e6 < num_parameters(tiny_model.config) < 1.2e6
    training = json.loads((TINY_LM / "training.json").read_text())
    losses = [point["validation_loss"] for point in training["curve"]]
    assert losses[0] > 5
    assert losses == sorted(losses, reverse=True)
    assert training["final_validation_loss"] < 1.3


def test_transformers_reads_its_config():
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(TINY_LM)
    assert (config.model_type, config.vocab_size) == ("llama", 259)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (256, 257, 258)


def test_it_predicts_well_at_every_position_it_is_made_for(tiny_model):
    length, num_rows = tiny_model.config.max_position_embeddings, 4
    tokens = []
    for topic in ("exceptions", "objects", "attribute-access"):
        for paragraph in topics[topic].split("\n\n"):
            if paragraph[0].isupper() and paragraph.endswith("."):
                tokens += [BOS, *" ".join(paragraph.split()).encode(), EOS]
    rows = np.array(tokens[: length * num_rows]).reshape(num_rows, length)
    logits = dense_logits(tiny_model.config, device_params(tiny_model), rows[:, :-1])
    chosen = np.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], axis=-1)[..., 0]
    by_position = [-float(part.mean()) for part in np.array_split(chosen, 4, axis=1)]
    assert max(by_position) < 1.5, "nats per byte"


def test_logits_of_the_last_tokens_are_those_of_hugging_face(tiny_model, goldens):
    logits = last_logits(tiny_model.config, device_params(tiny_model), recorded_prompts(goldens))
    assert_last_logits_agree(logits, goldens)


@pytest.mark.slow  # all recorded continuations; test_model.py has short ones
def test_greedy_continuations_are_those_of_hugging_face(engine_with, goldens):
    outputs = greedy(
        engine_with(num_blocks=256, max_model_len=1024),
        recorded_prompts(goldens),
        goldens["continuations"].shape[1],
    )
    for output, *golden in zip(
        outputs, goldens["continuations"], goldens["top_two_logits"], strict=True
    ):
        assert_same_continuation(output, *golden)


@pytest.mark.slow  # hundreds of tokens of each prompt
def test_it_ends_by_itself_where_hugging_face_does(engine_with, goldens):
    continuations = goldens["continuations"].tolist()
    ending = [i for i, tokens in enumerate(continuations) if EOS in tokens]
    assert len(ending) >= 4
    prompts = [recorded_prompts(goldens)[i] for i in ending]
    params = SamplingParams(temperature=0, max_tokens=64)
    engine = engine_with(num_blocks=256, max_model_len=1024)
    for i, output in zip(ending, engine.generate(prompts, params, progress=False), strict=True):
        tokens = continuations[i][: continuations[i].index(EOS) + 1]
        assert output.outputs[0].token_ids == tokens
        assert output.outputs[0].finish_reason == "stop"


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow  # trains a model
def test_the_script_trains_and_writes_a_model_that_loads(tmp_path):
    done = run_script("--steps=10", f"--out_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout
    names = {path.name for path in TINY_LM.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == names
    curve = json.loads((tmp_path / "training.json").read_text())["curve"]
    assert curve[-1]["validation_loss"] < curve[0]["validation_loss"] - 0.5
    model = load_model(str(tmp_path))
    assert model.tokenizer.decode(model.tokenizer.encode("é: Latin")) == "é: Latin"


def test_the_script_explains_itself():
    done = run_script("--help")
    assert done.returncode == 0
    assert "python scripts/train_tiny_lm.py --out_dir=out/tiny_lm" in done.stdout


def test_the_script_refuses_what_it_cannot_do():
    done = run_script("--steps=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
