"""Iterations planned behind others that run still: the device never waits, and nothing changes."""

import itertools
import random

import pytest

from paged_jax.engine.core import EngineCore
from paged_jax.observability.observer import Iteration, IterationStats
from tests.engine.constraints import EvenTokens
from tests.engine.queued_device import Clock, QueuedDevice
from tests.scheduling.fakes import EOS, make_request, make_scheduler, outputs

HOST_S, DEVICE_S = 0.25, 1.0


class Run:
    """An engine's loop over a device in virtual time."""

    def __init__(self, *, is_pipelined: bool = True, host_s=HOST_S, device_s=DEVICE_S, **limits):
        self.clock = Clock()
        self.scheduler = make_scheduler(**limits)
        self.device = QueuedDevice(
            self.scheduler.memory, self.clock, host_s=host_s, device_s=device_s
        )
        self.stats: list[IterationStats] = []
        self.core = EngineCore(
            self.scheduler,
            self.device,
            clock=self.clock,
            on_iteration=self.stats.append,
            is_pipelined=is_pipelined,
        )

    def add(self, name: str, num_prompt: int, **params):
        request = make_request(name, num_prompt, **params)
        self.scheduler.add(request)
        return request

    def step(self) -> Iteration:
        iteration = self.core.step()
        self.core.report(iteration)
        self.scheduler.memory.check_invariants()
        return iteration

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
        memory = self.scheduler.memory
        assert memory.num_free_blocks == memory.num_total_blocks

    @property
    def num_ahead(self) -> int:
        return sum(stats.is_ahead for stats in self.stats)


def decodes_only(is_pipelined: bool, **times) -> Run:
    """Four sequences of 20 tokens: one prefill, then 19 decodes."""
    run = Run(is_pipelined=is_pipelined, **times)
    for i in range(4):
        run.add(f"r{i}", 5, seed=i, max_tokens=20, ignore_eos=True)
    run.finish()
    assert len(run.stats) == 20
    return run


def test_an_iteration_is_dispatched_before_the_result_of_the_one_before_is_asked_for():
    events = decodes_only(True).device.events
    for t in range(19):
        assert events.index(("dispatch", t + 1)) < events.index(("result", t))
    for t in range(18):  # and no more than two are in flight
        assert events.index(("result", t)) < events.index(("dispatch", t + 2))


def test_without_pipelining_each_waits_for_the_one_before():
    events = decodes_only(False).device.events
    assert events == [(what, t) for t in range(20) for what in ("dispatch", "result")]


@pytest.mark.parametrize(("host_s", "device_s"), [(0.25, 1.0), (1.0, 1.0), (2.0, 1.0)])
def test_host_and_device_take_as_long_as_the_slower_of_them(host_s, device_s):
    """Without pipelining they take as long as both."""
    one_by_one = decodes_only(False, host_s=host_s, device_s=device_s)
    pipelined = decodes_only(True, host_s=host_s, device_s=device_s)
    assert one_by_one.clock.now == 20 * (host_s + device_s)
    first_and_last = min(host_s, device_s)
    assert pipelined.clock.now == 20 * max(host_s, device_s) + first_and_last


def test_the_times_of_iterations_tile_the_time_that_passed():
    stats = decodes_only(True).stats
    end = stats[-1].start_s + stats[-1].wall_s
    for before, after in itertools.pairwise(stats):
        assert before.start_s + before.wall_s == after.start_s
    assert [each.is_ahead for each in stats] == [False] + [True] * 19
    assert sum(each.wall_s for each in stats) == end == HOST_S + 20 * DEVICE_S
    assert all(each.device_s == DEVICE_S for each in stats)
    assert stats[0].wall_s == HOST_S + DEVICE_S
    assert all(each.wall_s == DEVICE_S for each in stats[1:]), "the host's share is hidden"


def test_beams_that_die_do_not_count_as_finished():
    run = Run()
    search = run.add("beams", 5, beam_width=4, max_tokens=12, ignore_eos=True)
    beams = {*search.sequences}
    while run.scheduler.has_work:
        run.step()
        beams |= {*search.sequences}
    assert len(beams) > 5, "some have died"
    assert [each.num_finished for each in run.stats] == [0] * 11 + [4]


def test_who_ends_by_length_gets_no_token_too_many():
    run = Run()
    run.add("short", 5, max_tokens=3, ignore_eos=True)
    run.add("long", 5, seed=1, max_tokens=9, ignore_eos=True)
    run.finish()
    assert [each.num_decodes for each in run.stats] == [0, 2, 2, 1, 1, 1, 1, 1, 1]
    assert run.device.num_dispatched == 9


