"""A request and the sequences it asks for."""

import enum
import itertools
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field

from paged_jax.constraints.interface import TokenConstraint
from paged_jax.outputs import FinishReason, TokenLogprobs
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.beam_search import BeamSearch

# What a policy ranks requests by.
PolicyKey = float | tuple[float, ...]

_seq_ids = itertools.count()


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()  # holds no memory; new, or preempted by recompute
    RUNNING = enum.auto()  # holds a block table
    SWAPPED = enum.auto()  # preempted; its blocks are in host memory
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One of a request's `n` continuations: its tokens and how far they are computed.

    The last token of a running sequence has just been sampled: its keys and values are computed
    when it is fed back to yield the next one. The very last token is never fed back, so a sequence
    that ends with L tokens takes L - 1 slots.
    """

    request: "Request"
    index: int  # which of the request's sequences
    seq_id: int = field(init=False, default_factory=lambda: next(_seq_ids))  # unique in the process
    status: SequenceStatus = field(init=False, default=SequenceStatus.WAITING)
    # Whether it has, or had when it was swapped out, more than its newest token to compute.
    is_prefilling: bool = field(init=False, default=False)
    token_ids: list[int] = field(init=False)  # the prompt's tokens, then the generated ones
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)  # with keys and values in the cache
    num_writable_slots: int = field(init=False, default=0)  # leading slots known to be its own
    min_num_tokens: int = field(init=False)  # length below which no token ends it
    max_num_tokens: int = field(init=False)  # length at which it ends, prompt included
    end_token_ids: frozenset[int] = field(init=False)  # tokens that end it; the scheduler adds EOS
    sampling_seed: int = field(init=False)  # uint32: its own random stream
    needs_history: bool = field(init=False)  # whether its sampling depends on its tokens so far
    is_beam: bool = field(init=False)
    # Leaves out next tokens; the host has to know the sequence's tokens to ask it.
    constraint: TokenConstraint | None = field(init=False)
    # (token, log-probability) of the likeliest next tokens, while a beam waits for other beams.
    candidates: tuple[tuple[int, float], ...] | None = field(init=False, default=None)
    cumulative_logprob: float = field(init=False, default=0.0)  # where steps report logprobs
    finish_reason: FinishReason | None = field(init=False, default=None)
    stop_reason: int | str | None = field(init=False, default=None)  # token or string; None: EOS

    def __post_init__(self) -> None:
        request, params = self.request, self.request.params
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.max_num_tokens = self.num_prompt_tokens + request.max_tokens
        self.end_token_ids = frozenset(params.stop_token_ids)
        # An odd multiplier keeps the streams of a request apart; the golden ratio keeps apart the
        # streams of neighbouring seeds.
        self.sampling_seed = (request.seed + self.index * 0x9E3779B9) % 2**32
        self.needs_history = params.needs_history
        self.is_beam = params.beam_width is not None
        self.constraint = request.constraint and request.constraint.branch()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has been generated."""
        return len(self.token_ids) == self.num_prompt_tokens

    @property
    def num_places(self) -> int:
        """How many sequences it will be: a search starts as one beam."""
        return (self.is_fresh and self.request.params.beam_width) or 1

    @property
    def max_num_slots(self) -> int:
        """The most KV slots it can come to need."""
        return self.max_num_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def end_with(self, token: int) -> tuple[FinishReason, int | None] | None:
        """(finish reason, stop reason) if `token`, as its next one, ends the sequence; else None.

        The stop reason is the stop token, or None for EOS and for the greatest length.
        """
        num_tokens = len(self.token_ids) + 1
        if token in self.end_token_ids and num_tokens >= self.min_num_tokens:
            return "stop", None if token in self.request.eos_token_ids else token
        return ("length", None) if num_tokens >= self.max_num_tokens else None

    def branch(self) -> "Sequence":
        """A sequence of the same request that goes on from the same tokens."""
        other = Sequence(self.request, self.index)
        other.token_ids = self.token_ids.copy()
        other.num_computed_tokens = self.num_computed_tokens
        other.end_token_ids = self.end_token_ids
        other.status = self.status
        other.constraint = self.constraint and self.constraint.branch()
        return other

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id} of {self.request.request_id!r}, {self.status.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed)"
        )


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, how to continue it, and the sequences that continue it; an empty one: ValueError.

    A sample has `params.num_sequences` sequences from the start. The sequences of a search are its
    live beams: one until the prompt is computed, then `beam_width`.

    seed: `params.seed`, or a seed that the engine chose.
    arrival_time: seconds on the engine's monotonic clock.
    priority: lower goes first, where the policy looks at it.
    deadline_s: when the request is ended if it has not finished; seconds on the same clock.
    constraint: of which each of its sequences gets a branch.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    params: SamplingParams
    arrival_time: float
    seed: int
    priority: int = 0
    deadline_s: float | None = None
    constraint: TokenConstraint | None = field(repr=False, default=None)
    # Tokens that each of its sequences may generate; once it is added, no more than fit.
    max_tokens: int = field(init=False)
    sequences: list[Sequence] = field(init=False, repr=False)
    beam_search: BeamSearch | None = field(init=False, default=None, repr=False)
    # EOS tokens that end its sequences, beside `params.stop_token_ids`; the scheduler sets them.
    eos_token_ids: frozenset[int] = field(init=False, repr=False, default=frozenset())
    # Leading prompt tokens found in the cache when it was first admitted; None before.
    num_cached_tokens: int | None = field(init=False, default=None)
    # Its place in the order of service, lower first; preemption begins at the end of that order.
    # Fixed when the request is added.
    rank: tuple[tuple[float, ...], int] = field(init=False, repr=False, default=((), 0))
    # Only requests of equal salts find each other's blocks in the prefix cache.
    salt: Hashable = field(init=False, repr=False, default=None)
    num_preemptions: int = field(init=False, default=0)  # its sequences together count as one
    error: str | None = field(init=False, default=None)  # why it failed
    # For the prompt's tokens from the second on, as far as they are computed, where asked for.
    prompt_logprobs: list[TokenLogprobs] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.request_id!r}: the prompt is empty")
        asked = self.params.max_tokens
        self.max_tokens = sys.maxsize if asked is None else asked
        count = 1 if self.params.beam_width else self.params.num_sequences
        self.sequences = [Sequence(self, index) for index in range(count)]

    def begin(self, eos_token_ids: frozenset[int], max_tokens: int) -> None:
        """Set what ends its sequences, and start its search if it has beams."""
        params = self.params
        self.max_tokens = max_tokens
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        ending = self.eos_token_ids | frozenset(params.stop_token_ids)
        for seq in self.sequences:
            seq.end_token_ids = ending
            seq.max_num_tokens = seq.num_prompt_tokens + max_tokens
        if params.beam_width:
            self.beam_search = BeamSearch(
                params.beam_width,
                params.length_penalty,
                params.early_stopping,
                ending,
                len(self.prompt_token_ids),
                self.sequences[0].max_num_tokens,
            )

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether its prompt has to be computed, cached or not, for its log-probabilities."""
        wants = self.params.prompt_logprobs is not None
        return wants and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

    @property
    def is_finished(self) -> bool:
        # They start in order: of many, the last is likely to be unfinished.
        return all(seq.is_finished for seq in reversed(self.sequences))
