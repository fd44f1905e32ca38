"""Prometheus' counters, gauges and histograms of an engine, under vLLM's names where it has them.

They are plain numbers, so that an iteration costs microseconds; `prometheus` serves them. A name
that vLLM does not have begins with `paged_jax:`. A scrape may fall into the middle of an iteration:
each figure is right by itself.
"""

from collections import Counter

from paged_jax.observability.families import (
    FEW,
    FIRST_TOKEN_S,
    ITERATION_TOKENS,
    REQUEST_S,
    TOKEN_S,
    Family,
    Histogram,
    counter,
    counters,
    flat,
    gauge,
    histogram,
    info,
    up_to,
)
from paged_jax.observability.observer import Iteration, Observer
from paged_jax.observability.phases import RequestPhases
from paged_jax.outputs import CUT_SHORT, RequestOutput
from paged_jax.scheduling.checks import QueueFull
from paged_jax.scheduling.request import Request, Sequence
from paged_jax.scheduling.scheduler import Scheduler


class TokenGaps:
    """Remembers when each sequence, or beam search, got its last token.

    Most iterations sample for the sequences of the iteration before, which all have the same gap.
    """

    def __init__(self) -> None:
        # The last iteration: its sequences, what owns its tokens (a search owns those of its
        # beams), when they were sampled; and when owners that it passed over got their last token.
        self._sampled: list[Sequence] = []
        self._owners: dict[Sequence | Request, None] = {}
        self._sampled_s = 0.0
        self._last_s: dict[Sequence | Request, float] = {}

    def after(self, sampled: list[Sequence], now_s: float) -> list[tuple[float, int]]:
        """Pairs (seconds since the token before, owners that have this gap)."""
        before_s, before = self._sampled_s, self._owners
        self._sampled_s = now_s
        gaps: list[tuple[float, int]] = []
        num_same = len(before)
        if sampled != self._sampled:
            owners: dict[Sequence | Request, None] = {
                seq.request if seq.is_beam else seq: None for seq in sampled
            }
            for owner in before.keys() - owners.keys():
                if not owner.is_finished:
                    self._last_s[owner] = before_s
            new = owners.keys() - before.keys()
            num_same = len(owners) - len(new)
            times = [self._last_s.pop(owner, None) for owner in new]
            gaps = [(now_s - time, 1) for time in times if time is not None]
            self._sampled, self._owners = sampled, owners
        if num_same:
            gaps.append((now_s - before_s, num_same))
        return gaps

    def forget(self, request: Request) -> None:
        """A request has ended."""
        owners: list[Sequence | Request] = [request, *request.sequences]
        for owner in owners:
            self._last_s.pop(owner, None)


QUEUE_FULL = "max_num_waiting"  # the reason of a refusal, named after the limit
FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")


