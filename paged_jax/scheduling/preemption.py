"""Preemption (section 4.5): which sequences lose their blocks when memory runs out, and how.

The running sequences of a request are one group. They share blocks, so all of them are preempted
together or none, and the group that is last in order goes first.

| the last group    | is preempted  | gets its blocks back by                                   |
|-------------------|---------------|-----------------------------------------------------------|
| beside others     | as a whole    | one prefill of all its tokens (recompute), or a swap from |
|                   |               | host memory                                               |
| alone, a sample   | its last      | recompute: the sequences go on one after the other        |
|                   | sequence      |                                                           |
| alone, a search   | as a whole    | recompute: beams need each other                          |

A group that is alone is not swapped, as it would come back as large as it left.
"""

from paged_jax.config import PreemptionMode
from paged_jax.memory.interface import MemoryManager
from paged_jax.scheduling.estimates import StepEstimates
from paged_jax.scheduling.queues import Counters, Queues
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus


class Preemption:
    """Takes blocks from groups that run, and counts what that costs.

    `mode` is "recompute"; "swap", as long as the host pool has room; or "auto", which takes the way
    that the estimates say is faster, the way back included. "auto" recomputes until a prefill has
    been measured, then swaps once to measure a swap.
    """

    def __init__(
        self,
        memory: MemoryManager,
        queues: Queues,
        counters: Counters,
        mode: PreemptionMode,
        estimates: StepEstimates,
    ):
        self._memory = memory
        self._queues = queues
        self._counters = counters
        self._mode = mode
        self._estimates = estimates

    def make_room(self) -> list[Sequence]:
        """Preempt the last sequences in order, for a running sequence to grow; returns them.

        The sequence that is to grow may be among them.
        """
        last = self._queues.last_running()
        request = last.request
        if not self._queues.runs_nothing_but(request):
            return self._preempt(_group(request), may_swap=True)
        return self.start_again(request) if request.beam_search else self._preempt([last])

    def start_again(self, request: Request) -> list[Sequence]:
        """Preempt all running sequences of a request, by recompute; returns them."""
        return self._preempt(_group(request))

    def give_up_swapped(self, group: list[Sequence]) -> None:
        """Recompute a group that is swapped out and cannot come back as it was."""
        self._counters.num_swap_fallbacks += 1
        self._recompute(group)

    def forget(self, seq: Sequence) -> None:
        """Let a sequence wait that has lost its blocks."""
        self._counters.num_recomputed_tokens += seq.num_computed_tokens
        seq.num_computed_tokens = seq.num_writable_slots = 0
        seq.candidates = None
        self._queues.move(seq, SequenceStatus.WAITING)

    def _preempt(self, group: list[Sequence], *, may_swap: bool = False) -> list[Sequence]:
        self._counters.num_preemptions += 1
        group[0].request.num_preemptions += 1
        if may_swap and self._prefers_swap(group):
            if self._memory.swap_out([seq.seq_id for seq in group]):
                self._counters.num_preemptions_by_swap += 1
                for seq in group:
                    seq.num_writable_slots = 0
                    self._queues.move(seq, SequenceStatus.SWAPPED, is_prefilling=seq.is_prefilling)
                return group
            self._counters.num_swap_fallbacks += 1
        self._recompute(group)
        return group

    def _recompute(self, group: list[Sequence]) -> None:
        for seq in group:
            self._memory.free(seq.seq_id)
            self.forget(seq)

    def _prefers_swap(self, group: list[Sequence]) -> bool:
        memory, estimates = self._memory, self._estimates
        num_computed = sum(seq.num_computed_tokens for seq in group)
        if self._mode == "recompute" or not num_computed:
            return False
        if self._mode == "swap":
            return True
        # A block that several sequences share is computed, and moved, once.
        num_blocks = len(set().union(*(memory.block_table(seq.seq_id) for seq in group)))
        recompute_s = estimates.prefill_s(min(num_computed, num_blocks * memory.block_size))
        if recompute_s is None or not memory.num_swap_blocks:
            return False
        block_s = estimates.swapped_block_s
        return block_s is None or 2 * num_blocks * block_s < recompute_s


def _group(request: Request) -> list[Sequence]:
    """The running sequences of a request, the last one first."""
    return [seq for seq in reversed(request.sequences) if seq.status is SequenceStatus.RUNNING]
