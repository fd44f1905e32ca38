"""Siblings: sequences of one request that start from the prompt which one of them computes."""

from paged_jax.memory.interface import MemoryManager
from paged_jax.scheduling.batch import PrefillChunk
from paged_jax.scheduling.queues import Queues
from paged_jax.scheduling.request import Sequence, SequenceStatus


def add_forks(prefills: list[PrefillChunk], memory: MemoryManager, num_places: int) -> None:
    """Let siblings start with a prompt that is completed, each with a block to diverge in.

    At most `num_places` of them; those for which there is no room wait, and find its blocks in the
    cache if there is one.
    """
    num_forks = 0
    for chunk in prefills:
        sequences = chunk.seq.request.sequences
        if len(sequences) > 1 and chunk.completes and chunk.seq.is_fresh:
            waiting = SequenceStatus.WAITING
            siblings = [seq for seq in sequences if seq.status is waiting and seq.is_fresh]
            memory_room = memory.num_forks_left(chunk.seq.seq_id, num_forks)
            chunk.forks = siblings[: min(num_places - num_forks, memory_room)]
            num_forks += len(chunk.forks)


def num_branches(seq: Sequence) -> int:
    """How many sequences a waiting one will be once its prompt is computed, if all have places."""
    if seq.is_beam or not seq.is_fresh:
        return seq.num_places
    waiting = SequenceStatus.WAITING
    return sum(other.status is waiting and other.is_fresh for other in seq.request.sequences)


def start_forks(chunk: PrefillChunk, memory: MemoryManager, queues: Queues) -> list[Sequence]:
    """Share the computed prompt with those of the chunk's forks that wait still; returns them."""
    seq = chunk.seq
    started = [fork for fork in chunk.forks if fork.status is SequenceStatus.WAITING]
    for fork in started:
        memory.fork(seq.seq_id, fork.seq_id)
        queues.move(fork, SequenceStatus.RUNNING)
        fork.num_computed_tokens = seq.num_computed_tokens
    return started
