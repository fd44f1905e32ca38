"""Iteration-level scheduling (ORCA), first come first served, with preemption by recompute.

Progress: everything admitted finishes. Sequences run in the order in which they were added: at any
time those that run are older than those that wait, because admission takes the oldest that waits
and preemption the youngest that runs. So the oldest unfinished sequence runs, or is admitted as
soon as nothing else does (no watermark applies then, and `add` has made sure that it fits alone).
It is preempted only if no younger one is left to preempt, that is if it cannot grow while alone,
which `add` has ruled out. The token budget is at least `max_num_seqs` and decodes take one token
each, so it always leaves one for a running sequence that is not fully prefilled. Hence each
iteration computes at least one token of the oldest sequence, and it ends.
"""

import collections.abc
from bisect import bisect_left
from collections import deque

from paged_jax.memory.interface import MemoryManager
from paged_jax.memory.usage import MemoryUsage
from paged_jax.scheduling.batch import PrefillChunk, ScheduledBatch
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
        name = f"request {request.request_id!r}"
        if request.request_id in self._requests:
            raise ValueError(f"{name} is running already; give each request an id of its own")
        self._check_fits(name, request)
        self._requests[request.request_id] = request
        ending = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            ending |= self._eos_token_ids
        for seq in request.sequences:
            seq.end_token_ids = ending
            self._waiting.append(seq)

    def _check_fits(self, name: str, request: Request) -> None:
        num_prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
        if num_prompt >= self.max_model_len:
            raise ValueError(
                f"{name}: a prompt of {num_prompt} tokens leaves no room to generate one within "
                f"max_model_len {self.max_model_len}; shorten the prompt"
            )
        if num_prompt + max_tokens > self.max_model_len:
            raise ValueError(
                f"{name}: a prompt of {num_prompt} tokens and max_tokens {max_tokens} make "
                f"{num_prompt + max_tokens}, beyond max_model_len {self.max_model_len}; shorten "
                f"the prompt or set max_tokens to at most {self.max_model_len - num_prompt}"
            )
        num_slots = request.sequences[0].max_num_slots
        memory = self.memory
        if not memory.can_ever_hold(num_slots):
            raise ValueError(
                f"{name}: a prompt of {num_prompt} tokens and max_tokens {max_tokens} can need "
                f"{-(-num_slots // memory.block_size)} blocks of {memory.block_size} slots, the "
                f"pool has {memory.num_total_blocks}; give it more blocks or lower max_tokens"
            )

    def schedule(self) -> ScheduledBatch:
        """Plan an iteration and allocate its slots; not empty while there is work."""
        preempted = self._grow_decoding()
        decodes = self._decoding.copy()
        prefills: list[PrefillChunk] = []
        budget = self.max_num_batched_tokens - len(decodes)
        # Those whose chunk the last iteration cut short, or left out; they kept to its limits.
        for seq in self._prefilling:
            if budget > 0:
                budget -= _add_chunk(prefills, seq, budget)
        # Who has just been preempted would be the first to come in, only to be thrown out again.
        if not preempted:
            self._admit(prefills, budget)
        self._fit_to_sizes(prefills)
        return ScheduledBatch(prefills, decodes, preempted)

    def _grow_decoding(self) -> list[Sequence]:
        """Allocate a slot for each decode, oldest first; returns those preempted for it."""
        preempted: list[Sequence] = []
        append = self.memory.append
        for seq in self._decoding:  # a preemption cuts this list at its end
            while not append(seq.seq_id, len(seq.token_ids)):
                victim = (self._prefilling or self._decoding).pop()
                self._preempt(victim)
                preempted.append(victim)
                if victim is seq:
                    break
        return preempted

    def _preempt(self, seq: Sequence) -> None:
        self.memory.free(seq.seq_id)
        self.num_preemptions += 1
        self.num_recomputed_tokens += seq.num_computed_tokens
        seq.num_preemptions += 1
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING
        self._waiting.appendleft(seq)  # older than all that wait

    def _admit(self, prefills: list[PrefillChunk], budget: int) -> None:
        waiting = self._waiting
        num_running = self.num_running
        while (
            waiting
            and budget > 0
            and num_running < self.max_num_seqs
            and len(prefills) < self.max_prefill_seqs
        ):
            seq = waiting[0]
            if not self.memory.allocate(
                seq.seq_id,
                len(seq.token_ids),
                max_num_tokens=seq.max_num_slots,
                keep_free_blocks=self._watermark_blocks if num_running else 0,
            ):
                return
            waiting.popleft()
            seq.status = SequenceStatus.RUNNING
            self._prefilling.append(seq)
            num_running += 1
            budget -= _add_chunk(prefills, seq, budget)

    def _fit_to_sizes(self, prefills: list[PrefillChunk]) -> None:
        """Leave tokens for the next iteration where too much of the step would be padding.

        The executor fills up a step to the next of its sizes. Where that is a quarter of it or
        more, the last chunks are cut down to the size below.
        """
        num_tokens = sum(chunk.num_tokens for chunk in prefills)
        at = bisect_left(self._prefill_sizes, num_tokens)
        if not 0 < at < len(self._prefill_sizes) or 4 * num_tokens > 3 * self._prefill_sizes[at]:
            return
        excess = num_tokens - self._prefill_sizes[at - 1]
        while excess > 0:
            chunk = prefills.pop()
            if chunk.num_tokens > excess:
                prefills.append(PrefillChunk(chunk.seq, chunk.start, chunk.num_tokens - excess))
            excess -= chunk.num_tokens

    def update(
        self, batch: ScheduledBatch, sampled: collections.abc.Sequence[int]
    ) -> list[Sequence]:
        """Take in an iteration's results; returns the sequences that it finished.

        `sampled`: one token for each decode, then one for each chunk that completes. What was
        finished or aborted since the batch was scheduled is passed over.
        """
        decodes = batch.decodes
        if len(sampled) != batch.num_samples:
            raise ValueError(f"{len(sampled)} tokens for {batch.num_samples} samples")
        running = SequenceStatus.RUNNING
        ended: list[Sequence] = []
        for seq, token in zip(decodes, sampled, strict=False):
            if seq.status is running:
                token_ids = seq.token_ids
                seq.num_computed_tokens = num_tokens = len(token_ids)
                token_ids.append(token)
                if num_tokens + 1 >= seq.max_num_tokens or token in seq.end_token_ids:
                    ended.append(seq)
        if batch.prefills:
            self._update_prefills(batch, sampled[len(decodes) :], ended)
        return [seq for seq in ended if self._end(seq)]

    def _update_prefills(
        self,
        batch: ScheduledBatch,
        sampled: collections.abc.Sequence[int],
        ended: list[Sequence],
    ) -> None:
        first_tokens = iter(sampled)
        for chunk in batch.prefills:
            seq = chunk.seq
            token = next(first_tokens) if chunk.completes else None
            if seq.status is not SequenceStatus.RUNNING:
                continue
            seq.num_computed_tokens += chunk.num_tokens
            if token is not None:
                seq.token_ids.append(token)
                self._prefilling.remove(seq)
                self._decoding.append(seq)
                ended.append(seq)

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
