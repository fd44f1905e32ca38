"""Iteration-level scheduling (ORCA), first come first served, with preemption by recompute.

Progress: everything admitted finishes. Sequences run in the order in which they were added: at any
time those that run are older than those that wait, because admission takes the oldest that waits
and preemption the youngest that runs. So the oldest unfinished sequence runs, or is admitted as
soon as nothing else does (no watermark applies then, and `add` has made sure that it fits alone).
It is preempted only if no younger one is left to preempt, that is if it cannot grow while alone,
which `add` has ruled out. The token budget is at least `max_num_seqs` and decodes take one token
each, so it always leaves one for a running sequence that is not fully prefilled. Hence each
iteration computes at least one token of the oldest sequence, and it ends.

The beams of a search count as one sequence in this: they stand side by side, are preempted
together, and go on when all of them have been computed. A sequence waits while a sibling is being
prefilled, to share what that computes; the sibling is older.
"""

import collections.abc
from collections import deque
from itertools import chain

from paged_jax.memory.interface import MemoryManager
from paged_jax.memory.usage import MemoryUsage
from paged_jax.scheduling import beams
from paged_jax.scheduling.batch import PrefillChunk, ScheduledBatch
from paged_jax.scheduling.fitting import check_fits, pin
from paged_jax.scheduling.forks import add_forks, start_forks
from paged_jax.scheduling.logprobs import TokenLogprobs
from paged_jax.scheduling.prefill_sizes import fit_to_sizes
from paged_jax.scheduling.request import FinishReason, Request, Sequence, SequenceStatus


