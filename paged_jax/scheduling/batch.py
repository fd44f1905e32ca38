"""What one iteration computes: the scheduler's decision as plain data, and what comes back."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from paged_jax.scheduling.request import Sequence


@dataclass(slots=True, eq=False)
class PrefillChunk:
    """Compute `seq.token_ids[start : start + num_tokens]`; their slots are allocated.

    `forks` are siblings that sample from the same last token, each with its own random stream, and
    share the sequence's blocks from then on.
    """

    seq: Sequence
    start: int
    num_tokens: int
    forks: list[Sequence] = field(default_factory=list)
    # Whether the chunk reaches the sequence's last token: only then is a token sampled.
    completes: bool = field(init=False)

    def __post_init__(self) -> None:
        self.completes = self.start + self.num_tokens == self.seq.num_tokens


@dataclass(slots=True, eq=False)
class ScheduledBatch:
    """One iteration.

    First of all blocks are swapped out to host memory, then others swapped in, then blocks are
    copied; the memory manager is told by `take_swaps` and `take_copies`. A decode computes
    `seq.token_ids[-1]` at position `seq.num_tokens - 1`, whose slot is allocated. The executor
    answers with a token for each of `sampled`, in order.
    """

    prefills: list[PrefillChunk]
    decodes: list[Sequence]
    preempted: list[Sequence]  # those that lost their blocks, in the order in which they did
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks: (source, target)
    swap_outs: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    resumed: list[Sequence] = field(default_factory=list)  # those swapped in

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
        firsts = sum(1 + len(chunk.forks) for chunk in self.prefills if chunk.completes)
        return len(self.decodes) + firsts

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token: decodes, then completing chunks with their forks."""
        return [*self.decodes, *self.first_sampled()] if self.prefills else self.decodes

    def first_sampled(self) -> Iterator[Sequence]:
        """Those whose token comes from a prefill."""
        for chunk in self.prefills:
            if chunk.completes:
                yield chunk.seq
                yield from chunk.forks