def ends_early(run: Run, name: str = "ends", max_tokens: int = 40):
    """A request that meets an end token after some others."""
    for seed in range(1000):
        alone = Run(is_pipelined=False)
        request = alone.add(name, 5, seed=seed, max_tokens=max_tokens)
        alone.finish()
        [(tokens, reason)] = outputs(request)
        if reason == "stop" and 4 <= len(tokens) <= 10:
            return run.add(name, 5, seed=seed, max_tokens=max_tokens), tokens
    raise AssertionError("no seed ends early")


def test_a_token_too_many_is_thrown_away():
    run = Run()
    other = run.add("other", 5, seed=5000, max_tokens=30, ignore_eos=True)
    request, tokens = ends_early(run)
    iterations = []
    while run.scheduler.has_work:
        iterations.append(run.step())
    assert outputs(request) == [(tokens, "stop")]
    assert tokens[-1] == EOS
    too_many = iterations[len(tokens)]
    assert request.sequences[0] in too_many.batch.decodes
    assert too_many.sampled == other.sequences
    assert len(too_many.result.tokens) == len(too_many.result.logprobs) == 1
    assert run.num_ahead == 29


def test_an_iteration_that_nobody_waits_for_any_more_is_left_to_itself():
    run = Run()
    request, tokens = ends_early(run)
    run.finish()
    assert len(run.stats) == len(tokens)
    assert run.device.num_dispatched == len(tokens) + 1
    # The next request is not mistaken for it.
    again = run.add("again", 5, seed=request.seed, max_tokens=40)
    run.finish()
    assert outputs(again) == [(tokens, "stop")]
    assert len(run.stats) == 2 * len(tokens)
    assert run.num_ahead == 2 * len(tokens) - 2


def test_requests_that_wait_are_admitted_while_others_decode():
    """Chunk by chunk, each planned ahead; one joins when another's place is known to be free."""
    run = Run(max_num_seqs=2, max_num_batched_tokens=8)
    run.add("first", 4, max_tokens=30, ignore_eos=True)
    run.step()
    run.add("long", 25, seed=1, max_tokens=4, ignore_eos=True)
    run.add("next", 4, seed=2, max_tokens=4, ignore_eos=True)
    run.finish()
    assert all(each.is_ahead for each in run.stats[1:])
    assert sum(each.num_prefill_tokens for each in run.stats) == 33


@pytest.mark.parametrize("kind", ["beams", "constraint"])
def test_plans_that_depend_on_the_tokens_wait_for_them(kind):
    run = Run()
    run.add("plain", 5, max_tokens=30, ignore_eos=True)
    params = {"beam_width": 2} if kind == "beams" else {}
    other = run.add("other", 5, seed=1, max_tokens=10, ignore_eos=True, **params)
    if kind == "constraint":
        other.sequences[0].constraint = EvenTokens()
    run.finish()
    assert [each.is_ahead for each in run.stats[:10]] == [False] * 10
    assert all(each.is_ahead for each in run.stats[11:])


@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.5}, {"min_tokens": 5}, {"logit_bias": {3: 1.0}}], ids=str
)
def test_plans_that_need_the_tokens_on_the_device_alone_do_not_wait(params):
    run = Run()
    run.add("plain", 5, max_tokens=30, ignore_eos=True)
    run.add("other", 5, seed=1, max_tokens=10, ignore_eos=True, **params)
    run.finish()
    assert all(each.is_ahead for each in run.stats[1:])


def test_preemption_waits_for_the_tokens():
    run = Run(num_blocks=9)
    for i in range(3):
        run.add(f"r{i}", 6, seed=i, max_tokens=14, ignore_eos=True)
    run.finish()
    preempting = [each for each in run.stats if each.num_preempted]
    assert preempting
    assert not any(each.is_ahead for each in preempting)
    assert run.num_ahead


def test_who_is_swapped_out_comes_back_as_soon_as_blocks_are_free():
    """Iterations are planned ahead meanwhile, but for the one that looks who may come back."""
    run = Run(num_blocks=16, num_swap_blocks=15, preemption_mode="swap")
    for i, max_tokens in enumerate((38, 18, 20)):
        run.add(f"r{i}", 6, seed=i, max_tokens=max_tokens, ignore_eos=True)
    run.finish()
    assert [each.index for each in run.stats if each.num_swapped_out_blocks] == [15]
    assert [each.index for each in run.stats if each.num_finished] == [17, 23, 37]
    assert [each.index for each in run.stats if each.num_resumed] == [19]
    assert [each.index for each in run.stats if not each.is_ahead] == [0, 15, 19]


NOT_FINITE = (2, 7)  # requests some row of which is not


