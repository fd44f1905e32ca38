"""Iteration-level scheduling (ORCA): admission, decodes and chunks of prefill, preemption.

Progress: every request ends, whatever the policy, as long as only finitely many can come to stand
before any given one (see `policies`). All decisions are taken in order of rank, which is fixed.

Take the first unfinished request in that order, once no other will come to stand before it.

- One of its sequences runs. No other request preempts it: victims are taken from the end. If it is
  alone, it may have to make room for itself: a sample's sequences then go on one after the other,
  and beams that hold blocks twice are computed again, each finding what the others have in common
  with it. The token budget is at least `max_num_seqs`, and decodes take one token each, so it
  leaves one for the first sequence that is not fully prefilled; a target for the time between
  tokens does too. So each iteration computes at least one token of it, but for the one that admits
  it, which may leave it out to save padding, and while beams wait for others, which are the next
  to be admitted.
- None of them runs. It is the next to be admitted, and nobody else is. By what was just said, the
  first of those that run goes on until it ends, and then the next, until there is room; at the
  latest when nothing runs. No watermark applies then, `add` has made sure that it fits, and what is
  swapped out but cannot come back as it was is computed again. The same holds for a static batch.

Hence it ends, and by induction all do. The beams of a search are preempted together, and go on when
all of them have been computed; a sequence waits while a sibling is being prefilled, to share what
that computes. Where beams that run wait for siblings which cannot be admitted, because another
request comes before them, and nothing else is left to compute, they give up their blocks.

Preemptions are bounded. Each time a request is preempted, it leaves about twice as many blocks free
when it is admitted again, so after log2(blocks) + 1 times it is admitted only when nothing runs;
from then on only requests that are added later and stand before it can preempt it, each once, and
its own sequences each other, each once more.
"""

import collections.abc
import types

from paged_jax.config import EngineConfig
from paged_jax.memory.interface import MemoryManager
from paged_jax.memory.usage import MemoryUsage
from paged_jax.outputs import FinishReason, TokenLogprobs
from paged_jax.scheduling.admission import Admission
from paged_jax.scheduling.ahead import decodes_after
from paged_jax.scheduling.batch import ScheduledBatch, add_forks
from paged_jax.scheduling.checks import check_fits, check_queue, pin
from paged_jax.scheduling.chunking import PrefillBudget, PrefillPlan, fit_to_sizes
from paged_jax.scheduling.counters import Counters
from paged_jax.scheduling.estimates import StepEstimates
from paged_jax.scheduling.policies import key_of, make_policy
from paged_jax.scheduling.preemption import Preemption
from paged_jax.scheduling.queues import Queues, Unfinished
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus
from paged_jax.scheduling.results import Results


