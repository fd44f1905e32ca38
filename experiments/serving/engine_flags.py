"""Flags that say what answers: each is an option of `paged_jax.Engine` of the same name."""

from typing import Any, get_args

from absl import flags

from paged_jax import Engine
from paged_jax.scheduling.policies import POLICIES
from paged_jax.scheduling.preemption import PreemptionMode

ENGINE_FLAGS = (
    "model",
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "max_num_waiting",
    "watermark",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "scheduling_policy",
    "preemption_mode",
    "swap_space_blocks",
    "target_inter_token_s",
    "pipelined",
    "dtype",
    "attention",
    "prefill_attention",
    "kv_write",
    "interpret_kernels",
)


def define(values: flags.FlagValues) -> None:
    """Define `ENGINE_FLAGS`."""

    def text(name: str, default: str, description: str) -> None:
        flags.DEFINE_string(name, default, description, flag_values=values)

    def count(name: str, default: int | None, description: str, low: int = 1) -> None:
        flags.DEFINE_integer(name, default, description, lower_bound=low, flag_values=values)

    def switch(name: str, default: bool | None, description: str) -> None:
        flags.DEFINE_bool(name, default, description, flag_values=values)

    text("model", "smollm2", "smollm2 (an installed package), a Hugging Face folder or a .gguf.")
    count("block_size", 16, "Slots (tokens) of a KV block.")
    count("num_blocks", None, "Blocks of the KV pool; default: as many as are needed, or fit.")
    count(
        "max_num_seqs",
        None,
        "Sequences that run at a time; default: 32 on a CPU, 256 on a GPU.",
    )
    count(
        "max_num_batched_tokens",
        None,
        "Tokens of an iteration; default: 256 on a CPU, 4096 on a GPU.",
    )
    count(
        "max_model_len",
        None,
        "Longest prompt and output together; default: the model's own limit.",
    )
    count("max_num_waiting", None, "Requests that wait at most; more are refused. Default: any.")
    flags.DEFINE_float(
        "watermark",
        0.01,
        "Fraction of the blocks that admission leaves free for running sequences to grow.",
        flag_values=values,
    )
    switch("enable_prefix_caching", True, "Let requests use what others have computed of the same.")
    switch(
        "enable_chunked_prefill",
        True,
        "Cut prompts into chunks, so that none holds up those that run; off: each is prefilled in "
        "one iteration.",
    )
    flags.DEFINE_enum(
        "scheduling_policy",
        "fcfs",
        list(POLICIES),
        "In which order requests are served: first come first served, by --num_priorities, "
        "shortest prompt first, or in static batches.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "preemption_mode",
        "auto",
        list(get_args(PreemptionMode)),
        "How blocks are taken from a request when they run out: it is computed again, swapped to "
        "host memory, or what is estimated to take less time.",
        flag_values=values,
    )
    count("swap_space_blocks", None, "Blocks of host memory to swap to; default: see Engine.", 0)
    flags.DEFINE_float(
        "target_inter_token_s",
        None,
        "Seconds between two tokens of a request, for which prefill is held back; default: none.",
        flag_values=values,
    )
    switch(
        "pipelined",
        None,
        "Plan an iteration while the device runs the one before; default: on a GPU, not on a CPU.",
    )
    flags.DEFINE_enum(
        "dtype",
        "auto",
        ["auto", "float32", "bfloat16"],
        "Of weights and KV cache; auto: float32 on a CPU, bfloat16 on a GPU.",
        flag_values=values,
    )
    text("attention", "auto", "Paged attention of decode steps: xla, mosaic_gpu, another, or auto.")
    text("prefill_attention", "auto", "Paged attention of prefill steps, likewise.")
    text("kv_write", "auto", "How keys and values are written: xla, mosaic_gpu, another, or auto.")
    switch(
        "interpret_kernels",
        False,
        "Run Pallas kernels in Pallas' interpreter: no GPU needed, slow.",
    )


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