def random_requests(rng: random.Random) -> list[dict]:
    kinds = [
        {},
        {},
        {"n": 3},
        {"stop_token_ids": [3, 4]},
        {"ignore_eos": True},
        {"logprobs": 1},
        {"n": 2, "best_of": 3},
        {"repetition_penalty": 1.5},
        {"beam_width": 3},
    ]
    return [
        {
            "num_prompt": rng.randint(10, 30),
            "seed": i,
            "prompt_seed": rng.choice([i, 0, 1]),
            "max_tokens": rng.choice([1, 5, 20, 30, 30]),
            **rng.choice(kinds[: 1 if i in NOT_FINITE else 5 if i % 3 else None]),
        }
        for i in range(12)
    ]


def test_an_iteration_whose_dispatch_ahead_raises_fails_in_its_turn():
    """The one before it runs already, and is not planned again."""
    run = Run()
    request = run.add("r", 5, max_tokens=6, ignore_eos=True)
    run.device.faults[("dispatch", 3)] = RuntimeError("at fault")
    for _ in range(3):
        run.step()
    assert request.sequences[0].num_output_tokens == 3
    with pytest.warns(RuntimeWarning, match="planned again: RuntimeError: at fault"):
        run.finish()
    numbers = [number for what, number in run.device.events if what == "dispatch"]
    assert numbers == [0, 1, 2, 4, 5, 6]
    assert len(run.stats) == 6
    assert not run.stats[3].is_ahead


class Interrupted(BaseException):
    pass


def run_random(seed: int, *, is_pipelined: bool, num_faults: int = 0):
    """With aborts, stop strings and rows that are not finite at the same points of each output."""
    rng = random.Random(seed)
    block_size = rng.choice([2, 4])
    limits = {
        "num_blocks": rng.choice([132, 160, 400]) // block_size,  # beams take up to 124 slots
        "block_size": block_size,
        "max_num_seqs": rng.choice([6, 8]),
        "max_num_batched_tokens": rng.choice([8, 16, 64]),
        "enable_prefix_caching": rng.random() < 0.7,
        "num_swap_blocks": rng.choice([0, 20, 60]),
        "preemption_mode": rng.choice(["recompute", "swap"]),
        "policy": rng.choice(["fcfs", "shortest_prompt_first"]),
    }
    requests = random_requests(rng)
    ends = {i: (rng.choice(["abort", "stop"]), rng.randint(1, 12)) for i in range(0, 12, 4)}
    run = Run(is_pipelined=is_pipelined, **limits)
    bad = {(i, requests[i]["num_prompt"] + rng.randint(0, 8)) for i in NOT_FINITE}
    run.device.bad_tokens = bad
    for at in rng.sample(range(0, 120, 8), num_faults):  # no plan is at fault twice
        call = rng.choice(["dispatch", "result"]), rng.choice([at, -1 - at])
        run.device.faults[call] = rng.choice([Interrupted(), RuntimeError("at fault")])
    added = []
    while len(added) < len(requests) or run.scheduler.has_work:
        if len(added) < len(requests) and (rng.random() < 0.8 or not run.scheduler.has_work):
            added.append(run.add(f"r{len(added)}", **requests[len(added)]))
        if not run.scheduler.has_work:
            continue
        try:
            iteration = run.step()
        except Interrupted:
            continue
        assert len(iteration.result.tokens) == len(iteration.sampled)
        for i, (reason, length) in ends.items():
            for seq in added[i].sequences if i < len(added) else ():
                if not seq.is_finished and not seq.is_beam and seq.num_output_tokens >= length:
                    run.scheduler.finish(seq, reason, "x" if reason == "stop" else None)
    memory = run.scheduler.memory
    assert memory.num_free_blocks == memory.num_total_blocks
    assert memory.num_free_swap_blocks == memory.num_swap_blocks
    return run, [outputs(request) for request in added], added


@pytest.mark.parametrize("seed", range(60))
def test_random_workloads_come_out_as_without_pipelining(seed):
    _, wanted, _ = run_random(seed, is_pipelined=False)
    run, found, added = run_random(seed, is_pipelined=True)
    assert found == wanted
    assert [request.request_id for request in added if request.error] == [
        f"r{i}" for i, request in enumerate(wanted) if "error" in {reason for _, reason in request}
    ]
    assert run.num_ahead > 0


@pytest.mark.filterwarnings("ignore:a step has failed and is planned again:RuntimeWarning")
@pytest.mark.parametrize("seed", range(30))
def test_calls_to_the_device_that_raise_change_no_output(seed):
    """Or are interrupted: at a dispatch or a result, ahead or not, before it is done or after."""
    _, wanted, _ = run_random(seed, is_pipelined=False)
    run, found, _ = run_random(seed, is_pipelined=True, num_faults=12)
    assert len(run.device.faults) < 12
    assert found == wanted
