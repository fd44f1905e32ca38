"""Preemption (section 4.5): whose blocks are taken when memory runs out, and what becomes of them.

The running sequences of a request are one group: they share blocks, so all of them are preempted
together or none. The group whose request comes last in order goes first. Its blocks are given up,
and its tokens computed again in one prefill (recompute), or moved to host memory and back (swap).

A group that is alone can only take from itself. The sequences of a sample go on one after the other
then, so its last one is preempted alone. Beams need each other: the search starts again as a whole.
Neither is swapped, as it would come back as large as it left.
"""

from paged_jax.config import PreemptionMode
from paged_jax.memory.interface import MemoryManager
from paged_jax.scheduling.estimates import StepEstimates
from paged_jax.scheduling.queues import Queues
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus


class Preemption:
    """Takes blocks from groups that run, and notes what that costs.

    mode: "recompute"; "swap", as long as the host pool has room; or "auto", whatever is estimated
        to take less time, the way back included. "auto" recomputes until a prefill has been
        measured, then swaps once to measure that.
    """

    def __init__(
        self, memory: MemoryManager, queues: Queues, mode: PreemptionMode, estimates: StepEstimates
    ):
        self._memory = memory
        self._queues = queues
        self._mode = mode
        self._estimates = estimates
        self.num_preemptions = 0  # of groups
        self.num_preemptions_by_swap = 0
        self.num_swap_fallbacks = 0  # groups recomputed because a pool had no room to swap them
        self.num_recomputed_tokens = 0  # computed before and lost

    def make_room(self) -> list[Sequence]:
        """Preempt whoever is last, for a running sequence to grow; returns who it was.

        That may be the group that is to grow.
        """
        last = self._queues.last_running()
        request = last.request
        if not self._queues.runs_nothing_but(request):
            return self._preempt(_group(request), may_swap=True)
        return self.start_again(request) if request.beam_search else self._preempt([last])

    def start_again(self, request: Request) -> list[Sequence]:
        """Preempt all of a request that runs, by recompute; returns its sequences."""
        return self._preempt(_group(request))

    def _preempt(self, group: list[Sequence], *, may_swap: bool = False) -> list[Sequence]:
        self.num_preemptions += 1
        group[0].request.num_preemptions += 1
        if may_swap and self._prefers_swap(group):
            if self._memory.swap_out([seq.seq_id for seq in group]):
                self.num_preemptions_by_swap += 1
                for seq in group:
                    seq.num_writable_slots = 0
                    self._queues.move(seq, SequenceStatus.SWAPPED, is_prefilling=seq.is_prefilling)
                return group
            self.num_swap_fallbacks += 1
        self._recompute(group)
        return group

    def give_up_swapped(self, group: list[Sequence]) -> None:
        """Recompute what is swapped out and cannot come back as it was."""
        self.num_swap_fallbacks += 1
        self._recompute(group)

    def _recompute(self, group: list[Sequence]) -> None:
        for seq in group:
            self._memory.free(seq.seq_id)
            self.forget(seq)

    def forget(self, seq: Sequence) -> None:
        """Let a sequence wait that has lost its blocks."""
        self.num_recomputed_tokens += seq.num_computed_tokens
        seq.num_computed_tokens = seq.num_writable_slots = 0
        seq.candidates = None
        self._queues.move(seq, SequenceStatus.WAITING)

    def _prefers_swap(self, group: list[Sequence]) -> bool:
        memory, estimates = self._memory, self._estimates
        num_computed = sum(seq.num_computed_tokens for seq in group)
        if self._mode == "recompute" or not num_computed:
            return False
        if self._mode == "swap":
            return True
        # What they share is computed, and moved, once.
        num_blocks = len(set().union(*(memory.block_table(seq.seq_id) for seq in group)))
        recompute_s = estimates.prefill_s(min(num_computed, num_blocks * memory.block_size))
        if recompute_s is None or not memory.num_swap_blocks:
            return False
        block_s = estimates.swapped_block_s
        return block_s is None or 2 * num_blocks * block_s < recompute_s


def _group(request: Request) -> list[Sequence]:
    """The running sequences of a request, the last one first."""
    return [seq for seq in reversed(request.sequences) if seq.status is SequenceStatus.RUNNING]
