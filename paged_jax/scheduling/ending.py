"""How requests end before their time: by abort, at their deadline, by a fault."""

import heapq

from paged_jax.memory.interface import MemoryManager
from paged_jax.scheduling.queues import Queues
from paged_jax.scheduling.request import FinishReason, Request, Sequence, SequenceStatus


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
