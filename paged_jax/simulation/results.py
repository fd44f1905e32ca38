"""What a simulated run gives: what became of each request, and every iteration."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paged_jax.memory.usage import SharingStats
from paged_jax.observability.observer import IterationStats


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request and what became of it. Times in seconds from the start of the run."""

    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int
    first_token_s: float | None  # None: it got none
    last_token_s: float | None  # None: it has not finished
    num_output_tokens: int  # of each of the sequences that it returns, so far
    num_sequences: int  # that it returns
    num_cached_tokens: int  # of the prompt, found in the prefix cache at first admission
    num_preemptions: int
    refusal: str | None = None  # why it was not taken

    @property
    def finished(self) -> bool:
        return self.last_token_s is not None

    @property
    def latency_s(self) -> float | None:
        """From arrival to last token; None of one that has not finished."""
        return None if self.last_token_s is None else self.last_token_s - self.arrival_s

    @property
    def normalised_latency_s(self) -> float | None:
        """Latency per output token (Kwon et al., section 6.1)."""
        latency = self.latency_s
        return None if latency is None else latency / self.num_output_tokens

    @property
    def ttft_s(self) -> float | None:
        """From arrival to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(frozen=True)
class SimulatedRun:
    """A workload, served. Averages of iterations are over time: a long one weighs more.

    What had not come to an end when the run did is not finished, and part of no latency.
    """

    requests: list[SimulatedRequest]  # those that arrived before the run's end, by arrival
    iterations: list[IterationStats]  # on the virtual clock; the last one cut at the run's end
    duration_s: float
    num_preemptions: int
    num_preemptions_by_swap: int  # of these; the rest was computed again
    num_recomputed_tokens: int
    num_swapped_blocks: int  # out, and in
    sharing: SharingStats

    @property
    def finished(self) -> list[SimulatedRequest]:
        return [request for request in self.requests if request.finished]

    @property
    def num_refused(self) -> int:
        return sum(request.refusal is not None for request in self.requests)

    @property
    def num_unfinished(self) -> int:
        """Requests that were taken and cut at the run's end, waiting or running."""
        return len(self.requests) - len(self.finished) - self.num_refused

    @property
    def busy_s(self) -> float:
        """Time in iterations; the rest is idle."""
        return sum(stats.wall_s for stats in self.iterations)

    @property
    def requests_per_s(self) -> float:
        """Requests finished per second of the run."""
        return len(self.finished) / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of finished requests, of all their sequences, per second of the run."""
        counts = [request.num_output_tokens * request.num_sequences for request in self.finished]
        return sum(counts) / self.duration_s

    @property
    def mean_batch_size(self) -> float:
        """Sequences that iterations computed for, averaged over the time of the iterations."""
        return self._over_time([s.num_decodes + s.num_prefill_seqs for s in self.iterations])

    @property
    def memory_shares(self) -> dict[str, float]:
        """Categories of `MemoryUsage`, as fractions of the pool over the time of the iterations."""
        shares = [stats.usage.shares() for stats in self.iterations]
        names = shares[0] if shares else ()
        return {name: self._over_time([share[name] for share in shares]) for name in names}

    @property
    def normalised_latency_s(self) -> float | None:
        """Mean over finished requests (Kwon et al., section 6.1); None if there is none."""
        latencies = self.normalised_latencies_s
        return float(np.mean(latencies)) if latencies else None

    @property
    def normalised_latencies_s(self) -> list[float]:
        """Of the finished requests, by arrival."""
        latencies = [request.normalised_latency_s for request in self.requests]
        return [latency for latency in latencies if latency is not None]

    @property
    def latencies_s(self) -> list[float]:
        """From arrival to last token, of the finished requests, by arrival."""
        latencies = [request.latency_s for request in self.requests]
        return [latency for latency in latencies if latency is not None]

    @property
    def ttfts_s(self) -> list[float]:
        """From arrival to first token, of the requests that got one, by arrival."""
        times = [request.ttft_s for request in self.requests]
        return [time for time in times if time is not None]

    def goodput(self, max_normalised_latency_s: float) -> float:
        """Requests per second of the run that finished within the objective."""
        in_time = [each for each in self.normalised_latencies_s if each <= max_normalised_latency_s]
        return len(in_time) / self.duration_s

    def _over_time(self, values: Sequence[float]) -> float:
        """ValueError if no time has passed in iterations."""
        if not self.busy_s:
            raise ValueError("no iteration took any time, so there is no average over time")
        return float(np.average(values, weights=[stats.wall_s for stats in self.iterations]))
