"""What one iteration computes: the scheduler's decision as plain data."""

from dataclasses import dataclass, field

from paged_jax.scheduling.request import Sequence


@dataclass(slots=True, eq=False)
class PrefillChunk:
    """Compute `seq.token_ids[start : start + num_tokens]`; their slots are allocated."""

    seq: Sequence
    start: int
    num_tokens: int
    # Whether the chunk reaches the sequence's last token: only then a token is sampled.
    completes: bool = field(init=False)

    def __post_init__(self) -> None:
        self.completes = self.start + self.num_tokens == self.seq.num_tokens


@dataclass(slots=True, eq=False)
class ScheduledBatch:
    """One iteration.

    A decode computes `seq.token_ids[-1]` at position `seq.num_tokens - 1`, whose slot is
    allocated. The executor answers with one sampled token for each decode, in order, then one for
    each prefill chunk that completes, in order.
    """

    prefills: list[PrefillChunk]
    decodes: list[Sequence]
    preempted: list[Sequence]  # those that lost their blocks, youngest first

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefills)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.decodes) + self.num_prefill_tokens

    @property
    def num_samples(self) -> int:
        """Tokens that the executor answers with."""
        return len(self.decodes) + sum(chunk.completes for chunk in self.prefills)
