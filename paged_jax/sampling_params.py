"""Sampling parameters of a request; names and meanings follow vLLM's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from paged_jax.structured_outputs import StructuredOutputsParams
from paged_jax.values import (
    check_fields,
    checked,
    flag,
    integer,
    made_from,
    number,
    plain,
    string,
    strings,
    token_ids,
)

MAX_LOGPROBS = 20
MAX_N = 16384  # a request makes n sequences at once
# A step reports at most MAX_LOGPROBS candidates of a beam; width + end tokens are needed.
MAX_BEAM_WIDTH = MAX_LOGPROBS - 1
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 300  # tokens of a request

# What would change the scores of beams, or end a beam by its text; so would a temperature.
_NOT_WITH_BEAMS = (
    "best_of",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop",
    "logprobs",
    "logit_bias",
    "logits_processors",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
)


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...] | None:
    """Pairs of token and bias; None for no pair. The keys of JSON are strings."""
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        pairs = [(int(t) if isinstance(t, str) else plain(t), bias) for t, bias in pairs]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must map token ids to numbers, got {value!r:.80}") from None
    tokens = token_ids(name, [token for token, _ in pairs])
    most = MAX_LOGIT_BIAS
    biases = [number(f"{name} of {t}", bias, low=-most, high=most) for t, bias in pairs]
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{name} must name each token once, got {value!r:.80}")
    if len(tokens) > MAX_LOGIT_BIASES:
        raise ValueError(f"{name} must hold at most {MAX_LOGIT_BIASES} tokens, got {len(tokens)}")
    return tuple(sorted(zip(tokens, biases, strict=True))) or None


def _allowed_tokens(name: str, value: Any) -> tuple[int, ...]:
    if not (tokens := token_ids(name, value)):
        raise ValueError(f"{name} must hold a token, or be None; got {value!r:.80}")
    return tokens


def _structured_outputs(name: str, value: Any) -> StructuredOutputsParams:
    return made_from(StructuredOutputsParams, value, name)


def _early_stopping(name: str, value: Any) -> bool | Literal["never"]:
    # 1 equals True, but the search looks for True itself.
    if (value := plain(value)) != "never" and not isinstance(value, bool):
        raise ValueError(f'{name} must be True, False or "never", got {value!r:.80}')
    return value


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked on construction: ValueError names the parameter and the value it had.

    Collections may have any form, and numbers and arrays may be numpy's or JAX's; what is read back
    is hashable: tuples and Python's numbers, `logit_bias` as pairs of token and bias.

    `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off; temperature 0 is greedy. `max_tokens` is cut
    to what `max_model_len` allows; None goes on to the end, as far as that and the pool allow.
    `stop` may be one string or several. `min_tokens` tokens are generated before a stop token, EOS
    or a stop string may end the sequence. `logprobs` asks for the log-probabilities of each sampled
    token and of that many most likely tokens; `prompt_logprobs` for the same of the prompt's
    tokens, all of which are then computed, whatever the prefix cache holds.

    `truncate_prompt_tokens` keeps so many tokens of the prompt, its last ones; -1: as many as leave
    room for `max_tokens` in `max_model_len`.

    `logit_bias` is added to the logits of tokens; `logits_processors` names functions that the
    engine has registered. Only `allowed_token_ids` are generated, where given:
    an end token has to be among them for the sequence to end by it. `bad_words` are not generated,
    neither at the beginning of a word nor after a space: a word is left out as the tokenizer spells
    it. `structured_outputs` has the text match a JSON schema, a regular expression or a grammar.
    All of these hold together; a request that they leave no token ends with an error.

    `best_of` sequences are sampled (None: `n`), and the `n` with the highest cumulative
    log-probability are returned, best first. `beam_width` searches for the likeliest continuations
    instead of sampling, as Hugging Face's `generate` does with `num_beams`: `n` of at most
    `beam_width` hypotheses are returned, ordered by their log-probability divided by length to the
    power of `length_penalty`. `early_stopping` True stops at `beam_width` finished hypotheses,
    False when no better one is likely, "never" when none is possible. Only requests with equal
    `cache_salt` share the prefix cache.
    """

    n: int = checked(integer, 1, low=1, high=MAX_N)
    best_of: int | None = checked(integer, None, low=1, high=MAX_N)
    beam_width: int | None = checked(integer, None, low=1, high=MAX_BEAM_WIDTH)
    length_penalty: float = checked(number, 1.0, low=-math.inf)
    early_stopping: bool | Literal["never"] = checked(_early_stopping, False)
    temperature: float = checked(number, 1.0, low=0.0)
    top_k: int = checked(integer, 0, low=-1)
    top_p: float = checked(number, 1.0, low=0.0, high=1.0, above_low=True)
    min_p: float = checked(number, 0.0, low=0.0, high=1.0)
    repetition_penalty: float = checked(number, 1.0, low=0.0, above_low=True)
    presence_penalty: float = checked(number, 0.0, low=-2.0, high=2.0)
    frequency_penalty: float = checked(number, 0.0, low=-2.0, high=2.0)
    seed: int | None = checked(integer, None, low=0)
    max_tokens: int | None = checked(integer, 16, low=1, optional=True)
    min_tokens: int = checked(integer, 0, low=0)
    stop: str | Sequence[str] = checked(strings, ())
    stop_token_ids: Sequence[int] = checked(token_ids, ())
    ignore_eos: bool = checked(flag, False)
    logprobs: int | None = checked(integer, None, low=0, high=MAX_LOGPROBS)
    prompt_logprobs: int | None = checked(integer, None, low=0, high=MAX_LOGPROBS)
    include_stop_str_in_output: bool = checked(flag, False)
    skip_special_tokens: bool = checked(flag, True)
    logit_bias: Mapping[int, float] | None = checked(_logit_bias, None)
    logits_processors: str | Sequence[str] = checked(strings, ())
    allowed_token_ids: Sequence[int] | None = checked(_allowed_tokens, None)
    bad_words: str | Sequence[str] = checked(strings, ())
    structured_outputs: StructuredOutputsParams | None = checked(_structured_outputs, None)
    truncate_prompt_tokens: int | None = checked(integer, None, low=-1)
    cache_salt: str | None = checked(string, None)

    @classmethod
    def of(cls, params: "SamplingParams | Mapping[str, Any] | None") -> "SamplingParams":
        """The parameters from themselves, from a dict of them, or the defaults for None."""
        return made_from(cls, {} if params is None else params, "params")

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}"
            )
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be -1 or at least 1, got 0")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of {self.best_of} is less than n {self.n}")
        self._check_beams()

    def _check_beams(self) -> None:
        if self.beam_width is None:
            for name, off in (("length_penalty", 1.0), ("early_stopping", False)):
                if (value := getattr(self, name)) != off:
                    raise ValueError(f"{name} {value!r} needs a beam_width")
            return
        given = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}
        if self.n > self.beam_width:
            raise ValueError(f"n {self.n} is greater than beam_width {self.beam_width}")
        unsupported = [name for name in _NOT_WITH_BEAMS if name in given]
        if self.temperature not in (0.0, 1.0):
            unsupported.append("temperature")
        for name in unsupported:
            raise ValueError(
                f"{name} {given[name]!r:.80} does not go with beam_width {self.beam_width}; "
                "beam search takes none"
            )

    @property
    def num_sequences(self) -> int:
        """The most sequences that run for the request at a time."""
        return self.beam_width or self.best_of or self.n

    @property
    def wants_candidates(self) -> bool:
        """Whether steps report log-probabilities: for the caller, or to rank sequences."""
        return (
            self.logprobs is not None
            or self.beam_width is not None
            or (self.best_of or self.n) > self.n
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that have come change how likely they are."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_history(self) -> bool:
        """Whether steps sample by the tokens so far."""
        return self.has_penalties or bool(self.logits_processors)

    @property
    def logit_biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of token and bias."""
        return self.logit_bias or ()  # type: ignore[return-value]  # normalised on construction

    @property
    def processor_names(self) -> tuple[str, ...]:
        """`logits_processors` as a tuple."""
        return self.logits_processors  # type: ignore[return-value]  # normalised on construction

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return self.stop  # type: ignore[return-value]  # normalised on construction
