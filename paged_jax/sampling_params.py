"""Sampling parameters of a request; names and meanings follow vLLM's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

MAX_LOGPROBS = 20
MAX_N = 16384  # a request makes n sequences at once
# A step reports at most MAX_LOGPROBS candidates of a beam; width + end tokens are needed.
MAX_BEAM_WIDTH = MAX_LOGPROBS - 1


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What a text must match: one of these."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # in Lark's syntax, as llguidance reads it
    json_object: bool = False  # any JSON object


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked on construction: ValueError names the parameter and the value it had.

    `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off; temperature 0 is greedy. `stop` may be one
    string or several. `min_tokens` tokens are generated before a stop token, EOS or a stop string
    may end the sequence. `logprobs` asks for the log-probabilities of each sampled token and of
    that many most likely tokens; `prompt_logprobs` for the same of the prompt's tokens, all of
    which are then computed, whatever the prefix cache holds.

    `best_of` sequences are sampled (None: `n`), and the `n` with the highest cumulative
    log-probability are returned, best first. `beam_width` searches for the likeliest continuations
    instead of sampling, as Hugging Face's `generate` does with `num_beams`: `n` of at most
    `beam_width` hypotheses are returned, ordered by their log-probability divided by length to the
    power of `length_penalty`. `early_stopping` True stops at `beam_width` finished hypotheses,
    False when no better one is likely, "never" when none is possible. Only requests with equal
    `cache_salt` share the prefix cache.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    logits_processors: str | Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] = ()
    structured_outputs: StructuredOutputsParams | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        self._int("n", low=1, high=MAX_N)
        self._float("temperature", low=0.0)
        self._int("top_k", low=-1)
        self._set("top_k", max(self.top_k, 0))
        self._float("top_p", low=0.0, high=1.0, above_low=True)
        self._float("min_p", low=0.0, high=1.0)
        self._float("repetition_penalty", low=0.0, above_low=True)
        self._float("presence_penalty", low=-2.0, high=2.0)
        self._float("frequency_penalty", low=-2.0, high=2.0)
        if self.seed is not None:
            self._int("seed", low=0)
        self._int("max_tokens", low=1)
        self._int("min_tokens", low=0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}"
            )
        self._set("stop", _strings("stop", self.stop))
        self._set("logits_processors", _strings("logits_processors", self.logits_processors))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._int(name, low=0, high=MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise ValueError(f"cache_salt must be a string or None, got {self.cache_salt!r}")
        if self.best_of is not None:
            self._int("best_of", low=1, high=MAX_N)
            if self.best_of < self.n:
                raise ValueError(f"best_of {self.best_of} is less than n {self.n}")
        self._check_beams()

    def _check_beams(self) -> None:
        self._float("length_penalty", low=-math.inf)
        # 1 equals True, but the search looks for True itself.
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(
                f'early_stopping must be True, False or "never", got {self.early_stopping!r}'
            )
        if self.beam_width is None:
            for name, off in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != off:
                    raise ValueError(f"{name} {getattr(self, name)!r} needs a beam_width")
            return
        self._int("beam_width", low=1, high=MAX_BEAM_WIDTH)
        if self.n > self.beam_width:
            raise ValueError(f"n {self.n} is greater than beam_width {self.beam_width}")
        # Parameters that would change the scores of beams, or end a beam by its text.
        unsupported = {
            "best_of": self.best_of is not None,
            "temperature": self.temperature not in (0.0, 1.0),
            "top_k": self.top_k > 0,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "presence_penalty": self.presence_penalty != 0,
            "frequency_penalty": self.frequency_penalty != 0,
            "min_tokens": self.min_tokens > 0,
            "stop": bool(self.stop),
            "logprobs": self.logprobs is not None,
        }
        for name, given in unsupported.items():
            if given:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} does not go with beam_width "
                    f"{self.beam_width}; beam search takes none"
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
        return tuple((self.logit_bias or {}).items())

    @property
    def processor_names(self) -> tuple[str, ...]:
        """`logits_processors` as a tuple."""
        return self.logits_processors  # type: ignore[return-value]  # normalised on construction

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return self.stop  # type: ignore[return-value]  # normalised on construction

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _int(self, name: str, *, low: int, high: float = math.inf) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{name} must be an integer, got {value!r}")
        number = int(value)
        if not low <= number <= high:
            bound = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"{name} must be {bound}, got {value!r}")
        self._set(name, number)

    def _float(
        self, name: str, *, low: float, high: float = math.inf, above_low: bool = False
    ) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"{name} must be a number, got {value!r}")
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{name} must be finite, got {value!r}")
        if not low <= number <= high or (above_low and number == low):
            bound = f"above {low}" if above_low else f"at least {low}"
            if high != math.inf:
                bound += f" and at most {high}"
            raise ValueError(f"{name} must be {bound}, got {value!r}")
        self._set(name, number)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence):
        raise ValueError(f"{name} must be a string or a sequence of strings, got {value!r}")
    for string in strings:
        if not isinstance(string, str):
            raise ValueError(f"{name} must hold strings, got {string!r}")
        if not string:
            raise ValueError(f"{name} must not hold an empty string, got {value!r}")
    return tuple(strings)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a sequence of token ids, got {value!r}")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, Integral) or int(token) < 0:
            raise ValueError(f"{name} must hold token ids of at least 0, got {token!r}")
    return tuple(int(token) for token in value)
