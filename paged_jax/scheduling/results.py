"""What an iteration's results do to its sequences, step by step for `Scheduler.update`."""

import collections.abc

from paged_jax.memory.interface import MemoryManager
from paged_jax.outputs import FinishReason, TokenLogprobs
from paged_jax.scheduling.batch import PrefillChunk, ScheduledBatch, start_forks
from paged_jax.scheduling.queues import Queues
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus

type Endings = dict[Sequence, tuple[FinishReason, int | str | None]]  # finish and stop reason


def take_decodes(
    decodes: list[Sequence], sampled: collections.abc.Sequence[int], memory: MemoryManager
) -> Endings:
    """Append each decode's token, and commit the block that it has filled.

    `sampled` has a token for each decode, and then others. Returns the sequences that end by their
    token. Beams get theirs by `advance_beams`.
    """
    endings: Endings = {}
    running = SequenceStatus.RUNNING
    block_size, commit_full_blocks = memory.block_size, memory.commit_full_blocks
    for seq, token in zip(decodes, sampled, strict=False):
        if seq.status is running:
            token_ids = seq.token_ids
            seq.num_computed_tokens = num_tokens = len(token_ids)
            if not num_tokens % block_size:
                commit_full_blocks(seq.seq_id, token_ids, num_tokens)
            if seq.is_beam:
                continue
            if (num_tokens + 1 >= seq.max_num_tokens or token in seq.end_token_ids) and (
                end := seq.end_with(token)
            ):
                endings[seq] = end
            token_ids.append(token)
    return endings


def take_prefills(
    chunks: list[PrefillChunk],
    sampled: collections.abc.Sequence[int],
    memory: MemoryManager,
    queues: Queues,
) -> Endings:
    """Commit what each chunk has computed; a completed prompt decodes from now on.

    Its forks, as far as they still wait, share its blocks. `sampled` has a token for each completed
    prompt and for each of its forks. Returns the sequences that end by their first token.
    """
    endings: Endings = {}
    tokens = iter(sampled)
    for chunk in chunks:
        seq = chunk.seq
        branches = [seq, *chunk.forks] if chunk.completes else []
        first_tokens = [next(tokens) for _ in branches]
        if seq.status is not SequenceStatus.RUNNING:
            continue
        seq.num_computed_tokens += chunk.num_tokens
        memory.commit_full_blocks(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
        if not chunk.completes:
            continue
        queues.move(seq, SequenceStatus.RUNNING)
        started = [seq, *start_forks(chunk, memory, queues)]
        if seq.is_beam:
            continue
        for branch, token in zip(branches, first_tokens, strict=True):
            if branch in started:
                if end := branch.end_with(token):
                    endings[branch] = end
                branch.token_ids.append(token)
    return endings


def take_stops(batch: ScheduledBatch, stops: collections.abc.Mapping[int, str]) -> Endings:
    """The sequences that a stop string ends."""
    running = SequenceStatus.RUNNING
    return {
        seq: ("stop", stops[seq.seq_id])
        for seq in batch.sampled
        if seq.seq_id in stops and seq.status is running
    }


def take_logprobs(
    batch: ScheduledBatch, logprobs: collections.abc.Sequence[TokenLogprobs | None]
) -> list[Request]:
    """Add up log-probabilities, and note the candidates of beams; returns the searches."""
    searches: dict[str, Request] = {}
    if logprobs.count(None) < len(logprobs):
        for seq, row in zip(batch.sampled, logprobs, strict=False):
            if row is not None and seq.status is SequenceStatus.RUNNING:
                seq.cumulative_logprob += row.sampled
                if seq.is_beam:
                    seq.candidates = row.top
                    searches[seq.request.request_id] = seq.request
    return list(searches.values())


def advance_beams(request: Request, memory: MemoryManager) -> list[Sequence]:
    """Replace the request's beams by the beams of the next step; returns the old ones.

    All of them have candidates. A beam that goes on in several ways is forked, and one that does
    not go on is freed at once. Nothing changes where the search is done by this step. ValueError,
    and nothing changes, for candidates that are no numbers.
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
