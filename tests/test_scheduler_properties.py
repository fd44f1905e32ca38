"""Scheduler under random load: everything ends, in order, with the output of an idle machine."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_fakes import FakeExecutor, make_request, make_scheduler, outputs

from paged_jax.memory.block_manager import BlockManager
from paged_jax.scheduling.fitting import num_blocks_needed
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus


@dataclasses.dataclass(frozen=True)
class Load:
    """One random workload; times count iterations."""

    requests: list[dict]  # arguments of make_request
    arrivals: list[int]
    aborts: list[tuple[int, int]]  # (when, request), before the batch is planned or while it runs
    lost: dict[int, bool]  # iterations whose results never arrive: whether they reach the device
    limits: dict
    num_pinned: int  # tokens of a prefix that is pinned before; 0: none


def random_load(rng: random.Random) -> Load:
    block_size = rng.choice([1, 2, 4, 16])
    max_model_len = rng.randint(2, 60)
    num_requests = rng.randint(1, 12)
    requests = []
    for i in range(num_requests):
        num_prompt = rng.randint(1, max_model_len - 1)
        max_tokens = rng.randint(1, max_model_len - num_prompt)
        requests.append(
            {
                "num_prompt": num_prompt,
                "seed": i,
                "prompt_seed": rng.choice([i, 0, 0, 1]),  # some begin alike
                "max_tokens": max_tokens,
                "ignore_eos": rng.random() < 0.3,
                "stop_token_ids": rng.choice([(), (3, 4)]),
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
    return Load(
        requests=requests,
        arrivals=sorted(rng.randint(0, 30) for _ in requests),
        aborts=[
            (rng.randint(0, 60), rng.randrange(num_requests)) for _ in range(rng.choice([0, 0, 3]))
        ],
        lost={rng.randint(0, 60): rng.random() < 0.5 for _ in range(rng.choice([0, 0, 5]))},
        limits={
            "num_blocks": 1 + smallest + rng.choice([0, 0, 1, 2, smallest, 8 * smallest]),
            "block_size": block_size,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + rng.choice([0, 1, 7, 200]),
            "max_prefill_seqs": rng.randint(1, 8),
            "watermark": rng.choice([0.0, 0.01, 0.3, 0.9]),
            "enable_prefix_caching": caching,
        },
        num_pinned=min(num_pinned, smallest * block_size),
    )


class Run:
    """Drives a load to its end and checks, in each iteration, what must always hold."""

    def __init__(self, load: Load):
        self.load = load
        self.scheduler = make_scheduler(**load.limits)
        self.executor = FakeExecutor(self.scheduler.memory)
        self.requests = [make_request(str(i), **r) for i, r in enumerate(load.requests)]
        self.trace: list[tuple] = []  # every decision

    @property
    def sequences(self) -> list[Sequence]:
        """Of all requests; beams change from step to step."""
        return [seq for request in self.requests for seq in request.sequences]

    def to_end(self) -> "Run":
        arrivals, iteration = list(zip(self.load.arrivals, self.requests, strict=True)), 0
        # Each iteration after the last arrival computes a token of the oldest, unless it is lost.
        most_iterations = 31 + len(self.load.lost)
        most_iterations += sum(
            seq.max_num_slots * (request.params.beam_width or 1)
            for request in self.requests
            for seq in request.sequences
        )
        self.pin()
        while arrivals or self.scheduler.has_work:
            while arrivals and arrivals[0][0] <= iteration:
                self.add(arrivals.pop(0)[1])
            if self.scheduler.has_work:
                aborts = [index for when, index in self.load.aborts if when == iteration]
                self.step(aborts, iteration)
            iteration += 1
            assert iteration <= most_iterations, "some iteration did nothing for the oldest"
        memory = self.scheduler.memory
        assert memory.num_free_blocks + memory.num_pinned_blocks == memory.num_total_blocks
        assert self.scheduler.num_finished == len(self.sequences) + bool(self.load.num_pinned)
        return self

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

    def step(self, aborts: list[int], iteration: int) -> None:
        scheduler = self.scheduler
        before, during = aborts[::2], aborts[1::2]
        for index in before:
            scheduler.abort(str(index))
        batch = scheduler.schedule()
        self.trace.append(
            (
                [self.name(seq) for seq in batch.decodes],
                [(self.name(c.seq), c.start, c.num_tokens) for c in batch.prefills],
                [self.name(seq) for seq in batch.preempted],
            )
        )
        self.check_batch(batch)
        lost = self.load.lost
        if lost.get(iteration, True):
            sampled, logprobs = self.executor.run(batch), self.executor.logprobs(batch)
        for index in during:
            scheduler.abort(str(index))
        if iteration not in lost:
            assert all(seq.is_finished for seq in scheduler.update(batch, sampled, logprobs))
            self.check_memory({c.seq for c in batch.prefills if not c.completes})
        scheduler.memory.check_invariants()
        assert scheduler.num_running <= self.load.limits["max_num_seqs"]

    def name(self, seq) -> tuple[str, int]:
        return seq.request.request_id, seq.index

    def check_batch(self, batch) -> None:
        limits = self.load.limits
        live = [seq for seq in self.sequences if not seq.is_finished]
        in_batch = [*batch.decodes, *(chunk.seq for chunk in batch.prefills)]
        if live and self.scheduler.has_work:
            oldest = live[0].request  # of its beams, some may wait for the others
            assert in_batch[0].request is oldest, "the oldest makes progress in every iteration"
        assert batch.num_tokens <= limits["max_num_batched_tokens"]
        assert len(batch.prefills) <= limits["max_prefill_seqs"]
        assert all(chunk.num_tokens > 0 for chunk in batch.prefills)
        running = [seq for seq in live if seq.status is SequenceStatus.RUNNING]
        assert running == live[: len(running)], "nobody is overtaken"
        assert set(batch.preempted).isdisjoint(in_batch)

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
                num_needed = seq.num_tokens - (seq not in in_mid_prefill and not seq.candidates)
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
        scheduler.update(batch, executor.run(batch), executor.logprobs(batch))
    return outputs(request)


def check_load(load: Load) -> Run:
    run = Run(load).to_end()
    for request in run.requests:
        expected = idle_outputs(
            load.requests[int(request.request_id)], load.limits["max_model_len"]
        )
        if request.beam_search is not None:
            aborted = any(seq.finish_reason == "abort" for seq in request.sequences)
            assert aborted or outputs(request) == expected
            continue
        for seq, (tokens, reason) in zip(request.sequences, expected, strict=True):
            if seq.finish_reason == "abort":
                assert seq.output_token_ids == tokens[: seq.num_output_tokens]
            else:
                assert (seq.output_token_ids, seq.finish_reason) == (tokens, reason)
                assert seq.num_output_tokens <= seq.request.params.max_tokens
    return run


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_everything_ends_in_order_with_the_same_output(rng):
    check_load(random_load(rng))


def test_a_soak_of_random_loads_sees_preemptions_and_keeps_every_promise():
    rng = random.Random(0)
    runs = [check_load(random_load(rng)) for _ in range(400)]
    assert sum(run.scheduler.num_preemptions for run in runs) > 250
    assert sum(seq.finish_reason == "abort" for run in runs for seq in run.sequences) > 50
    assert sum(seq.finish_reason == "stop" for run in runs for seq in run.sequences) > 50
    searches = [r for run in runs for r in run.requests if r.beam_search is not None]
    assert sum(request.num_preemptions > 0 for request in searches) > 20
    stats = [run.scheduler.memory.stats for run in runs]
    pinned = [run for run in runs if run.load.num_pinned]
    assert len(pinned) > 50
    assert any(len(run.requests) < len(run.load.requests) for run in pinned)
    assert sum(run.scheduler.num_preemptions > 0 for run in pinned) > 5
    for name in ("hit_tokens", "evictions", "forks", "copies"):
        assert sum(getattr(each, name) for each in stats) > 250, name


@pytest.mark.parametrize("seed", range(20))
def test_the_same_load_gives_the_same_schedule(seed):
    first, second = (Run(random_load(random.Random(seed))).to_end() for _ in range(2))
    assert first.trace == second.trace