class Scheduler:
    """Decides what each iteration computes: schedule -> execute -> update.

    max_num_seqs: sequences that run at a time.
    max_num_batched_tokens: tokens per iteration; decodes count first, then prefill chunks.
    max_model_len: longest sequence, prompt and output together.
    max_prefill_seqs: prefill chunks per iteration.
    eos_token_ids: tokens that end every sequence which does not set `ignore_eos`.
    watermark: fraction of the blocks that admission leaves free for running sequences to grow.
    prefill_sizes: tokens of a prefill step that the executor computes without padding, ascending;
        none: any number.
    enable_prefix_caching: whether requests share what they have in common; sequences of one
        request always do.
    """

    def __init__(
        self,
        memory: MemoryManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_prefill_seqs: int,
        eos_token_ids: collections.abc.Iterable[int],
        watermark: float = 0.01,
        prefill_sizes: collections.abc.Sequence[int] = (),
        enable_prefix_caching: bool = True,
    ):
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "max_prefill_seqs": max_prefill_seqs,
        }
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {max_num_batched_tokens} is less than max_num_seqs "
                f"{max_num_seqs}: a token for each running sequence must fit in an iteration"
            )
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must be at least 0 and below 1, got {watermark}")
        self.memory = memory
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_prefill_seqs = max_prefill_seqs
        self._prefill_sizes = tuple(prefill_sizes)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._enable_prefix_caching = enable_prefix_caching
        self._watermark_blocks = int(watermark * memory.num_total_blocks)

        self._requests: dict[str, Request] = {}  # those not finished
        # Each in the order of addition, and all of one older than all of the next.
        self._decoding: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()

        self.num_finished = 0  # sequences, for whatever reason
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0  # computed before a preemption and lost by it

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    def add(self, request: Request) -> None:
        """Queue a request; ValueError with the numbers if it can never fit."""
        if request.request_id in self._requests:
            raise ValueError(
                f"request {request.request_id!r} is running already; give each request an id of "
                "its own"
            )
        check_fits(
            request,
            self.memory,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
        )
        request.begin(self._eos_token_ids)
        self._requests[request.request_id] = request
        self._waiting += request.sequences

    def schedule(self) -> ScheduledBatch:
        """Plan an iteration and allocate its slots; not empty while there is work."""
        preempted = self._grow_decoding()
        decodes = [seq for seq in self._decoding if seq.candidates is None]
        prefills: list[PrefillChunk] = []
        budget = self.max_num_batched_tokens - len(decodes)
        # Those whose chunk the last iteration cut short, or left out; they kept to its limits.
        for seq in self._prefilling:
            if budget > 0:
                budget -= _add_chunk(prefills, seq, budget)
        # Who has just been preempted would be the first to come in, only to be thrown out again.
        if not preempted:
            self._admit(prefills, budget)
        if not decodes and not prefills:
            # Nothing older than what waits. Beams may hold blocks twice, computed side by side with
            # another request: they start again, and find one of each in the cache.
            if self._decoding:
                preempted += self._preempt(self._decoding[-1])
            self._admit(prefills, budget)
        fit_to_sizes(prefills, self._prefill_sizes)
        if prefills:
            add_forks(prefills, self.memory, self.max_num_seqs - self._num_taken_places)
        return ScheduledBatch(prefills, decodes, preempted, self.memory.pending_copies())

    def _grow_decoding(self) -> list[Sequence]:
        """Allocate a slot for each decode, oldest first; returns those preempted for it."""
        preempted: list[Sequence] = []
        append, block_size = self.memory.append, self.memory.block_size
        for seq in self._decoding:  # a preemption cuts this list at its end
            num_tokens = len(seq.token_ids)
            if num_tokens <= seq.num_writable_slots:
                continue
            while not append(seq.seq_id, num_tokens):
                preempted += self._preempt((self._prefilling or self._decoding)[-1])
                if seq.status is not SequenceStatus.RUNNING:
                    break
            else:
                seq.num_writable_slots = -(-num_tokens // block_size) * block_size
        return preempted

    def _preempt(self, victim: Sequence) -> list[Sequence]:
        """Take its blocks from the youngest sequence; if it is a beam, from all of its search."""
        request = victim.request
        group = [victim] if request.beam_search is None else request.sequences
        preempted = [seq for seq in reversed(group) if seq.status is SequenceStatus.RUNNING]
        for seq in preempted:
            self.memory.free(seq.seq_id)
            (self._decoding if seq in self._decoding else self._prefilling).remove(seq)
            self.num_preemptions += 1
            self.num_recomputed_tokens += seq.num_computed_tokens
            request.num_preemptions += 1
            seq.num_computed_tokens = seq.num_writable_slots = 0
            seq.candidates = None
            seq.status = SequenceStatus.WAITING
            self._waiting.appendleft(seq)  # older than all that wait
        return preempted

    def _admit(self, prefills: list[PrefillChunk], budget: int) -> None:
        waiting, prefilling = self._waiting, self._prefilling
        num_taken = self._num_taken_places
        while waiting and budget > 0 and len(prefills) < self.max_prefill_seqs:
            seq = waiting[0]
            request = seq.request
            if num_taken + seq.num_places > self.max_num_seqs:
                return
            if prefilling and prefilling[-1].request is request:
                return
            num_cached = self.memory.allocate(
                seq.seq_id,
                seq.token_ids,
                salt=self._salt(request),
                max_num_tokens=seq.max_num_slots,
                keep_free_blocks=0 if self._is_alone(request) else self._watermark_blocks,
                use_cache=not request.lacks_prompt_logprobs,
            )
            if num_cached is None:
                return
            waiting.popleft()
            seq.status = SequenceStatus.RUNNING
            seq.num_computed_tokens = num_cached
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_cached
            prefilling.append(seq)
            num_taken += seq.num_places
            budget -= _add_chunk(prefills, seq, budget)

    def _is_alone(self, request: Request) -> bool:
        """Whether nothing of another request runs; what runs is older than what waits."""
        oldest = next(chain(self._decoding, self._prefilling), None)
        return oldest is None or oldest.request is request

    @property
    def _num_taken_places(self) -> int:
        """Sequences that run, and beams that will when their prompt is computed."""
        return len(self._decoding) + sum(seq.num_places for seq in self._prefilling)

    def _salt(self, request: Request) -> collections.abc.Hashable:
        """Sequences of equal salts find each other's blocks."""
        return request.params.cache_salt if self._enable_prefix_caching else (request.request_id,)

    def update(
        self,
        batch: ScheduledBatch,
        sampled: collections.abc.Sequence[int],
        logprobs: collections.abc.Sequence[TokenLogprobs | None] = (),
        prompt_logprobs: collections.abc.Sequence[collections.abc.Sequence[TokenLogprobs]] = (),
    ) -> list[Sequence]:
        """Take in an iteration's results; returns the sequences that it finished.

        `sampled`: a token for each of the batch's `sampled`; `logprobs` likewise, at least of
        those whose `wants_candidates` is set; `prompt_logprobs`: for each prefill, those that its
        request still lacked. What was finished or aborted since the batch was scheduled is passed
        over.
        """
        decodes = batch.decodes
        if len(sampled) != batch.num_samples:
            raise ValueError(f"{len(sampled)} tokens for {batch.num_samples} samples")
        running = SequenceStatus.RUNNING
        block_size, publish = self.memory.block_size, self.memory.publish
        ended: list[Sequence] = []
        for seq, token in zip(decodes, sampled, strict=False):
            if seq.status is running:
                token_ids = seq.token_ids
                seq.num_computed_tokens = num_tokens = len(token_ids)
                if not num_tokens % block_size:
                    publish(seq.seq_id, token_ids, num_tokens)
                if seq.is_beam:
                    continue
                token_ids.append(token)
                if num_tokens + 1 >= seq.max_num_tokens or token in seq.end_token_ids:
                    ended.append(seq)
        if batch.prefills:
            self._update_prefills(batch, sampled[len(decodes) :], ended)
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
        finished = [seq for seq in ended if self._end(seq)]
        for request in searching.values():
            finished += self._advance_beams(request)
        return finished

    def _update_prefills(
        self,
        batch: ScheduledBatch,
        sampled: collections.abc.Sequence[int],
        ended: list[Sequence],
    ) -> None:
        first_tokens = iter(sampled)
        for chunk in batch.prefills:
            seq = chunk.seq
            tokens = [next(first_tokens) for _ in (seq, *chunk.forks)] if chunk.completes else []
            if seq.status is not SequenceStatus.RUNNING:
                continue
            seq.num_computed_tokens += chunk.num_tokens
            self.memory.publish(seq.seq_id, seq.token_ids, seq.num_computed_tokens)
            if not chunk.completes:
                continue
            self._prefilling.remove(seq)
            started = [seq, *start_forks(chunk, self.memory, self._waiting)]
            self._decoding += started
            if seq.request.beam_search is not None:
                continue
            for started_seq, token in zip((seq, *chunk.forks), tokens, strict=True):
                if started_seq in started:
                    started_seq.token_ids.append(token)
                    ended.append(started_seq)

    def _advance_beams(self, request: Request) -> list[Sequence]:
        """Take a step of the search if all its beams have candidates; returns those that end."""
        if any(seq.candidates is None for seq in request.sequences):
            return []
        search = request.beam_search
        assert search is not None
        try:
            old = beams.advance(request, self.memory)
        except ValueError:
            reason: FinishReason = "error"
        else:
            if not search.is_done:
                at = self._decoding.index(old[0])
                self._decoding[at : at + len(old)] = request.sequences
                return []
            reason = "stop"
        ending = request.sequences
        for seq in ending:
            self.finish(seq, reason)
        return ending

    def _end(self, seq: Sequence) -> bool:
        """Finish the sequence if its newest token ends it."""
        token = seq.token_ids[-1]
        num_tokens = len(seq.token_ids)
        if token in seq.end_token_ids and num_tokens >= seq.min_num_tokens:
            params = seq.request.params
            is_eos = token in self._eos_token_ids and not params.ignore_eos
            self.finish(seq, "stop", None if is_eos else token)
        elif num_tokens >= seq.max_num_tokens:
            self.finish(seq, "length")
        return seq.is_finished

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a sequence in any state and free its blocks; nothing happens if it has ended."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        else:
            self.memory.free(seq.seq_id)
            (self._decoding if seq in self._decoding else self._prefilling).remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        self.num_finished += 1
        if seq.request.is_finished:
            del self._requests[seq.request.request_id]

    def abort(self, request_id: str) -> list[Sequence]:
        """End what is left of a request; returns those sequences, none if it has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        aborted = [seq for seq in request.sequences if not seq.is_finished]
        for seq in aborted:
            self.finish(seq, "abort")
        return aborted

    def pin(self, token_ids: collections.abc.Sequence[int], salt: str | None) -> int:
        """Keep a prefix's blocks in the cache; returns how many of its tokens they hold.

        ValueError, and nothing changes, if a request that waits or runs could not finish with
        what is left.
        """
        return pin(self.memory, self._requests.values(), token_ids, salt)

    def memory_usage(self) -> MemoryUsage:
        """Where the KV slots are now."""
        running = (*self._decoding, *self._prefilling)
        return self.memory.usage({seq.seq_id: seq.num_computed_tokens for seq in running})


def _add_chunk(prefills: list[PrefillChunk], seq: Sequence, budget: int) -> int:
    """Schedule as much of the sequence's prefill as the budget allows; returns its tokens."""
    start = seq.num_computed_tokens
    num_tokens = min(budget, len(seq.token_ids) - start)
    prefills.append(PrefillChunk(seq, start, num_tokens))
    return num_tokens
