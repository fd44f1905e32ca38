"""Flags that say what answers: each is an option of `paged_jax.Engine` of the same name."""

import dataclasses
from typing import Any

from absl import flags

from paged_jax import Engine
from paged_jax.config import EngineConfig, choices, value_type
from paged_jax.memory.policies import memory_policies
from paged_jax.scheduling.policies import POLICIES

OPTIONS = tuple(
    field
    for field in dataclasses.fields(EngineConfig)
    if field.name not in ("seed", "warm_up")  # an experiment has its own
)
ENGINE_FLAGS = ("model", *(field.name for field in OPTIONS))


def define(values: flags.FlagValues) -> None:
    """Define `ENGINE_FLAGS`."""
    named = {
        "memory_policy": memory_policies(),
        "scheduling_policy": tuple(POLICIES),
        "dtype": ("auto", "float32", "bfloat16"),
    }
    flags.DEFINE_string(
        "model",
        "smollm2",
        "The model is smollm2 (an installed package), a Hugging Face folder or a .gguf file.",
        flag_values=values,
    )
    for field in OPTIONS:
        common = (field.name, field.default)
        kind, text = value_type(field), field.metadata["text"]
        if kind is bool:
            flags.DEFINE_bool(*common, text, flag_values=values)
        elif kind is int:
            least = field.metadata["least"]
            flags.DEFINE_integer(*common, text, lower_bound=least, flag_values=values)
        elif kind is float:
            flags.DEFINE_float(*common, text, flag_values=values)
        elif names := named.get(field.name, choices(field)):
            flags.DEFINE_enum(*common, list(names), text, flag_values=values)
        else:
            flags.DEFINE_string(*common, text, flag_values=values)


def make_engine(values: flags.FlagValues, *, seed: int) -> Engine:
    """The engine that the flags describe."""
    options: dict[str, Any] = {name: values[name].value for name in ENGINE_FLAGS}
    return Engine(options.pop("model"), seed=seed, **options)


def engine_facts(engine: Engine) -> dict[str, Any]:
    """What the engine made of its defaults."""
    return {
        "model": engine.config.name,
        "dtype": engine.dtype,
        "attention": engine.attention.decode_impl,
        "prefill_attention": engine.attention.prefill_impl,
        "kv_write": engine.attention.write_impl,
        "block_size": engine.block_size,
        "num_blocks": engine.num_blocks,
        "num_swap_blocks": engine.core.scheduler.memory.num_swap_blocks,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_model_len,
        "pipelined": engine.pipelined,
    }
