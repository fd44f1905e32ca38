"""Beams as sequences: what a step of the search does to them and to their blocks (section 4.4)."""

from paged_jax.memory.interface import MemoryManager
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus


def advance(request: Request, memory: MemoryManager) -> list[Sequence]:
    """Replace the request's beams by those of the next step; returns the old ones.

    All of them have candidates. A beam that goes on in several ways is forked, one that does not
    go on is freed at once. Nothing is changed when the search is done. ValueError, and nothing
    changes, for candidates that are no numbers.
    """
    search = request.beam_search
    assert search is not None
    old = request.sequences
    branches = search.advance([seq.candidates or () for seq in old])
    if search.is_done:
        return old
    beams: list[Sequence] = []
    going_on: set[int] = set()
    for parent, _ in branches:
        seq = old[parent]
        if parent in going_on:
            seq = seq.branch()
            memory.fork(old[parent].seq_id, seq.seq_id)
            old[parent].num_writable_slots = 0
        going_on.add(parent)
        beams.append(seq)
    for index, seq in enumerate(old):
        if index not in going_on:
            memory.free(seq.seq_id)
            seq.status = SequenceStatus.FINISHED
    for index, (beam, (_, token)) in enumerate(zip(beams, branches, strict=True)):
        beam.index = index
        beam.candidates = None
        beam.token_ids.append(token)
    request.sequences = beams
    return old