class Scheduler(Counters):
    """Decides what each iteration computes: schedule -> execute -> update.

    config: the engine's options, all resolved; `paged_jax.config` describes them.
    eos_token_ids: tokens that end every sequence which does not set `ignore_eos`.
    prefill_sizes: tokens of a prefill step that the executor computes without padding, ascending;
        none: any number.
    estimates: what iterations cost; whoever executes them feeds it.
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
        super().__init__()
        self.memory = memory
        self.config = config
        self.policy = make_policy(config.scheduling_policy)
        self.estimates = StepEstimates() if estimates is None else estimates
        # Where prompts are not cut, not even to save padding.
        self._prefill_sizes = tuple(prefill_sizes) if config.enable_chunked_prefill else ()
        self._prefill_budget = PrefillBudget(
            config.max_num_batched_tokens,
            is_chunked=config.enable_chunked_prefill,
            target_inter_token_s=config.target_inter_token_s,
            least_tokens=min(prefill_sizes, default=1),
            estimates=self.estimates,
        )
        self._eos_token_ids = frozenset(eos_token_ids)

        self.queues = Queues()
        self._unfinished = Unfinished(memory, self.queues)
        self._preemption = Preemption(memory, self.queues, config.preemption_mode, self.estimates)
        self._admission = Admission(
            memory,
            self.queues,
            self._preemption,
            self.policy,
            max_num_seqs=config.max_num_seqs,
            watermark_blocks=int(config.watermark * memory.num_total_blocks),
        )
        self._results = Results(memory, self.queues, self._unfinished)
        self._num_added = 0
        self._num_blocks_left = 0  # free ones when an iteration was planned last

    def add(self, request: Request) -> None:
        """Queue a request.

        ValueError with the numbers if it can never fit, QueueFull if too many wait already.
        """
        if request.request_id in self._unfinished.requests:
            raise ValueError(
                f"request {request.request_id!r} is running already; give each request an id of "
                "its own"
            )
        try:
            check_fits(
                request,
                self.memory,
                max_model_len=self.config.max_model_len,
                max_num_seqs=self.config.max_num_seqs,
            )
            check_queue(request, self.num_waiting_requests, self.config.max_num_waiting)
            request.rank = key_of(self.policy, request), self._num_added
        except ValueError:
            self.num_refused += 1
            raise
        request.begin(self._eos_token_ids)
        salt = request.params.cache_salt
        request.salt = salt if self.config.enable_prefix_caching else (request.request_id,)
        self._num_added += 1
        self._unfinished.add(request)

    def schedule(self) -> ScheduledBatch:
        """Plan an iteration and allocate its slots; not empty while there is work."""
        queues, admission = self.queues, self._admission
        preempted = self._grow_decoding()
        is_open = admission.is_open
        resumed = [] if preempted else self._resume(preempted, is_open)
        decodes = self._decodes()
        plan = self._plan_prefills(len(decodes), {})
        # Who has just been preempted might be the first to come in, only to be thrown out again.
        if not preempted:
            admission.admit(plan, is_open=is_open)
        while self.has_work and not decodes and not plan.chunks:
            # Only beams run, if any, that wait for others of their search.
            if queues.decoding:
                preempted += self._preemption.start_again(queues.decoding[-1].request)
            was_idle, is_open = not queues.num_running, admission.is_open
            resumed += self._resume(preempted, is_open)
            decodes = self._decodes()
            plan = self._plan_prefills(len(decodes), {})
            admission.admit(plan, is_open=is_open)
            if was_idle and not queues.num_running:
                left_out = (queues.waiting or queues.swapped)[0]
                raise RuntimeError(
                    f"nothing runs, and still {left_out!r} is not admitted: either the memory "
                    "manager or the policy keeps it out for ever"
                )
        return self._batch(decodes, plan, preempted, resumed)

    def schedule_ahead(self, batch: ScheduledBatch) -> ScheduledBatch | None:
        """Plan the iteration after `batch`, which has been planned last and is not updated yet.

        Each sequence that `batch` samples has one token more when it decodes, and one that has
        ended by then is passed over by the update. None if the plan has to wait for the tokens, or
        if nothing would be left to do; call `schedule` when they are there. No other iteration may
        be planned before `batch` is updated.
        """
        if self.queues.swapped and self.memory.num_free_blocks > self._num_blocks_left:
            return None  # the next of them may have room now, and brings its token from the host
        decodes = decodes_after(batch, self.memory)
        if decodes is None:
            return None
        in_flight = {chunk.seq.seq_id: chunk.num_tokens for chunk in batch.prefills}
        plan = self._plan_prefills(len(decodes), in_flight)
        self._admission.admit(plan, is_open=self._admission.is_open)
        return self._batch(decodes, plan, [], []) if decodes or plan.chunks else None

    def _plan_prefills(self, num_decodes: int, in_flight: dict[int, int]) -> PrefillPlan:
        """Go on with those whose chunk the last iteration cut short, or left out.

        `in_flight`: by sequence id, tokens whose computation is under way.
        """
        plan = PrefillPlan(
            self._prefill_budget.beside(num_decodes),
            self.config.max_prefill_seqs,
            is_chunked=self.config.enable_chunked_prefill,
        )
        for seq in self.queues.prefilling:
            if plan.has_room:
                plan.add(seq, in_flight.get(seq.seq_id, 0))
        return plan

    def _batch(
        self,
        decodes: list[Sequence],
        plan: PrefillPlan,
        preempted: list[Sequence],
        resumed: list[Sequence],
    ) -> ScheduledBatch:
        prefills = plan.chunks
        fit_to_sizes(prefills, self._prefill_sizes)
        if prefills:
            add_forks(
                prefills, self.memory, self.config.max_num_seqs - self.queues.num_taken_places
            )
        swaps = self.memory.pending_swaps()
        self._num_blocks_left = self.memory.num_free_blocks
        return ScheduledBatch(
            prefills,
            decodes,
            preempted,
            self.memory.pending_copies(),
            swaps.outs,
            swaps.ins,
            resumed,
        )

    def _decodes(self) -> list[Sequence]:
        """Those who decode, but for beams that wait for others."""
        return [seq for seq in self.queues.decoding if seq.candidates is None]

    def _resume(self, preempted: list[Sequence], is_open: bool) -> list[Sequence]:
        """Swap in whoever is next, with slots for their decodes."""
        resumed = self._admission.resume(is_open=is_open) if self.queues.swapped else []
        if resumed:
            preempted += self._grow_decoding()
        return resumed

    def _grow_decoding(self) -> list[Sequence]:
        """Allocate a slot for each decode, in order; returns those preempted for it."""
        preempted: list[Sequence] = []
        append, block_size = self.memory.append, self.memory.block_size
        for seq in self.queues.decoding:  # a preemption cuts this list at its end
            num_tokens = len(seq.token_ids)
            if num_tokens <= seq.num_writable_slots:
                continue
            while not append(seq.seq_id, num_tokens):
                preempted += self._preemption.make_room()
                if seq.status is not SequenceStatus.RUNNING:
                    break
            else:
                seq.num_writable_slots = -(-num_tokens // block_size) * block_size
        return preempted

    def update(
        self,
        batch: ScheduledBatch,
        sampled: collections.abc.Sequence[int],
        logprobs: collections.abc.Sequence[TokenLogprobs | None] = (),
        prompt_logprobs: collections.abc.Sequence[collections.abc.Sequence[TokenLogprobs]] = (),
        stops: collections.abc.Mapping[int, str] = types.MappingProxyType({}),
    ) -> list[Sequence]:
        """Take in an iteration's results; returns the sequences that it finished.

        `sampled`: a token for each of the batch's `sampled`; `logprobs` likewise, at least of
        those whose `wants_candidates` is set; `prompt_logprobs`: for each prefill, those that its
        request still lacked; `stops`: by sequence id, the stop string that the sequence's text has
        met with this token, which ends it whatever else the token does. What was finished, failed
        or aborted since the batch was scheduled is passed over.
        """
        self.num_swapped_out_blocks += len(batch.swap_outs)
        self.num_swapped_in_blocks += len(batch.swap_ins)
        return self._results.take(batch, sampled, logprobs, prompt_logprobs, stops)

    def recover(self, *, cache_lost: bool) -> None:
        """After an iteration whose execution raised: let the next one do its work.

        If the cache is intact nothing has happened: who was to be computed is planned again, and
        what was to be moved or copied still is. If it is lost, all that held blocks in it wait
        again, and pinned prefixes are forgotten; what is in host memory is kept.
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
        """End what is left of a request; returns those sequences, none if it has ended."""
        return self._unfinished.end(request_id, "abort")

    def fail(self, request_id: str, message: str) -> list[Sequence]:
        """The same for a request that failed; nothing that only it has computed stays cached."""
        return self._unfinished.fail(request_id, message)

    def expire(self, now: float) -> list[Sequence]:
        """End all requests whose deadline has come; returns their sequences."""
        return self._unfinished.expire(now)

    def pin(self, token_ids: collections.abc.Sequence[int], salt: str | None) -> int:
        """Keep a prefix's blocks in the cache; returns how many of its tokens they hold.

        ValueError, and nothing changes, if a request that waits or runs could not finish with
        what is left.
        """
        return pin(self.memory, self._unfinished.requests.values(), token_ids, salt)

    def memory_usage(self) -> MemoryUsage:
        """Where the KV slots are now."""
        running = self.queues.running()
        return self.memory.usage({seq.seq_id: seq.num_computed_tokens for seq in running})

    @property
    def has_work(self) -> bool:
        return bool(self._unfinished.requests)
