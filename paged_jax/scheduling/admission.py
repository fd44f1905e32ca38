"""Admission: which sequences that wait, or are swapped out, run from this iteration on."""

from paged_jax.config import EngineConfig
from paged_jax.memory.interface import MemoryManager
from paged_jax.scheduling.batch import num_branches
from paged_jax.scheduling.chunking import PrefillPlan
from paged_jax.scheduling.policies import Policy
from paged_jax.scheduling.preemption import Preemption
from paged_jax.scheduling.queues import Queues
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus


class Admission:
    """Admits sequences in order; the first that does not fit holds up all after it.

    Admission leaves `watermark` of the blocks free, for running sequences to grow. Each time that a
    request has been preempted, it leaves about twice as many blocks free as before, until it comes
    in only when nothing else runs. That bounds the preemptions of a request by the logarithm of the
    pool's size.
    """

    def __init__(
        self,
        memory: MemoryManager,
        queues: Queues,
        preemption: Preemption,
        policy: Policy,
        config: EngineConfig,
    ):
        self._memory = memory
        self._queues = queues
        self._preemption = preemption
        self._policy = policy
        self._max_num_seqs = config.max_num_seqs
        self._watermark_blocks = int(config.watermark * memory.num_total_blocks)

    @property
    def is_open(self) -> bool:
        """Whether the policy admits further requests beside the sequences that run now."""
        return self._policy.may_admit(self._queues.num_running)

    def resume(self, *, is_open: bool) -> list[Sequence]:
        """Swap in the sequences that are next, and return them; each has a free block to grow into.

        Unless admission `is_open`, only sequences of a request that runs come in.
        """
        queues = self._queues
        resumed: list[Sequence] = []
        while queues.next_is_swapped:
            group = queues.next_swapped()
            request = group[0].request
            num_places = sum(seq.num_places for seq in group)
            if queues.num_taken_places + num_places > self._max_num_seqs:
                break
            if not is_open and not _runs(request):
                break
            if self._memory.swap_in(
                [seq.seq_id for seq in group],
                {seq.seq_id: seq.token_ids for seq in group},
                salt=request.salt,
                keep_free_blocks=self._keep_free_blocks(request) + len(resumed) + len(group),
            ):
                for seq in group:
                    queues.move(seq, SequenceStatus.RUNNING, is_prefilling=seq.is_prefilling)
                resumed += group
            elif not queues.num_running:
                # The group does not fit side by side: more blocks are pinned by now, or it has no
                # room to grow.
                self._preemption.give_up_swapped(group)
            else:
                break
        return resumed

    def admit(self, plan: PrefillPlan, *, is_open: bool) -> None:
        """Start to prefill the sequences that are next, while the plan and the memory have room.

        Unless admission `is_open`, only sequences of a request that runs come in.
        """
        queues, waiting = self._queues, self._queues.waiting
        if not waiting:
            return
        num_taken = queues.num_taken_places
        admits_all = self._policy.admits_batches
        at = 0
        while at < len(waiting):
            seq = waiting[at]
            request = seq.request
            # How much of the prompt is cached shows only when it is allocated.
            if not admits_all and not plan.may_take(len(seq.token_ids)):
                return
            if num_taken + seq.num_places > self._max_num_seqs or queues.next_is_swapped:
                return
            if not is_open and not _runs(request):
                return
            # While a sibling computes their common prompt, the sequence waits to share its blocks.
            if any(other.request is request for other in queues.prefilling):
                if not admits_all:
                    return
                num_taken += 1
                at += 1
                continue
            num_cached = self._memory.allocate(
                seq.seq_id,
                seq.token_ids,
                salt=request.salt,
                max_num_tokens=seq.max_num_slots,
                num_prompt_tokens=seq.num_prompt_tokens,
                num_sequences=num_branches(seq, self._max_num_seqs - num_taken),
                keep_free_blocks=self._keep_free_blocks(request),
                use_cache=not request.lacks_prompt_logprobs,
            )
            if num_cached is None:
                return
            queues.move(seq, SequenceStatus.RUNNING, is_prefilling=True)
            seq.num_computed_tokens = num_cached
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_cached
            num_taken += seq.num_places
            if plan.has_room:
                plan.add(seq)

    def _keep_free_blocks(self, request: Request) -> int:
        """How many blocks a sequence of the request has to leave free when it comes in."""
        if not self._queues.num_running:
            return 0
        # The beams of a search that run wait for the beams that do not.
        if request.beam_search is not None and self._queues.runs_nothing_but(request):
            return 0
        num_blocks = self._memory.num_total_blocks
        times = min(request.num_preemptions, num_blocks.bit_length())
        return min(self._watermark_blocks + (1 << times) - 1, num_blocks)


def _runs(request: Request) -> bool:
    return any(seq.status is SequenceStatus.RUNNING for seq in request.sequences)
