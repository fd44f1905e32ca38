"""The options of an engine: refusals, defaults of a device, and a flag for each."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from experiments.lib import options
from experiments.lib.serving_options import EngineOptions
from paged_jax import Engine
from paged_jax.config import EngineConfig
from paged_jax.simulation.run import SystemConfig

FIELDS = {field.name: field for field in dataclasses.fields(EngineConfig)}
MODEL = {"model_name": "any", "max_position_embeddings": 1024}


def squeezed(text: str) -> str:
    """Without white space: help breaks its lines where it likes."""
    return "".join(text.split())


def test_every_option_is_a_flag_of_serve_with_its_text():
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "experiments.serve", "--help"]
    shown = squeezed(
        subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    )
    for name in FIELDS.keys() - {"seed", "warm_up"}:  # serve has its own
        text = re.escape(squeezed(FIELDS[name].metadata["text"]))
        assert re.search(rf"{name}:(<[^>]*>:)?{text}", shown), name


def test_every_option_has_a_text_in_sentences():
    for name, field in FIELDS.items():
        text = field.metadata["text"]
        assert text[0].isupper(), name
        assert text.endswith("."), name


def test_flags_have_the_defaults_of_the_options():
    values = flags.FlagValues()
    names = options.define(EngineOptions, values)
    values(["program"])
    given = {name: values[name].value for name in names if name != "model"}
    assert given.keys() == FIELDS.keys() - {"seed", "warm_up"}
    assert EngineConfig.of(given) == EngineConfig()
    assert options.from_flags(EngineOptions, values) == EngineOptions()


@pytest.mark.parametrize(
    "wrong", ["--block_size=0", "--preemption_mode=wait", "--dtype=int8", "--watermark=much"]
)
def test_a_flag_refuses_what_its_option_refuses(wrong):
    values = flags.FlagValues()
    options.define(EngineOptions, values)
    with pytest.raises(flags.Error):
        values(["program", wrong])


@pytest.mark.parametrize("config", [EngineConfig, SystemConfig])
def test_an_unknown_option_is_refused_with_the_nearest(config):
    with pytest.raises(TypeError, match="unknown option 'blok_size'; did you mean 'block_size'"):
        config.of({"blok_size": 16})
    with pytest.raises(TypeError, match="unknown option 'zzz'; one of block_size, num_blocks"):
        config.of({"zzz": 16})


def test_an_engine_refuses_an_unknown_option_in_one_line(tiny_model):
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'") as error:
        Engine(tiny_model, max_num_seq=4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("platform", "defaults"),
    [("cpu", (32, 256, False, "float32")), ("gpu", (256, 4096, True, "bfloat16"))],
)
def test_defaults_depend_on_the_device(platform, defaults):
    config = EngineConfig().resolved(platform, **MODEL)
    names = ("max_num_seqs", "max_num_batched_tokens", "pipelined", "dtype")
    assert tuple(getattr(config, name) for name in names) == defaults
    assert config.max_model_len == 1024
    assert config.resolved("gpu", **MODEL) == config


def test_what_is_given_stays():
    given = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 7,
        "max_model_len": 50,
        "pipelined": False,
        "dtype": "float16",
    }
    config = EngineConfig.of(given).resolved("gpu", **MODEL)
    assert {name: getattr(config, name) for name in given} == given


def test_the_default_budget_holds_all_decodes_and_any_whole_prompt():
    many = EngineConfig(max_num_seqs=300).resolved("cpu", **MODEL)
    assert many.max_num_batched_tokens == 300
    whole = EngineConfig(enable_chunked_prefill=False).resolved("cpu", **MODEL)
    assert whole.max_num_batched_tokens == 1024
    message = "max_num_batched_tokens 20 is less than max_num_seqs 32"
    with pytest.raises(ValueError, match=message):
        EngineConfig(max_num_batched_tokens=20).resolved("cpu", **MODEL)


def test_a_longer_sequence_than_the_model_was_made_for_is_refused():
    for length in (1, 1025):
        with pytest.raises(ValueError, match=f"between 2 and 1024, for which any .*got {length}"):
            EngineConfig(max_model_len=length).resolved("cpu", **MODEL)


def test_integers_of_numpy_are_integers():
    config = EngineConfig(block_size=np.int64(8), seed=np.uint32(3))
    assert type(config.block_size) is type(config.seed) is int
    with pytest.raises(ValueError, match="block_size must be an integer of at least 1, got True"):
        EngineConfig(block_size=True)


def test_a_simulated_system_checks_what_an_engine_checks():
    with pytest.raises(ValueError, match="max_num_seqs must be an integer of at least 1, got 0"):
        SystemConfig(num_slots=64, max_num_seqs=0)
