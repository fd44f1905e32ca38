"""Who waits and who runs: unfinished sequences in the order in which they are served."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import takewhile

from paged_jax.memory.interface import MemoryManager
from paged_jax.outputs import FinishReason
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus


def order(seq: Sequence) -> tuple[tuple[tuple[float, ...], int], int]:
    """What all queues are sorted by: the rank of the request, then the place in it."""
    return seq.request.rank, seq.index


class Queues:
    """Four lists of sequences, each sorted by `order`; a sequence is in the one of its state."""

    __slots__ = ("decoding", "prefilling", "swapped", "waiting")

    def __init__(self) -> None:
        self.decoding: list[Sequence] = []  # running; all tokens but the newest are computed
        self.prefilling: list[Sequence] = []  # running; more than that is to be computed
        self.waiting: list[Sequence] = []  # hold no memory
        self.swapped: list[Sequence] = []  # hold blocks in host memory

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def num_taken_places(self) -> int:
        """Sequences that run, and beams that will when their prompt is computed."""
        return len(self.decoding) + sum(seq.num_places for seq in self.prefilling)

    @property
    def next_is_swapped(self) -> bool:
        """Whether the first of those that do not run is swapped out."""
        swapped, waiting = self.swapped, self.waiting
        return bool(swapped) and (not waiting or order(swapped[0]) < order(waiting[0]))

    def next_swapped(self) -> list[Sequence]:
        """The first sequence that is swapped out, with all others of its request that are."""
        request = self.swapped[0].request
        return list(takewhile(lambda seq: seq.request is request, self.swapped))

    def last_running(self) -> Sequence:
        """The running sequence that is last in order; some sequence runs."""
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
        """All its sequences wait."""
        at = bisect_left(self.waiting, (request.rank, 0), key=order)
        self.waiting[at:at] = request.sequences

    def move(self, seq: Sequence, status: SequenceStatus, *, is_prefilling: bool = False) -> None:
        """Give an unfinished sequence another state."""
        self.remove(seq)
        seq.status = status
        seq.is_prefilling = is_prefilling
        insort(self._queue_of(seq), seq, key=order)

    def remove(self, seq: Sequence) -> None:
        """Take it out; ValueError if it is not where its state says."""
        queue = self._queue_of(seq)
        at = bisect_left(queue, order(seq), key=order)
        if at == len(queue) or queue[at] is not seq:
            raise ValueError(f"{seq!r} is in no queue")
        del queue[at]

    def _queue_of(self, seq: Sequence) -> list[Sequence]:
        if seq.status is SequenceStatus.RUNNING:
            return self.prefilling if seq.is_prefilling else self.decoding
        return self.swapped if seq.status is SequenceStatus.SWAPPED else self.waiting


class Unfinished:
    """The requests that have not finished, by id and by deadline, and all ways to end them."""

    def __init__(self, memory: MemoryManager, queues: Queues):
        self._memory = memory
        self._queues = queues
        self.requests: dict[str, Request] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; those that have ended included
        self.num_finished = 0  # sequences, for whatever reason
        self.num_timeouts = 0  # requests

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self._queues.add_request(request)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))
            if len(self._deadlines) > 2 * len(self.requests) + 16:
                self._forget_deadlines()

    def _forget_deadlines(self) -> None:
        """Those of requests that have ended, most of which never reach them."""
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

        With `discard` nothing that only it has computed stays in the prefix cache.
        """
        if seq.status is SequenceStatus.FINISHED:
            return
        self._queues.remove(seq)
        if seq.status is not SequenceStatus.WAITING:
            self._memory.free(seq.seq_id, discard=discard)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        self.num_finished += 1
        if seq.request.is_finished:
            del self.requests[seq.request.request_id]

    def end(
        self, request_id: str, reason: FinishReason, *, discard: bool = False
    ) -> list[Sequence]:
        """End what is left of a request; returns those sequences, none if it has ended."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        left = [seq for seq in request.sequences if not seq.is_finished]
        for seq in left:
            self.finish(seq, reason, discard=discard)
        return left

    def fail(self, request_id: str, message: str) -> list[Sequence]:
        """End a request for a fault: nothing that only it has computed can be trusted."""
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
                self.num_timeouts += 1
        return ended
