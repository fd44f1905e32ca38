"""Queues: unfinished sequences by state, each in the order in which they are served; their ends."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from paged_jax.memory.interface import MemoryManager
from paged_jax.outputs import FinishReason
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus


@dataclass(slots=True)
class Counters:
    """What has happened since the scheduler was made.

    A group is all running sequences of a request, which are preempted together.
    """

    num_refused: int = 0  # requests that `Scheduler.add` did not take
    num_finished: int = 0  # sequences that have ended, for whatever reason
    num_timeouts: int = 0  # requests that their deadline has ended
    num_preemptions: int = 0  # groups that have lost their blocks
    num_preemptions_by_swap: int = 0  # of these, groups whose blocks went to host memory
    num_swap_fallbacks: int = 0  # groups computed again because a pool had no room to swap them
    num_recomputed_tokens: int = 0  # tokens whose keys and values were computed and lost
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0


def order(seq: Sequence) -> tuple[tuple[tuple[float, ...], int], int]:
    """The key that sorts all queues: the rank of the request, then the sequence's place in it."""
    return seq.request.rank, seq.index


class Queues:
    """Four lists of sequences, each sorted by `order`; a sequence is in the one of its state.

    | queue        | status  | the sequence holds | it has to compute                       |
    |--------------|---------|--------------------|-----------------------------------------|
    | `decoding`   | RUNNING | a block table      | its newest token                        |
    | `prefilling` | RUNNING | a block table      | a prompt, or all tokens after recompute |
    | `swapped`    | SWAPPED | host blocks        | the same as when it was swapped out     |
    | `waiting`    | WAITING | nothing            | all of its tokens                       |
    """

    __slots__ = ("decoding", "prefilling", "swapped", "waiting")

    def __init__(self) -> None:
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.swapped: list[Sequence] = []

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def num_taken_places(self) -> int:
        """Running sequences; a beam search in its prefill counts as all beams that it will have."""
        return len(self.decoding) + sum(seq.num_places for seq in self.prefilling)

    @property
    def num_waiting_requests(self) -> int:
        """Requests of which a sequence waits or is swapped out."""
        return len({seq.request.request_id for seq in (*self.waiting, *self.swapped)})

    @property
    def next_is_swapped(self) -> bool:
        """Whether, of all sequences that do not run, the first in order is swapped out."""
        swapped, waiting = self.swapped, self.waiting
        return bool(swapped) and (not waiting or order(swapped[0]) < order(waiting[0]))

    def next_swapped(self) -> list[Sequence]:
        """The first sequence that is swapped out, with all others of its request that are."""
        request = self.swapped[0].request
        return list(takewhile(lambda seq: seq.request is request, self.swapped))

    def last_running(self) -> Sequence:
        """The running sequence that is last in order; some sequence has to run."""
        return max((queue[-1] for queue in (self.decoding, self.prefilling) if queue), key=order)

    def running(self) -> Iterator[Sequence]:
        yield from self.decoding
        yield from self.prefilling

    def runs_nothing_but(self, request: Request) -> bool:
        """Whether no sequence of another request runs."""
        ends = (
            seq for queue in (self.decoding, self.prefilling) for seq in (*queue[:1], *queue[-1:])
        )
        return all(seq.request is request for seq in ends)

    def add_request(self, request: Request) -> None:
        """Let all sequences of a new request wait."""
        at = bisect_left(self.waiting, (request.rank, 0), key=order)
        self.waiting[at:at] = request.sequences

    def move(self, seq: Sequence, status: SequenceStatus, *, is_prefilling: bool = False) -> None:
        """Give an unfinished sequence another state."""
        self.remove(seq)
        seq.status = status
        seq.is_prefilling = is_prefilling
        insort(self._queue_of(seq), seq, key=order)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of its queue; ValueError if it is not where its state says."""
        queue = self._queue_of(seq)
        at = bisect_left(queue, order(seq), key=order)
        if at == len(queue) or queue[at] is not seq:
            raise ValueError(f"{seq!r} is in no queue")
        del queue[at]

    def replace_decoding(self, old: list[Sequence], new: list[Sequence]) -> None:
        """Put the new beams of a search in the place of its old ones, all of which decode."""
        at = self.decoding.index(old[0])
        self.decoding[at : at + len(old)] = new

    def _queue_of(self, seq: Sequence) -> list[Sequence]:
        if seq.status is SequenceStatus.RUNNING:
            return self.prefilling if seq.is_prefilling else self.decoding
        return self.swapped if seq.status is SequenceStatus.SWAPPED else self.waiting


class Unfinished:
    """The requests that have not finished, by id and by deadline, and all ways to end them."""

    def __init__(self, memory: MemoryManager, queues: Queues, counters: Counters):
        self._memory = memory
        self._queues = queues
        self._counters = counters
        self.requests: dict[str, Request] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap, with requests that have ended

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self._queues.add_request(request)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))
            if len(self._deadlines) > 2 * len(self.requests) + 16:
                self._forget_deadlines()

    def _forget_deadlines(self) -> None:
        """Forget the deadlines of requests that have ended; most end before their deadline."""
        self._deadlines = [
            (request.deadline_s, request_id)
            for request_id, request in self.requests.items()
            if request.deadline_s is not None
        ]
        heapq.heapify(self._deadlines)

    def finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        *,
        discard: bool = False,
    ) -> None:
        """End a sequence in any state and free its blocks; nothing happens if it has ended.

        With `discard` nothing that only this sequence has computed stays in the prefix cache.
        """
        if seq.status is SequenceStatus.FINISHED:
            return
        self._queues.remove(seq)
        if seq.status is not SequenceStatus.WAITING:
            self._memory.free(seq.seq_id, discard=discard)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        self._counters.num_finished += 1
        if seq.request.is_finished:
            del self.requests[seq.request.request_id]

    def end(
        self, request_id: str, reason: FinishReason, *, discard: bool = False
    ) -> list[Sequence]:
        """End the unfinished sequences of a request and return them; none if it has ended."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        left = [seq for seq in request.sequences if not seq.is_finished]
        for seq in left:
            self.finish(seq, reason, discard=discard)
        return left

    def fail(self, request_id: str, message: str) -> list[Sequence]:
        """End a request for a fault: nothing that only this request has computed can be trusted."""
        request = self.requests.get(request_id)
        if request is not None:
            request.error = message
        return self.end(request_id, "error", discard=True)

    def expire(self, now: float) -> list[Sequence]:
        """End the requests whose deadline has come; returns their sequences."""
        ended: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            request = self.requests.get(request_id)
            # Another request may have taken the id of one that ended.
            if request is not None and request.deadline_s == deadline_s:
                ended += self.end(request_id, "timeout")
                self._counters.num_timeouts += 1
        return ended
