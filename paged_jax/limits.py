"""An engine's limits: what the caller gave, or the device's default, checked."""

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from paged_jax.loading.arrays import weight_dtype
from paged_jax.memory.policies import PAGED
from paged_jax.models.config import ModelConfig
from paged_jax.scheduling.preemption import PreemptionMode

# A laptop's compute saturates early, and takes the cores that would plan the next iteration.
_CPU = {
    "dtype": "float32",
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "pipelined": False,
}
_GPU = {
    "dtype": "bfloat16",
    "max_num_seqs": 256,
    "max_num_batched_tokens": 4096,
    "pipelined": True,
}


@dataclass(frozen=True)
class Limits:
    """See `paged_jax.engine.Engine`; None stands for what depends on the model, or for no limit."""

    dtype: str
    block_size: int
    num_blocks: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    max_prefill_seqs: int
    memory_policy: str = PAGED  # `make_memory` checks it
    # Those of the scheduler, which checks them.
    watermark: float = 0.01
    max_num_waiting: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    preemption_mode: PreemptionMode = "auto"
    swap_space_blocks: int | None = None
    target_inter_token_s: float | None = None
    pipelined: bool = False

    @classmethod
    def of(cls, platform: str, given: dict[str, Any]) -> "Limits":
        """Fill in the defaults of JAX's ``platform``; ValueError names the value that is wrong."""
        defaults: dict[str, Any] = _CPU if platform == "cpu" else _GPU
        max_num_seqs = integer("max_num_seqs", _or(given["max_num_seqs"], defaults["max_num_seqs"]))
        budget = max(defaults["max_num_batched_tokens"], max_num_seqs)
        dtype = defaults["dtype"] if given["dtype"] == "auto" else given["dtype"]
        weight_dtype(dtype)  # refuses what is no dtype of weights
        optional: dict[str, Any] = {
            name: None if given[name] is None else integer(name, given[name], low)
            for name, low in (
                ("num_blocks", 1),
                ("max_model_len", 1),
                ("max_num_waiting", 1),
                ("swap_space_blocks", 0),
            )
        }
        as_given = (
            "memory_policy",
            "watermark",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "scheduling_policy",
            "preemption_mode",
            "target_inter_token_s",
        )
        return cls(
            dtype=dtype,
            block_size=integer("block_size", given["block_size"]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=integer(
                "max_num_batched_tokens", _or(given["max_num_batched_tokens"], budget)
            ),
            max_prefill_seqs=integer("max_prefill_seqs", given["max_prefill_seqs"]),
            pipelined=_or(given["pipelined"], defaults["pipelined"]),
            **optional,
            **{name: given[name] for name in as_given},
        )

    def model_len(self, config: ModelConfig) -> int:
        """The longest sequence, in tokens; ValueError for more than the model was made for."""
        limit = config.max_position_embeddings
        length = self.max_model_len or limit
        if not 1 < length <= limit:
            raise ValueError(
                f"max_model_len must be between 2 and {limit}, for which {config.name} was made; "
                f"got {length}"
            )
        return length

    def with_whole_prompts(self, max_model_len: int) -> "Limits":
        """With iterations that take any prompt as a whole."""
        budget = max(self.max_num_batched_tokens, max_model_len)
        return replace(self, max_num_batched_tokens=budget)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def integer(name: str, value: Any, low: int = 1) -> int:
    """The value as an int; ValueError if it is none or below ``low``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
    return int(value)
