"""What an iteration's results do: tokens are appended, full blocks published, sequences ended."""

import collections.abc

from paged_jax.memory.interface import MemoryManager
from paged_jax.outputs import FinishReason, TokenLogprobs
from paged_jax.scheduling.batch import ScheduledBatch, start_forks
from paged_jax.scheduling.queues import Queues, Unfinished
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


type Stops = collections.abc.Mapping[int, str]  # sequence id -> stop string that its text has met
type End = tuple[FinishReason, int | str | None]  # finish reason, stop reason


class Results:
    """Takes results in, for the scheduler."""

    def __init__(self, memory: MemoryManager, queues: Queues, unfinished: Unfinished):
        self._memory = memory
        self._queues = queues
        self._unfinished = unfinished

    def take(
        self,
        batch: ScheduledBatch,
        sampled: collections.abc.Sequence[int],
        logprobs: collections.abc.Sequence[TokenLogprobs | None],
        prompt_logprobs: collections.abc.Sequence[collections.abc.Sequence[TokenLogprobs]],
        stops: Stops,
    ) -> list[Sequence]:
        """See `Scheduler.update`."""
        decodes = batch.decodes
        if len(sampled) != batch.num_samples:
            raise ValueError(f"{len(sampled)} tokens for {batch.num_samples} samples")
        running = SequenceStatus.RUNNING
        block_size, publish = self._memory.block_size, self._memory.publish
        ending: list[tuple[Sequence, End]] = []
        for seq, token in zip(decodes, sampled, strict=False):
            if seq.status is running:
                token_ids = seq.token_ids
                seq.num_computed_tokens = num_tokens = len(token_ids)
                if not num_tokens % block_size:
                    publish(seq.seq_id, token_ids, num_tokens)
                if seq.is_beam:
                    continue
                if (
                    num_tokens + 1 >= seq.max_num_tokens
                    or token in seq.end_token_ids
                    or seq.seq_id in stops
                ) and (end := _end(seq, token, stops)):
                    ending.append((seq, end))
                token_ids.append(token)
        if batch.prefills:
            ending += self._take_prefills(batch, sampled[len(decodes) :], stops)
            for chunk, scores in zip(batch.prefills, prompt_logprobs, strict=False):
                chunk.seq.request.prompt_logprobs += scores
        searching: dict[str, Request] = {}
        if logprobs.count(None) < len(logprobs):
            for seq, row in zip(batch.sampled, logprobs, strict=False):
                if row is not None and seq.status is running:
                    seq.cumulative_logprob += row.sampled
                    if seq.is_beam:
                        seq.candidates = row.top
                        searching[seq.request.request_id] = seq.request
        for seq, end in ending:
            self._unfinished.finish(seq, *end)
        finished = [seq for seq, _ in ending]
        for request in searching.values():
            finished += self._advance_beams(request)
        return finished

    def _take_prefills(
        self,
        batch: ScheduledBatch,
        sampled: collections.abc.Sequence[int],
        stops: Stops,
    ) -> list[tuple[Sequence, End]]:
        ending: list[tuple[Sequence, End]] = []
        first_tokens = iter(sampled)
        for chunk in batch.prefills:
            seq = chunk.seq
            tokens = [next(first_tokens) for _ in (seq, *chunk.forks)] if chunk.completes else []
            if seq.status is not SequenceStatus.RUNNING:
                continue
            seq.num_computed_tokens += chunk.num_tokens
            self._memory.publish(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
            if not chunk.completes:
                continue
            self._queues.move(seq, SequenceStatus.RUNNING)
            started = [seq, *start_forks(chunk, self._memory, self._queues)]
            if seq.request.beam_search is not None:
                continue
            for started_seq, token in zip((seq, *chunk.forks), tokens, strict=True):
                if started_seq in started:
                    if end := _end(started_seq, token, stops):
                        ending.append((started_seq, end))
                    started_seq.token_ids.append(token)
        return ending

    def _advance_beams(self, request: Request) -> list[Sequence]:
        """Take a step of the search if all its beams have candidates; returns those that end."""
        if any(seq.candidates is None for seq in request.sequences):
            return []
        search = request.beam_search
        assert search is not None
        try:
            old = advance(request, self._memory)
        except ValueError as error:
            return self._unfinished.fail(request.request_id, f"beam search: {error}")
        if not search.is_done:
            decoding = self._queues.decoding
            at = decoding.index(old[0])
            decoding[at : at + len(old)] = request.sequences
            return []
        return self._unfinished.end(request.request_id, "stop")


def _end(seq: Sequence, token: int, stops: Stops) -> End | None:
    """How `token`, as its next one, ends the sequence; None if it goes on."""
    stop = stops.get(seq.seq_id)
    return seq.end_with(token) if stop is None else ("stop", stop)
