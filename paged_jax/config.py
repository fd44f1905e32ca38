"""Every option of an engine, once: its type, default, check and help text.

`paged_jax.Engine` takes the options as keywords, the scheduler and the simulated systems read them,
and the experiments define a flag for each. A new option is one more field of `EngineConfig`.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, Self, get_args

from paged_jax.values import unknown

PreemptionMode = Literal["recompute", "swap", "auto"]


def option(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float = math.inf,
    on_cpu: Any = None,
    on_gpu: Any = None,
) -> Any:
    """A field of `EngineConfig`.

    text: its help text, in sentences.
    least, above, below: bounds of a number.
    on_cpu, on_gpu: the value that `default` stands for, where it depends on the device.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "text": text,
            "least": least,
            "above": above,
            "below": below,
            "on_cpu": on_cpu,
            "on_gpu": on_gpu,
        },
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of an engine; ValueError, in one line, for a value that cannot work.

    An option whose type has no None, and whose default is None, is filled in by `resolved`.
    Names of policies, dtypes and kernels are checked where they are looked up.
    """

    block_size: int = option(16, "A KV block has this many slots, one for each token.", least=1)
    num_blocks: int | None = option(
        None,
        "The KV pool has this many blocks. By default it has as many as the sequences can need, or "
        "as many as fit in the device's memory.",
        least=1,
    )
    memory_policy: str = option(
        "paged",
        "KV slots are granted in pages (paged), or as one contiguous reservation for each "
        "sequence: of the longest length (orca_max), of the next power of two (orca_pow2), or of "
        "the exact length (orca_oracle). Contiguous memory caches no prefixes and swaps nothing.",
    )
    max_num_seqs: int = option(
        None,
        "Sequences that run at a time are at most this many. The default is 32 on a CPU and 256 on "
        "a GPU.",
        least=1,
        on_cpu=32,  # a laptop's compute saturates early
        on_gpu=256,
    )
    max_num_batched_tokens: int = option(
        None,
        "An iteration computes at most this many tokens. Decodes count first, and longer prompts "
        "are prefilled in chunks beside them. The default is 256 on a CPU and 4096 on a GPU.",
        least=1,
        on_cpu=256,
        on_gpu=4096,
    )
    max_model_len: int = option(
        None,
        "A sequence, its prompt and its output together, has at most this many tokens. The default "
        "is the model's own limit.",
        least=1,
    )
    max_prefill_seqs: int = option(
        16, "A prefill step computes chunks of at most this many prompts.", least=1
    )
    max_num_waiting: int | None = option(
        None,
        "At most this many requests wait, and the engine refuses more. By default it refuses none.",
        least=1,
    )
    watermark: float = option(
        0.01,
        "Admission leaves this fraction of the blocks free, for running sequences to grow.",
        least=0,
        below=1,
    )
    enable_prefix_caching: bool = option(
        True,
        "A request reuses the KV blocks that earlier requests have computed for the same prefix. "
        "Sequences of one request share blocks in any case.",
    )
    enable_chunked_prefill: bool = option(
        True,
        "Prompts are cut into chunks, so that no prompt holds up running sequences. Without it an "
        "iteration computes a prompt as a whole, and max_num_batched_tokens must be at least "
        "max_model_len.",
    )
    scheduling_policy: str | Any = option(
        "fcfs",
        "Requests are served in this order: first come first served (fcfs), by priority, shortest "
        "prompt first, or in static batches.",
    )
    preemption_mode: PreemptionMode = option(
        "auto",
        "When the blocks run out, the last sequences in order give up their blocks. The engine "
        "computes their tokens again (recompute), moves the blocks to host memory and back (swap), "
        "or does what it estimates to take less time (auto).",
    )
    swap_space_blocks: int | None = option(
        None,
        "Host memory has room for this many swapped blocks. By default it has room for as many as "
        "the KV pool has, within 4 GiB, and for none where no preemption would swap.",
        least=0,
    )
    target_inter_token_s: float | None = option(
        None,
        "The scheduler holds prefill back so that a running request gets a token every so many "
        "seconds. By default it does not.",
        above=0,
    )
    pipelined: bool = option(
        None,
        "The host plans an iteration while the device runs the one before. Outputs do not depend "
        "on it, but a new request waits an iteration longer. The default is on for a GPU and off "
        "for a CPU.",
        on_cpu=False,  # planning would take the cores that compute
        on_gpu=True,
    )
    dtype: str = option(
        "auto",
        "Weights and KV cache have this dtype; auto is float32 on a CPU and bfloat16 on a GPU.",
        on_cpu="float32",
        on_gpu="bfloat16",
    )
    attention: str = option(
        "auto",
        "Decode steps run this implementation of paged attention: xla, mosaic_gpu, another one by "
        "its name, or the fastest that can do it (auto).",
    )
    prefill_attention: str = option(
        "auto", "Prefill steps run this implementation of paged attention."
    )
    kv_write: str = option(
        "auto",
        "Steps write keys and values to the cache with this implementation: xla, mosaic_gpu, "
        "another one by its name, or the fastest that can do it (auto).",
    )
    interpret_kernels: bool = option(
        False,
        "Pallas kernels run in Pallas' interpreter, which is slow and needs no GPU. Nothing is "
        "compiled in the background then.",
    )
    seed: int = option(0, "Requests without a seed draw theirs from this one.", least=0)
    warm_up: bool = option(
        True,
        "The engine compiles every step in the background, and first the step that a request "
        "needs. `Engine.warm_up` waits until all steps are there.",
    )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """The options by name; TypeError, with the nearest name, for an unknown name."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                raise TypeError(unknown("option", name, names))
        return cls(**options)

    def __post_init__(self) -> None:
        # A subclass may give a field another default: the checks are those of this class.
        for field in dataclasses.fields(EngineConfig):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            _check(field, value)
            if value_type(field) is int:
                object.__setattr__(self, field.name, int(value))
        self._check_budget(self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len)
        if self.target_inter_token_s is not None and not self.enable_chunked_prefill:
            raise ValueError(
                f"target_inter_token_s {self.target_inter_token_s} holds back prefill, which takes "
                "chunks: leave enable_chunked_prefill on"
            )

    def _check_budget(
        self, num_tokens: int | None, num_seqs: int | None, model_len: int | None
    ) -> None:
        """ValueError for a token budget with which some request might never end."""
        if num_tokens is None:
            return
        if num_seqs is not None and num_tokens < num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {num_tokens} is less than max_num_seqs {num_seqs}: a "
                "token for each running sequence must fit in an iteration"
            )
        if not self.enable_chunked_prefill and model_len is not None and num_tokens < model_len:
            raise ValueError(
                f"max_num_batched_tokens {num_tokens} is less than max_model_len {model_len}: "
                "without chunked prefill any prompt must fit in an iteration; raise it, or lower "
                "max_model_len"
            )

    def resolved(self, platform: str, *, model_name: str, max_position_embeddings: int) -> Self:
        """The options with None and "auto" replaced by defaults of JAX's `platform` and the model.

        ValueError for sequences longer than the model was made for.
        """
        length = max_position_embeddings if self.max_model_len is None else self.max_model_len
        if not 1 < length <= max_position_embeddings:
            raise ValueError(
                f"max_model_len must be between 2 and {max_position_embeddings}, for which "
                f"{model_name} was made; got {length}"
            )
        of_device = "on_cpu" if platform == "cpu" else "on_gpu"
        filled: dict[str, Any] = {"max_model_len": length}
        for field in dataclasses.fields(EngineConfig):
            default = field.metadata[of_device]
            if default is not None and getattr(self, field.name) == field.default:
                filled[field.name] = default
        if "max_num_batched_tokens" in filled:
            filled["max_num_batched_tokens"] = max(
                filled["max_num_batched_tokens"],
                filled.get("max_num_seqs", self.max_num_seqs),
                0 if self.enable_chunked_prefill else length,
            )
        return dataclasses.replace(self, **filled)


def value_type(field: dataclasses.Field[Any]) -> type:
    """bool, int, float or str: the type of an option's values other than None."""
    first, *_ = get_args(field.type) or (field.type,)
    return first if isinstance(first, type) else type(first)


def choices(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """An option's values, where its type names them."""
    return tuple(each for each in get_args(field.type) if isinstance(each, str))


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    """ValueError for a value of another type, or out of bounds."""
    name, kind, meta = field.name, value_type(field), field.metadata
    least, above, below = meta["least"], meta["above"], meta["below"]
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    if kind is int and (
        isinstance(value, bool) or not isinstance(value, Integral) or value < least
    ):
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"{name} must be a number, got {value!r}")
        is_low = not value > above if least is None else not value >= least
        if is_low or not value < below:
            low = f"above {above}" if least is None else f"at least {least}"
            high = "finite" if below == math.inf else f"below {below}"
            raise ValueError(f"{name} must be {low} and {high}, got {value}")
    if (names := choices(field)) and value not in names:
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {value!r}")