class Metrics(Observer):
    """Counts what happens to the requests of one scheduler.

    Latencies count only requests that came to their end: a request that was aborted, failed or
    timed out would make the engine look faster than it is.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._phases = RequestPhases()
        self._gaps = TokenGaps()
        self._arrival_s: dict[str, float] = {}  # of requests that have no token yet
        self.num_prompt_tokens = self.num_cached_tokens = self.num_generated_tokens = 0
        self.num_failed_steps = 0
        self.num_ended = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.num_refused = Counter({QUEUE_FULL: 0, "invalid_request": 0})
        self._histograms: list[tuple[str, str, Histogram]] = []
        new, lengths = self._new_histogram, up_to(scheduler.config.max_model_len)
        self.iteration_tokens = new("iteration_tokens_total", "Tokens computed.", ITERATION_TOKENS)
        self.first_token_s = new("time_to_first_token_seconds", "From arrival on.", FIRST_TOKEN_S)
        self.inter_token_s = new("inter_token_latency_seconds", "Token to token.", TOKEN_S)
        self.token_s = new(
            "request_time_per_output_token_seconds", "Mean, after the first token.", TOKEN_S
        )
        self.e2e_s = new("e2e_request_latency_seconds", "From arrival to last token.", REQUEST_S)
        self.queue_s = new("request_queue_time_seconds", "Arrival to first schedule.", REQUEST_S)
        self.prefill_s = new("request_prefill_time_seconds", "Schedule to first token.", REQUEST_S)
        self.decode_s = new("request_decode_time_seconds", "First to last token.", REQUEST_S)
        self.inference_s = new("request_inference_time_seconds", "Prefill, decode.", REQUEST_S)
        self.prompt_tokens = new("request_prompt_tokens", "Prompt tokens.", lengths)
        self.generation_tokens = new("request_generation_tokens", "Tokens generated.", lengths)
        self.n = new("request_params_n", "Continuations asked for.", FEW)
        self.max_tokens = new(
            "request_params_max_tokens", "Tokens asked for, as far as they fit.", lengths
        )

    def _new_histogram(self, name: str, description: str, bounds: tuple[float, ...]) -> Histogram:
        values = Histogram(bounds)
        self._histograms.append((f"vllm:{name}", description, values))
        return values

    def on_request_added(self, request: Request) -> None:
        self._phases.add(request)
        self._arrival_s[request.request_id] = request.arrival_time
        self.n.observe(request.params.n)
        self.max_tokens.observe(request.max_tokens)

    def on_request_refused(self, error: ValueError) -> None:
        reason = QUEUE_FULL if isinstance(error, QueueFull) else "invalid_request"
        self.num_refused[reason] += 1

    def on_step(self, iteration: Iteration) -> None:
        batch, now = iteration.batch, iteration.end_s
        self._phases.follow(iteration)
        self.iteration_tokens.observe(batch.num_tokens)
        sampled = iteration.sampled
        if failed := iteration.result.failed:
            sampled = [seq for index, seq in enumerate(sampled) if index not in failed]
        self.num_generated_tokens += len(sampled)
        for chunk in batch.prefills:
            request = chunk.seq.request
            if chunk.completes and request.error is None:
                arrival = self._arrival_s.pop(request.request_id, None)
                if arrival is not None:
                    self.first_token_s.observe(now - arrival)
                    self.num_prompt_tokens += len(request.prompt_token_ids)
                    self.num_cached_tokens += request.num_cached_tokens or 0
        for gap, count in self._gaps.after(sampled, now):
            self.inter_token_s.observe(gap, count)

    def on_recovery(self, time_s: float) -> None:
        self.num_failed_steps += 1
        self._phases.recover(time_s)

    def on_request_ended(self, output: RequestOutput, time_s: float) -> None:
        request, _ = self._phases.end(output.request_id, time_s)
        self._arrival_s.pop(output.request_id, None)
        self._gaps.forget(request)
        reason = output.finish_reason
        assert reason is not None
        self.num_ended[reason] += 1
        times = output.metrics
        first, last, scheduled = times.first_token_s, times.last_token_s, times.first_scheduled_s
        if reason in CUT_SHORT or first is None or last is None or scheduled is None:
            return
        self.e2e_s.observe(last - times.arrival_s)
        self.queue_s.observe(scheduled - times.arrival_s)
        self.prefill_s.observe(first - scheduled)
        self.decode_s.observe(last - first)
        self.inference_s.observe(last - scheduled)
        self.prompt_tokens.observe(len(output.prompt_token_ids))
        self.generation_tokens.observe(sum(len(out.token_ids) for out in output.outputs))
        for token_times in times.token_times_s:
            if len(token_times) > 1:
                duration = token_times[-1] - token_times[0]
                self.token_s.observe(duration / (len(token_times) - 1))

    def values(self) -> dict[str, float]:
        """Every figure by its name and labels, as in `vllm:request_success_total{...}`."""
        return flat(self.families())

    def families(self) -> list[Family]:
        """Every figure, now."""
        histograms = [histogram(*each) for each in self._histograms]
        return [*self._gauges(), *self._counters(), *histograms]

    def _gauges(self) -> list[Family]:
        memory, num_requests = self._scheduler.memory, self._phases.num_requests
        total, free = memory.num_total_blocks, memory.num_free_blocks
        host, free_host = memory.num_swap_blocks, memory.num_free_swap_blocks
        used, used_host = 1 - free / total, (host - free_host) / host if host else 0.0
        running = num_requests["prefill"] + num_requests["running"]
        facts = {
            "block_size": str(memory.block_size),
            "num_gpu_blocks": str(total),
            "num_cpu_blocks": str(host),
        }
        return [
            gauge("vllm:num_requests_running", "Requests in the batch.", running),
            gauge("vllm:num_requests_waiting", "Requests that wait.", num_requests["waiting"]),
            gauge("vllm:num_requests_swapped", "Requests in host memory.", num_requests["swapped"]),
            gauge("vllm:kv_cache_usage_perc", "Blocks in use, 1 is all of them.", used),
            gauge("vllm:gpu_cache_usage_perc", "Blocks in use, under vLLM's earlier name.", used),
            gauge("vllm:cpu_cache_usage_perc", "Host blocks in use, 1 is all.", used_host),
            gauge(
                "paged_jax:num_cached_blocks",
                "Free blocks that keep a prefix until they are needed.",
                memory.num_cached_blocks,
            ),
            info("vllm:cache_config_info", "Sizes of the pools.", facts),
        ]

    def _counters(self) -> list[Family]:
        done, stats = self._scheduler.counters, self._scheduler.memory.stats
        by_swap = done.num_preemptions_by_swap
        modes = {"recompute": done.num_preemptions - by_swap, "swap": by_swap}
        plain = [
            ("vllm:num_preemptions", "Preemptions.", done.num_preemptions),
            ("vllm:prompt_tokens", "Tokens of computed prompts.", self.num_prompt_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens not computed.", self.num_cached_tokens),
            ("vllm:generation_tokens", "Tokens generated.", self.num_generated_tokens),
            ("vllm:prefix_cache_queries", "Tokens looked up in the cache.", stats.queried_tokens),
            ("vllm:prefix_cache_hits", "Tokens found in the cache.", stats.hit_tokens),
            (
                "paged_jax:swap_fallbacks",
                "Swaps the host had no room for.",
                done.num_swap_fallbacks,
            ),
            ("paged_jax:recomputed_tokens", "Tokens computed twice.", done.num_recomputed_tokens),
            ("paged_jax:swapped_out_blocks", "Blocks moved out.", done.num_swapped_out_blocks),
            ("paged_jax:swapped_in_blocks", "Blocks moved back.", done.num_swapped_in_blocks),
            ("paged_jax:failed_steps", "Steps that raised.", self.num_failed_steps),
            ("paged_jax:block_copies", "Blocks copied on write.", stats.copies),
            ("paged_jax:block_evictions", "Cached blocks given up.", stats.evictions),
        ]
        ended = "Requests that ended, by reason."
        return [
            *(counter(name, description, value) for name, description, value in plain),
            counters("vllm:request_success", ended, "finished_reason", self.num_ended),
            counters("vllm:admission_rejections", "Requests refused.", "reason", self.num_refused),
            counters("paged_jax:preemptions_by_mode", "Preemptions.", "mode", modes),
        ]
