"""Iteration-level scheduling (ORCA): the whole loop, top to bottom.

    schedule  1. decodes grow     each gets a slot for its newest token; the last in order make room
              2. swaps come back  sequences in host memory, with slots for their decodes
              3. prefills go on   the next chunks of prompts under way
              4. admission        waiting sequences begin their prefill
              5. beams make way   where nothing runs but beams that wait for beams without room
              6. the plan         as plain data: chunks, decodes, forks, copies and swaps
    execute                       by the engine's executor
    update    7. tokens           are appended, full blocks committed, forks started
              8. ends             sequences that their token ends free their blocks
              9. searches         replace their beams

All decisions are taken in order of rank, which is fixed when a request is added. The `README.md` of
this folder states what follows: every request ends, and preemptions are bounded.
"""

import collections.abc
import types
from bisect import insort

from paged_jax.config import EngineConfig
from paged_jax.memory.interface import MemoryManager
from paged_jax.memory.usage import MemoryUsage
from paged_jax.outputs import FinishReason, TokenLogprobs
from paged_jax.scheduling.admission import Admission
from paged_jax.scheduling.batch import ScheduledBatch, add_forks
from paged_jax.scheduling.checks import check_queue, fitting_max_tokens, num_blocks_needed
from paged_jax.scheduling.chunking import PrefillPlan, prefill_budget
from paged_jax.scheduling.estimates import StepEstimates
from paged_jax.scheduling.policies import key_of, make_policy
from paged_jax.scheduling.preemption import Preemption
from paged_jax.scheduling.queues import Counters, Queues, Unfinished, order
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus
from paged_jax.scheduling.results import (
    advance_beams,
    take_decodes,
    take_logprobs,
    take_prefills,
    take_stops,
)


