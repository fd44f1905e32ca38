"""The options that say what answers: a model, and each option of `paged_jax.Engine` by its name."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from experiments.lib.options import option
from paged_jax import Engine
from paged_jax.config import EngineConfig
from paged_jax.memory.policies import memory_policies
from paged_jax.scheduling.policies import POLICIES


@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineConfig):
    """A model and its engine. Checked on construction, as `EngineConfig` is."""

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "memory_policy": memory_policies(),
        "scheduling_policy": tuple(POLICIES),
        "dtype": ("auto", "float32", "bfloat16"),
    }

    model: str = option(
        "smollm2",
        "The model is smollm2 (an installed package), a Hugging Face folder or a .gguf file.",
    )
    # No flags: an experiment has its own seed, and says itself when to compile.
    seed: int = 0
    warm_up: bool = True

    def make_engine(self, *, seed: int) -> Engine:
        """The engine that the options describe."""
        names = (field.name for field in dataclasses.fields(EngineConfig))
        return Engine(self.model, **{name: getattr(self, name) for name in names} | {"seed": seed})


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
