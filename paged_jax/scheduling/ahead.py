"""Who decodes in the iteration after one that runs still, whose tokens nobody knows yet.

A plan says which sequences compute how many tokens in which slots, and that depends on the sampled
tokens in few cases only. A sequence goes on unless its token ends it: one that is about to reach
its greatest length is left out, and one that turns out to have ended by its token, by a stop string
or otherwise has computed one token too many, which is thrown away. What it wrote is in slots of its
own, and steps run in order, so that whoever gets the block next writes after it.

None means that the plan has to wait for the tokens:

- beams, which are replaced by what the tokens make of them;
- penalties and min_tokens, for which a step needs the tokens before;
- siblings that are about to start from a prompt, whose blocks are shared only then;
- memory that is out: whom to preempt, or how much of it, may depend on who ends;
- somebody swapped out, who comes back as soon as blocks have become free, with its token from the
  host.
"""

from bisect import insort

from paged_jax.memory.interface import MemoryManager
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.queues import order
from paged_jax.scheduling.request import Sequence, SequenceStatus


def decodes_after(batch: ScheduledBatch, memory: MemoryManager) -> list[Sequence] | None:
    """The decodes that follow ``batch``, in order, with a slot for each; None: it has to wait."""
    if any(chunk.forks or chunk.seq.is_beam for chunk in batch.prefills):
        return None
    running = SequenceStatus.RUNNING
    going_on = [seq for seq in batch.decodes if seq.status is running]
    for seq in batch.first_sampled():
        if seq.status is running:
            insort(going_on, seq, key=order)
    decodes: list[Sequence] = []
    append, block_size = memory.append, memory.block_size
    for seq in going_on:
        num_tokens = len(seq.token_ids) + 1
        if num_tokens >= seq.max_num_tokens:
            continue
        if seq.is_beam or seq.needs_history:
            return None
        if num_tokens > seq.num_writable_slots:
            if not append(seq.seq_id, num_tokens):
                return None
            seq.num_writable_slots = -(-num_tokens // block_size) * block_size
        decodes.append(seq)
    return decodes