class Scheduler:
    """Decides what each iteration computes: schedule -> execute -> update.

    config: the engine's options, all resolved; `paged_jax.config` describes them.
    eos_token_ids: tokens that end every sequence which does not set `ignore_eos`.
    prefill_sizes: tokens of a prefill step that the executor computes without padding, ascending;
        none: any number.
    estimates: what iterations cost; the engine lets them observe each executed iteration.
    """

    def __init__(
        self,
        memory: MemoryManager,
        config: EngineConfig,
        *,
        eos_token_ids: collections.abc.Iterable[int],
        prefill_sizes: collections.abc.Sequence[int] = (),
        estimates: StepEstimates | None = None,
    ):
        self.memory = memory
        self.config = config
        self.policy = make_policy(config.scheduling_policy)
        self.estimates = StepEstimates() if estimates is None else estimates
        self.counters = Counters()
        self.queues = Queues()
        self._unfinished = Unfinished(memory, self.queues, self.counters)
        self._preemption = Preemption(
            memory, self.queues, self.counters, config.preemption_mode, self.estimates
        )
        self._admission = Admission(memory, self.queues, self._preemption, self.policy, config)
        self._eos_token_ids = frozenset(eos_token_ids)
        # Prompts that are computed whole are not cut to save padding either.
        self._prefill_sizes = tuple(prefill_sizes) if config.enable_chunked_prefill else ()
        self._num_added = 0
        self._num_free_blocks = 0  # when the last iteration had been planned

    def add(self, request: Request) -> None:
        """Queue a request; `Request.max_tokens` is clipped to what fits.

        ValueError with the numbers if it can never fit, QueueFull if too many wait already.
        """
        if request.request_id in self._unfinished.requests:
            raise ValueError(
                f"request {request.request_id!r} is running already; give each request an id of "
                "its own"
            )
        try:
            max_tokens = fitting_max_tokens(request, self.memory, self.config)
            check_queue(request, self.queues.num_waiting_requests, self.config.max_num_waiting)
            request.rank = key_of(self.policy, request), self._num_added
        except ValueError:
            self.counters.num_refused += 1
            raise
        request.begin(self._eos_token_ids, max_tokens)
        salt = request.params.cache_salt
        request.salt = salt if self.config.enable_prefix_caching else (request.request_id,)
        self._num_added += 1
        self._unfinished.add(request)

    def schedule(self) -> ScheduledBatch:
        """Plan an iteration and allocate its slots; the plan is not empty while there is work."""
        queues, admission = self.queues, self._admission
        # 1. Decodes grow. An iteration that preempts for that admits nothing: a sequence that has
        #    just been preempted might come in at once, only to be thrown out again.
        preempted = self._grow_decodes()
        resumed: list[Sequence] = []
        admits = not preempted
        while True:
            is_open, was_idle = admission.is_open, not queues.num_running
            # 2. Swapped sequences come back, and decode in this very iteration.
            if admits and (back := admission.resume(is_open=is_open)):
                resumed += back
                preempted += self._grow_decodes()
            decodes = [seq for seq in queues.decoding if seq.candidates is None]
            # 3. Prefills go on where the last iteration has cut them short, or left them out.
            plan = self._continue_prefills(len(decodes), {})
            # 4. Waiting sequences are admitted, where the budget, the places and the memory allow.
            if admits:
                admission.admit(plan, is_open=is_open)
            if decodes or plan.chunks or not self.has_work:
                break
            # 5. Only beams run, and wait for other beams that have no room: they make way.
            if queues.decoding:
                preempted += self._preemption.start_again(queues.decoding[-1].request)
            elif admits and was_idle:
                left_out = (queues.waiting or queues.swapped)[0]
                raise RuntimeError(
                    f"nothing runs, and still {left_out!r} is not admitted: either the memory "
                    "manager or the policy keeps it out for ever"
                )
            admits = True
        # 6. What there is to do, as plain data.
        return self._make_batch(decodes, plan, preempted, resumed)

    def _grow_decodes(self) -> list[Sequence]:
        """Allocate a slot for each decode's newest token, in order; returns the preempted."""
        preempted: list[Sequence] = []
        for seq in self.queues.decoding:  # a preemption cuts this list at its end
            num_tokens = len(seq.token_ids)
            while num_tokens > seq.num_writable_slots and not self._append(seq, num_tokens):
                preempted += self._preemption.make_room()
                if seq.status is not SequenceStatus.RUNNING:
                    break
        return preempted

    def _append(self, seq: Sequence, num_tokens: int) -> bool:
        """Make the sequence's slot for its last token writable; False if memory is out."""
        if not self.memory.append(seq.seq_id, num_tokens):
            return False
        block_size = self.memory.block_size
        seq.num_writable_slots = -(-num_tokens // block_size) * block_size
        return True

    def _continue_prefills(
        self, num_decodes: int, in_flight: collections.abc.Mapping[int, int]
    ) -> PrefillPlan:
        """The next chunks of prompts under way.

        `in_flight` maps a sequence's id to its tokens that a batch in flight computes.
        """
        least_tokens = min(self._prefill_sizes, default=1)
        budget = prefill_budget(num_decodes, self.config, self.estimates, least_tokens=least_tokens)
        plan = PrefillPlan(budget, self.config)
        for seq in self.queues.prefilling:
            if plan.has_room:
                plan.add(seq, in_flight.get(seq.seq_id, 0))
        return plan

    def _make_batch(
        self,
        decodes: list[Sequence],
        plan: PrefillPlan,
        preempted: list[Sequence],
        resumed: list[Sequence],
    ) -> ScheduledBatch:
        """The plan as plain data; chunks are cut to save padding, forks join completed prompts."""
        plan.cut_to(self._prefill_sizes)
        num_places = self.config.max_num_seqs - self.queues.num_taken_places
        add_forks(plan.chunks, self.memory, num_places)
        swaps = self.memory.pending_swaps()
        self._num_free_blocks = self.memory.num_free_blocks
        return ScheduledBatch(
            plan.chunks,
            decodes,
            preempted,
            self.memory.pending_copies(),
            swaps.outs,
            swaps.ins,
            resumed,
        )

    def update(
        self,
        batch: ScheduledBatch,
        sampled: collections.abc.Sequence[int],
        logprobs: collections.abc.Sequence[TokenLogprobs | None] = (),
        prompt_logprobs: collections.abc.Sequence[collections.abc.Sequence[TokenLogprobs]] = (),
        stops: collections.abc.Mapping[int, str] = types.MappingProxyType({}),
    ) -> list[Sequence]:
        """Take in an iteration's results; returns the sequences that it finished.

        What was finished, failed or aborted since the batch was scheduled is passed over.

        sampled: a token for each of the batch's `sampled`.
        logprobs: likewise, at least for requests whose `wants_candidates` is set.
        prompt_logprobs: for each prefill, the ones that its request still lacked.
        stops: maps a sequence's id to the stop string that its text has met with this token; that
            ends the sequence, whatever else the token does.
        """
        if len(sampled) != batch.num_samples:
            raise ValueError(f"{len(sampled)} tokens for {batch.num_samples} samples")
        memory, queues, prefills = self.memory, self.queues, batch.prefills
        self.counters.num_swapped_out_blocks += len(batch.swap_outs)
        self.counters.num_swapped_in_blocks += len(batch.swap_ins)
        # 7. Tokens are appended, full blocks committed, forks started.
        endings = take_decodes(batch.decodes, sampled, memory)
        if prefills:
            first_tokens = sampled[len(batch.decodes) :]
            endings |= take_prefills(prefills, first_tokens, memory, queues)
            for chunk, scores in zip(prefills, prompt_logprobs, strict=False):
                chunk.seq.request.prompt_logprobs += scores
        searches = take_logprobs(batch, logprobs)
        # 8. Sequences that their token or a stop string ends free their blocks.
        if stops:
            endings |= take_stops(batch, stops)
        for seq, (reason, stop_reason) in endings.items():
            self.finish(seq, reason, stop_reason)
        finished = list(endings)
        # 9. Searches replace their beams.
        for request in searches:
            finished += self._take_search_step(request)
        return finished

    def _take_search_step(self, request: Request) -> list[Sequence]:
        """Replace the beams once all of them have candidates; returns the beams that end."""
        if any(seq.candidates is None for seq in request.sequences):
            return []
        try:
            old = advance_beams(request, self.memory)
        except ValueError as error:
            return self.fail(request.request_id, f"beam search: {error}")
        if request.sequences is old:  # the search is done
            return self._unfinished.end(request.request_id, "stop")
        self.queues.replace_decoding(old, request.sequences)
        return []

    def schedule_ahead(self, batch: ScheduledBatch) -> ScheduledBatch | None:
        """Plan the iteration after `batch`, whose tokens are not known yet; None: wait for them.

        `batch` is the last plan and in flight; no other iteration may be planned before its
        `update`. The steps are those of `schedule`, without preemption and swaps.

        A sequence goes on unless its token ends it. One that is about to reach its greatest length
        is left out. One that ends otherwise has computed one token too many, and `update` passes it
        over: the sequence wrote to a slot of its own, and steps run in order, so that the next
        holder of the block writes after it. The plan has to wait for the tokens

        - of beams, which other beams replace;
        - of sequences with a constraint, which the host asks what may come next;
        - of a prompt's siblings that are about to start, as they share its blocks only then;
        - when memory is out, as preemption may depend on which sequences end;
        - when a swapped sequence may have room now, as it brings its token from the host.

        None as well if nothing would be left to compute.
        """
        if self.queues.swapped and self.memory.num_free_blocks > self._num_free_blocks:
            return None
        decodes = self._grow_decodes_after(batch)
        if decodes is None:
            return None
        in_flight = {chunk.seq.seq_id: chunk.num_tokens for chunk in batch.prefills}
        plan = self._continue_prefills(len(decodes), in_flight)
        self._admission.admit(plan, is_open=self._admission.is_open)
        return self._make_batch(decodes, plan, [], []) if decodes or plan.chunks else None

    def _grow_decodes_after(self, batch: ScheduledBatch) -> list[Sequence] | None:
        """The decodes that follow `batch`, in order, each with a slot; None: wait for tokens."""
        if any(chunk.forks or chunk.seq.is_beam for chunk in batch.prefills):
            return None
        running = SequenceStatus.RUNNING
        going_on = [seq for seq in batch.decodes if seq.status is running]
        for seq in batch.first_sampled():
            if seq.status is running:
                insort(going_on, seq, key=order)
        decodes: list[Sequence] = []
        for seq in going_on:
            num_tokens = len(seq.token_ids) + 1
            if num_tokens >= seq.max_num_tokens:
                continue
            if seq.is_beam or seq.constraint is not None:
                return None
            if num_tokens > seq.num_writable_slots and not self._append(seq, num_tokens):
                return None
            decodes.append(seq)
        return decodes

    def recover(self, *, cache_lost: bool) -> None:
        """After an iteration whose execution raised: let the next one do its work.

        If the cache is intact nothing has happened: the same sequences are planned again, and
        pending moves and copies stay pending. If it is lost, all sequences that held blocks in it
        wait again, and pinned prefixes are forgotten; host memory keeps its blocks.
        """
        if not cache_lost:
            return
        lost = set(self.memory.reset())
        for request in self._unfinished.requests.values():
            for seq in request.sequences:
                if seq.seq_id in lost:
                    self._preemption.forget(seq)

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a sequence in any state and free its blocks; nothing happens if it has ended."""
        self._unfinished.finish(seq, reason, stop_reason)

    def abort(self, request_id: str) -> list[Sequence]:
        """End a request's unfinished sequences and return them; none if it has ended."""
        return self._unfinished.end(request_id, "abort")

    def fail(self, request_id: str, message: str) -> list[Sequence]:
        """The same for a request that failed; nothing that only it has computed stays cached."""
        return self._unfinished.fail(request_id, message)

    def expire(self, now: float) -> list[Sequence]:
        """End all requests whose deadline has come; returns their sequences."""
        return self._unfinished.expire(now)

    def pin(self, token_ids: collections.abc.Sequence[int], salt: str | None) -> int:
        """Keep a prefix's blocks in the cache; returns how many of its tokens they hold.

        ValueError, and nothing changes, if a request that waits or runs could not finish with the
        blocks that are left.
        """
        memory, requests = self.memory, self._unfinished.requests.values()
        most = max((num_blocks_needed(request, memory) for request in requests), default=0)
        num_tokens = memory.pin(token_ids, salt, leave_blocks=most)
        if num_tokens is None:
            raise ValueError(
                f"pinning {len(token_ids)} tokens would leave less than the {most} blocks of "
                f"{memory.num_total_blocks} that a request in work can need; wait for it to "
                "finish, or give the pool more blocks"
            )
        return num_tokens

    def memory_usage(self) -> MemoryUsage:
        """Where the KV slots are now."""
        running = self.queues.running()
        return self.memory.usage({seq.seq_id: seq.num_computed_tokens for seq in running})

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._unfinished.requests)

    @property
    def num_running(self) -> int:
        """Sequences that run now."""
        return self.queues.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait now, and hold no memory."""
        return len(self.queues.waiting)

    @property
    def num_swapped(self) -> int:
        """Sequences that are swapped out now."""
        return len(self.queues.swapped)
