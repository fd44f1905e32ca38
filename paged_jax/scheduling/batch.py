"""The scheduler's decision as plain data: what one iteration computes, and what comes back."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from paged_jax.memory.interface import MemoryManager
from paged_jax.scheduling.queues import Queues
from paged_jax.scheduling.request import Sequence, SequenceStatus


@dataclass(slots=True, eq=False)
class PrefillChunk:
    """Compute `seq.token_ids[start : start + num_tokens]`, whose slots are allocated.

    `forks` are siblings that sample from the same last token, each with its own random stream, and
    share the sequence's blocks from then on. `completes` tells whether the chunk reaches the
    sequence's last token: only then is a token sampled.
    """

    seq: Sequence
    start: int
    num_tokens: int
    forks: list[Sequence] = field(default_factory=list)
    completes: bool = field(init=False)

    def __post_init__(self) -> None:
        self.completes = self.start + self.num_tokens == self.seq.num_tokens


@dataclass(slots=True, eq=False)
class ScheduledBatch:
    """One iteration: blocks move first, then the model computes.

    The executor swaps blocks out, then swaps others in, then copies blocks; `take_swaps` and
    `take_copies` tell the memory manager. A decode computes `seq.token_ids[-1]` at position
    `seq.num_tokens - 1`, whose slot is allocated. The executor answers with a token for each of
    `sampled`, in order.
    """

    prefills: list[PrefillChunk]
    decodes: list[Sequence]
    preempted: list[Sequence]  # sequences that lost their blocks, in the order in which they did
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source block, target block)
    swap_outs: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    resumed: list[Sequence] = field(default_factory=list)  # sequences that were swapped in

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
        """The sequences whose token comes from a prefill."""
        for chunk in self.prefills:
            if chunk.completes:
                yield chunk.seq
                yield from chunk.forks


def add_forks(prefills: list[PrefillChunk], memory: MemoryManager, num_places: int) -> None:
    """Let siblings start with a prompt that is completed, each with a block to diverge in.

    At most `num_places` siblings start. A sibling without room waits, and finds the prompt's blocks
    in the prefix cache if there is one.
    """
    num_forks = 0
    for chunk in prefills:
        if chunk.completes and chunk.seq.is_fresh and len(chunk.seq.request.sequences) > 1:
            memory_room = memory.num_forks_left(chunk.seq.seq_id, num_forks)
            room = min(num_places - num_forks, memory_room)
            chunk.forks = list(islice(_fresh_waiting(chunk.seq), room))
            num_forks += len(chunk.forks)


def num_branches(seq: Sequence, num_places: int) -> int:
    """How many sequences a waiting one will be in `num_places` once its prompt is computed."""
    if seq.is_beam or not seq.is_fresh:
        return min(seq.num_places, num_places)
    return sum(1 for _ in islice(_fresh_waiting(seq), num_places))


def _fresh_waiting(seq: Sequence) -> Iterator[Sequence]:
    """The sequences of its request, from itself on, that wait and have generated nothing.

    Those before it have started, as they come first. There may be thousands of either.
    """
    for each in islice(seq.request.sequences, seq.index, None):
        if each.status is SequenceStatus.WAITING and each.is_fresh:
            yield each


def start_forks(chunk: PrefillChunk, memory: MemoryManager, queues: Queues) -> list[Sequence]:
    """Share the computed prompt with the chunk's forks that still wait; returns them."""
    seq = chunk.seq
    started = [fork for fork in chunk.forks if fork.status is SequenceStatus.WAITING]
    for fork in started:
        memory.fork(seq.seq_id, fork.seq_id)
        queues.move(fork, SequenceStatus.RUNNING)
        fork.num_computed_tokens = seq.num_computed_tokens
    return started
