"""Logits processors: functions of yours that change a row's logits inside the compiled steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.outputs import error_text
from paged_jax.steps.logits import LogitsProcessor
from pallas_kernels.numerics import default_numerics


def check_processors(processors: Any, vocab_size: int, max_model_len: int) -> None:
    """ValueError, in one line, for what is no mapping from names to logits processors."""
    if not isinstance(processors, Mapping):
        raise ValueError(f"logits_processors must map names to functions, got {processors!r:.80}")
    logits = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
    token_ids = jax.ShapeDtypeStruct((max_model_len,), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    for name, function in processors.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"a logits processor's name must be a string, got {name!r}")
        what = f"logits processor {name!r}"
        try:
            hash(function)  # steps are compiled for it
            with default_numerics():
                result = jax.eval_shape(function, logits, token_ids, number, number)
        except Exception as error:
            raise ValueError(
                f"{what} cannot be called with (logits f32[{vocab_size}], token_ids "
                f"i32[{max_model_len}], num_tokens i32[], num_prompt_tokens i32[]): "
                f"{error_text(error)}"
            ) from error
        if (getattr(result, "shape", None), getattr(result, "dtype", None)) != (
            logits.shape,
            logits.dtype,
        ):
            raise ValueError(f"{what} must return logits f32[{vocab_size}], but returns {result}")


def check_names(names: Sequence[str], processors: Mapping[str, LogitsProcessor]) -> None:
    """ValueError for a name in `SamplingParams.logits_processors` that the engine does not know."""
    for name in names:
        if name not in processors:
            known = ", ".join(map(repr, processors)) or "none"
            raise ValueError(
                f"logits processor {name!r} is unknown; this engine has {known} "
                "(Engine(logits_processors={name: function}))"
            )
