"""Random workloads for the scheduler, and what must hold in each of their iterations."""

import dataclasses
import random
from types import SimpleNamespace

import pytest

from paged_jax.memory.block_manager import BlockManager
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.checks import num_blocks_needed
from paged_jax.scheduling.policies import Policy, Priority, ShortestPromptFirst
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus
from tests.scheduling.fakes import FakeExecutor, make_request, make_scheduler, outputs

INTERRUPTED = ("abort", "timeout", "error")


@dataclasses.dataclass(frozen=True)
class Load:
    """One random workload; times count iterations."""

    requests: list[dict]  # arguments of make_request
    arrivals: list[int]
    aborts: list[tuple[int, int]]  # (when, request), before the batch is planned or while it runs
    failures: list[tuple[int, int]]  # likewise
    # Iterations whose results never arrive: "planned" never reaches the device, "done" does,
    # "cache" takes all that the device held with it.
    lost: dict[int, str]
    limits: dict
    num_pinned: int  # tokens of a prefix that is pinned before; 0: none
    step_s: list[tuple[float, float]]  # (device, swap) seconds of iterations, in turn

    @property
    def is_first_come_first_served(self) -> bool:
        return self.limits["policy"] == "fcfs"


def random_load(rng: random.Random) -> Load:
    block_size = rng.choice([1, 2, 4, 16])
    max_model_len = rng.choice([rng.randint(2, 60), 60])
    num_requests = rng.randint(1, 12)
    last_arrival = rng.choice([5, 30])
    arrivals = sorted(rng.randint(0, last_arrival) for _ in range(num_requests))
    requests = []
    for i in range(num_requests):
        # Many grow long after they were admitted.
        num_prompt = rng.randint(1, rng.choice([max_model_len - 1, *[1 + max_model_len // 8] * 2]))
        max_tokens = rng.randint(1, max_model_len - num_prompt)
        requests.append(
            {
                "num_prompt": num_prompt,
                "seed": i,
                "prompt_seed": rng.choice([i, 0, 0, 1]),  # some begin alike
                "arrival": float(arrivals[i]),
                "priority": rng.randint(-2, 2),
                "deadline_s": rng.choice([None] * 9 + [arrivals[i] + rng.randint(0, 40)]),
                "max_tokens": max_tokens,
                "ignore_eos": rng.random() < 0.6,
                "stop_token_ids": rng.choice([(), (), (), (3, 4)]),
                "cache_salt": rng.choice([None, None, "other"]),
            }
        )
        if rng.random() < 0.25:
            beams = {"beam_width": rng.randint(1, 4), "early_stopping": rng.random() < 0.5}
            requests[-1] |= beams
        else:
            samples = {"n": rng.choice([1, 1, 1, 2, 3]), "min_tokens": rng.randint(0, max_tokens)}
            requests[-1] |= samples
    # From just enough for the most demanding alone, to plenty.
    memory = BlockManager(2, block_size)
    smallest = max(num_blocks_needed(make_request("", **r), memory) for r in requests)
    caching = rng.random() < 0.6
    num_pinned = rng.randint(1, max_model_len - 1) if caching and rng.random() < 0.3 else 0
    max_num_seqs = max(rng.randint(1, 8), *(r.get("beam_width", 1) for r in requests), 1)
    is_chunked = rng.random() < 0.8
    max_num_batched_tokens = max_num_seqs + rng.choice([0, 1, 7, 200])
    if not is_chunked:
        max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)

    def some_times(counts: list[int]) -> list[int]:
        return [rng.randint(0, 60) for _ in range(rng.choice(counts))]

    return Load(
        requests=requests,
        arrivals=arrivals,
        aborts=[(when, rng.randrange(num_requests)) for when in some_times([0, 0, 3])],
        failures=[(when, rng.randrange(num_requests)) for when in some_times([0, 0, 0, 2])],
        lost={when: rng.choice(["planned", "done", "cache"]) for when in some_times([0, 0, 5])},
        limits={
            "num_blocks": 1 + smallest + rng.choice([0, 1, 2, smallest, smallest, 4 * smallest]),
            "block_size": block_size,
            "num_swap_blocks": rng.choice([0, 1, 2, smallest, 10 * smallest, 10 * smallest]),
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_prefill_seqs": rng.randint(1, 8),
            "watermark": rng.choice([0.0, 0.01, 0.3, 0.9]),
            "enable_prefix_caching": caching,
            "policy": rng.choice(["fcfs"] * 3 + ["priority", "shortest", "static"]),
            "preemption_mode": rng.choice(["recompute", "swap", "swap", "swap", "auto"]),
            "enable_chunked_prefill": is_chunked,
            "target_inter_token_s": rng.choice([None, 1.0]) if is_chunked else None,
            "prefill_sizes": rng.choice([(), (), (4, 8, 16, 64, 512)]),
        },
        num_pinned=min(num_pinned, smallest * block_size),
        step_s=[
            (rng.uniform(0.01, 3.0), rng.choice([0.0, 0.01, 2.0])) for _ in range(rng.randint(1, 9))
        ],
    )


def _policy(name: str) -> str | Policy:
    """Policies whose seconds are iterations: orders differ from that of arrival."""
    by_name = {"priority": Priority(ageing_s=8.0), "shortest": ShortestPromptFirst(token_s=0.5)}
    return by_name.get(name, name)


class Run:
    """Drives a load to its end and checks, in each iteration, what must always hold."""

    def __init__(self, load: Load):
        self.load = load
        limits = load.limits | {"policy": _policy(load.limits["policy"])}
        self.scheduler = make_scheduler(**limits)
        self.executor = FakeExecutor(self.scheduler.memory)
        self.requests = [make_request(str(i), **r) for i, r in enumerate(load.requests)]
        self.trace: list[tuple] = []  # every decision
        self.num_sequence_steps = 0
        self.num_losses = 0

    @property
    def sequences(self) -> list[Sequence]:
        """Of all requests; beams change from step to step."""
        return [seq for request in self.requests for seq in request.sequences]

    def to_end(self) -> "Run":
        arrivals, iteration = list(zip(self.load.arrivals, self.requests, strict=True)), 0
        num_tokens = sum(
            seq.max_num_slots * (request.params.beam_width or 1)
            for request in self.requests
            for seq in request.sequences
        )
        self.pin()
        while arrivals or self.scheduler.has_work:
            while arrivals and arrivals[0][0] <= iteration:
                self.add(arrivals.pop(0)[1])
            expired = self.scheduler.expire(float(iteration))
            assert all(seq.finish_reason == "timeout" for seq in expired)
            if self.scheduler.has_work:
                self.step(iteration)
            iteration += 1
            # Each iteration computes a token, some of them again. Under first come first served it
            # is one of the oldest, unless it is lost.
            most = num_tokens + len(self.load.lost)
            if not self.load.is_first_come_first_served or self.num_losses:
                most += self.scheduler.counters.num_recomputed_tokens
            assert iteration <= 31 + most, "some iteration did nothing"
        self.check_end()
        return self

    def check_end(self) -> None:
        memory, scheduler = self.scheduler.memory, self.scheduler
        assert memory.num_free_blocks + memory.num_pinned_blocks == memory.num_total_blocks
        assert memory.num_free_swap_blocks == memory.num_swap_blocks
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_swapped) == (0, 0, 0)
        assert scheduler.counters.num_finished == len(self.sequences) + bool(self.load.num_pinned)
        assert scheduler.counters.num_preemptions == sum(r.num_preemptions for r in self.requests)
        assert scheduler.counters.num_timeouts == sum(
            any(seq.finish_reason == "timeout" for seq in r.sequences) for r in self.requests
        )
        log2 = memory.num_total_blocks.bit_length()
        for request in self.requests:
            # Who comes later may stand before it, and preempt it once.
            most = log2 + 1 + len(request.sequences) * (request.params.beam_width or 1)
            if not self.load.is_first_come_first_served:
                most += sum(other.rank < request.rank for other in self.requests)
            assert request.num_preemptions <= most, "preempted without end"

    def pin(self) -> None:
        """Compute a prefix that some of the prompts begin with, and keep it."""
        if self.load.num_pinned:
            prefix = make_request("prefix", self.load.num_pinned, prompt_seed=0, max_tokens=1)
            self.scheduler.add(prefix)
            while not prefix.is_finished:
                batch = self.scheduler.schedule()
                self.scheduler.update(batch, self.executor.run(batch))
            self.scheduler.pin(prefix.prompt_token_ids, None)

    def add(self, request: Request) -> None:
        """With a pinned prefix, the pool may be too small for a request."""
        try:
            self.scheduler.add(request)
        except ValueError as error:
            if not self.load.num_pinned or "are pinned" not in str(error):
                raise
            self.requests.remove(request)

    def step(self, iteration: int) -> None:
        scheduler = self.scheduler
        ends = [(scheduler.abort, index) for when, index in self.load.aborts if when == iteration]
        ends += [
            (lambda name: scheduler.fail(name, "a fault"), index)
            for when, index in self.load.failures
            if when == iteration
        ]
        for end, index in ends[::2]:
            end(str(index))
        before = [seq for seq in self.sequences if seq.status is SequenceStatus.RUNNING]
        batch = scheduler.schedule()
        self.trace.append(
            (
                [self.name(seq) for seq in batch.decodes],
                [(self.name(c.seq), c.start, c.num_tokens) for c in batch.prefills],
                [self.name(seq) for seq in batch.preempted],
                [self.name(seq) for seq in batch.resumed],
                batch.swap_outs,
                batch.swap_ins,
            )
        )
        self.check_batch(batch)
        self.check_progress(batch, before)
        loss = self.load.lost.get(iteration)
        if loss != "planned":
            sampled, logprobs = self.executor.run(batch), self.executor.logprobs(batch)
        for end, index in ends[1::2]:
            end(str(index))
        if loss is None:
            self.take(batch, sampled, logprobs)
        else:
            self.num_losses += loss == "cache"
            if loss == "cache":
                self.executor.slots.clear()
            scheduler.recover(cache_lost=loss == "cache")
        scheduler.memory.check_invariants()
        assert scheduler.num_running <= self.load.limits["max_num_seqs"]

    def take(self, batch: ScheduledBatch, sampled, logprobs) -> None:
        times = self.load.step_s[len(self.trace) % len(self.load.step_s)]
        self.scheduler.estimates.observe(
            batch, SimpleNamespace(device_s=sum(times), swap_s=times[1])
        )
        finished = self.scheduler.update(batch, sampled, logprobs)
        assert all(seq.is_finished for seq in finished)
        self.check_memory({c.seq for c in batch.prefills if not c.completes})
        self.num_sequence_steps += len(batch.decodes) + len(batch.prefills)

    def name(self, seq) -> tuple[str, int]:
        return seq.request.request_id, seq.index

    def check_batch(self, batch: ScheduledBatch) -> None:
        limits = self.load.limits
        num_prefill_tokens = sum(chunk.num_tokens for chunk in batch.prefills)
        if limits["enable_chunked_prefill"]:
            assert batch.num_tokens <= limits["max_num_batched_tokens"]
        else:
            assert num_prefill_tokens <= limits["max_num_batched_tokens"]
            assert all(chunk.completes for chunk in batch.prefills), "a prompt was cut"
        assert len(batch.prefills) <= limits["max_prefill_seqs"]
        assert all(chunk.num_tokens > 0 for chunk in batch.prefills)
        # Who was alone, and has to start again, may do so at once.
        assert set(batch.preempted).isdisjoint(batch.decodes)
        assert set(batch.resumed).isdisjoint(batch.preempted)
        for seq in batch.preempted:
            self.check_group(seq.request, batch)

    def check_progress(self, batch: ScheduledBatch, before: list[Sequence]) -> None:
        """Those first in order go on; `before`: who ran before the batch was planned."""
        computed = {seq.request.request_id for seq in batch.decodes}
        computed |= {chunk.seq.request.request_id for chunk in batch.prefills}
        live = [seq for seq in self.sequences if not seq.is_finished]
        running = [seq for seq in live if seq.status is SequenceStatus.RUNNING]
        if self.scheduler.has_work:
            assert computed, "every iteration computes something"
        if self.load.is_first_come_first_served:
            assert running == live[: len(running)], "nobody is overtaken"
            assert not live or not computed or live[0].request.request_id in computed
        still = [seq.request for seq in before if seq.status is SequenceStatus.RUNNING]
        if still:
            first = min(still, key=lambda request: request.rank)
            # Beams wait for those that have only just been admitted, or are still to be.
            if first.beam_search is None or set(first.sequences) <= set(before):
                assert first.request_id in computed, "the first to run goes on"

    def check_group(self, request: Request, batch: ScheduledBatch) -> None:
        """All that ran of a request was preempted, and all of it in the same way."""
        statuses = {seq.status for seq in batch.preempted if seq.request is request}
        # Who was alone, and has to start again, may do so at once.
        again = {SequenceStatus.RUNNING, SequenceStatus.WAITING}
        assert len(statuses) == 1 or statuses == again
        if any(seq.status is SequenceStatus.RUNNING for seq in request.sequences):
            assert self.scheduler.queues.runs_nothing_but(request) or not request.beam_search

    def check_memory(self, in_mid_prefill: set) -> None:
        memory, block_size = self.scheduler.memory, self.load.limits["block_size"]
        usage = self.scheduler.memory_usage()
        assert usage.total == memory.num_total_blocks * block_size
        assert min(usage.shares().values()) >= 0
        assert sum(usage.shares().values()) == pytest.approx(1.0)
        assert usage.internal <= self.scheduler.num_running * (block_size - 1)
        for seq in self.sequences:
            if seq.status is SequenceStatus.RUNNING:
                num_slots = len(memory.block_table(seq.seq_id)) * block_size
                # The newest token of a decoding sequence has no slot yet.
                is_whole = seq in in_mid_prefill or seq.is_prefilling or seq.candidates
                num_needed = seq.num_tokens - (not is_whole)
                assert 0 <= num_slots - num_needed < block_size, "less than a block unused"


def idle_outputs(arguments: dict, max_model_len: int):
    """What a request yields alone, in plenty of memory."""
    scheduler = make_scheduler(
        num_blocks=200, max_model_len=max_model_len, max_num_batched_tokens=100
    )
    request = make_request("alone", **arguments)
    scheduler.add(request)
    executor = FakeExecutor(scheduler.memory)
    while scheduler.has_work:
        batch = scheduler.schedule()
        scheduler.memory.take_copies()
        sampled = [executor.sample(seq) for seq in batch.sampled]
        scheduler.update(batch, sampled, executor.logprobs(batch))
    return outputs(request)


def check_load(load: Load) -> Run:
    """Run it; every request has the output that it has alone, or the beginning of it."""
    run = Run(load).to_end()
    for request in run.requests:
        expected = idle_outputs(
            load.requests[int(request.request_id)], load.limits["max_model_len"]
        )
        if request.beam_search is not None:
            interrupted = any(seq.finish_reason in INTERRUPTED for seq in request.sequences)
            assert interrupted or outputs(request) == expected
            continue
        for seq, (tokens, reason) in zip(request.sequences, expected, strict=True):
            if seq.finish_reason in INTERRUPTED:
                assert seq.output_token_ids == tokens[: seq.num_output_tokens]
            else:
                assert (seq.output_token_ids, seq.finish_reason) == (tokens, reason)
                assert seq.num_output_tokens <= seq.request.params.max_tokens
        assert (request.error == "a fault") == any(
            seq.finish_reason == "error" for seq in request.sequences
        )
    return run
