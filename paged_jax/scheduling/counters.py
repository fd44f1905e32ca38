"""What a scheduler is doing and has done, in numbers."""

from paged_jax.scheduling.preemption import Preemption
from paged_jax.scheduling.queues import Queues, Unfinished


class Counters:
    """Sequences by state now; what has happened since the scheduler was made."""

    queues: Queues
    _unfinished: Unfinished
    _preemption: Preemption

    def __init__(self) -> None:
        self.num_refused = 0  # requests that were not taken
        self.num_swapped_out_blocks = 0
        self.num_swapped_in_blocks = 0

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return self.queues.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait and hold no memory."""
        return len(self.queues.waiting)

    @property
    def num_swapped(self) -> int:
        """Sequences that are swapped out."""
        return len(self.queues.swapped)

    @property
    def num_waiting_requests(self) -> int:
        """Requests some of whose sequences wait or are swapped out."""
        queues = self.queues
        return len({seq.request.request_id for seq in (*queues.waiting, *queues.swapped)})

    @property
    def num_finished(self) -> int:
        """Sequences that have ended, for whatever reason."""
        return self._unfinished.num_finished

    @property
    def num_timeouts(self) -> int:
        """Requests ended by their deadline."""
        return self._unfinished.num_timeouts

    @property
    def num_preemptions(self) -> int:
        """Times that blocks were taken from running sequences of a request, together."""
        return self._preemption.num_preemptions

    @property
    def num_preemptions_by_swap(self) -> int:
        """Of which by moving them to host memory."""
        return self._preemption.num_preemptions_by_swap

    @property
    def num_swap_fallbacks(self) -> int:
        """Times that blocks should have been kept in host memory, and were recomputed instead."""
        return self._preemption.num_swap_fallbacks

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens that were computed and lost."""
        return self._preemption.num_recomputed_tokens
