"""Scheduler: what each iteration runs, whom it admits and whom it preempts."""

import subprocess
import sys

from paged_jax.memory.block_manager import BlockManager
from paged_jax.scheduling.request import SequenceStatus
from tests.scheduling.fakes import (
    FakeExecutor,
    chunks,
    make_request,
    make_scheduler,
    names,
    never_ends,
    outputs,
    run_step,
    run_to_end,
)


def test_decodes_run_beside_the_prefill_of_new_requests():
    scheduler = make_scheduler()
    executor = FakeExecutor(scheduler.memory, never_ends)
    scheduler.add(make_request("a", 5))
    assert chunks(run_step(scheduler, executor)) == [("a", 0, 5)]
    scheduler.add(make_request("b", 3))
    batch = run_step(scheduler, executor)
    assert (names(batch.decodes), chunks(batch)) == (["a"], [("b", 0, 3)])
    assert names(run_step(scheduler, executor).decodes) == ["a", "b"]


def test_admission_keeps_to_max_num_seqs():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 4, max_tokens=2))
    batches = run_to_end(scheduler, FakeExecutor(scheduler.memory, never_ends))
    assert [name for batch in batches for name, *_ in chunks(batch)] == ["a", "b", "c"]
    assert chunks(batches[2]) == [("c", 0, 4)]


def test_admission_keeps_to_max_prefill_seqs():
    scheduler = make_scheduler(max_prefill_seqs=2)
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name in "abc":
        scheduler.add(make_request(name, 4))
    assert chunks(run_step(scheduler, executor)) == [("a", 0, 4), ("b", 0, 4)]
    assert chunks(run_step(scheduler, executor)) == [("c", 0, 4)]


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode():
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    executor = FakeExecutor(scheduler.memory, never_ends)
    scheduler.add(make_request("a", 5))
    scheduler.add(make_request("b", 20))
    scheduler.add(make_request("c", 2))
    assert chunks(run_step(scheduler, executor)) == [("a", 0, 5), ("b", 0, 3)]
    batch = run_step(scheduler, executor)
    assert (names(batch.decodes), chunks(batch)) == (["a"], [("b", 3, 7)])
    assert chunks(run_step(scheduler, executor)) == [("b", 10, 7)]
    batch = run_step(scheduler, executor)
    assert chunks(batch) == [("b", 17, 3), ("c", 0, 2)]
    assert batch.num_tokens == 1 + 5
    assert batch.num_samples == 3
    assert names(run_step(scheduler, executor).decodes) == ["a", "b", "c"]


def test_prompt_tokens_to_be_prefilled_count_as_reserved():
    scheduler = make_scheduler(num_blocks=9, block_size=4, max_num_batched_tokens=8)
    executor = FakeExecutor(scheduler.memory, never_ends)
    scheduler.add(make_request("a", 18, max_tokens=2))
    run_step(scheduler, executor)
    usage = scheduler.memory_usage()
    assert (usage.token_states, usage.reserved, usage.internal, usage.free) == (8, 10, 2, 12)
    assert usage.external == 0


def test_the_head_of_the_queue_is_not_overtaken():
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    executor = FakeExecutor(scheduler.memory, never_ends)
    scheduler.add(make_request("a", 17, max_tokens=3))  # 5 of 8 blocks
    scheduler.add(make_request("b", 16, max_tokens=3))  # 4: does not fit beside it
    scheduler.add(make_request("c", 1, max_tokens=1))  # would fit
    assert chunks(run_step(scheduler, executor)) == [("a", 0, 17)]
    assert chunks(run_step(scheduler, executor)) == []
    assert chunks(run_step(scheduler, executor)) == []
    assert chunks(run_step(scheduler, executor)) == [("b", 0, 16), ("c", 0, 1)]


def test_admission_leaves_the_watermark_free():
    scheduler = make_scheduler(num_blocks=11, block_size=4, watermark=0.2)  # 2 of 10 blocks
    executor = FakeExecutor(scheduler.memory, never_ends)
    scheduler.add(make_request("a", 16))
    scheduler.add(make_request("b", 20, max_tokens=1))
    assert chunks(run_step(scheduler, executor)) == [("a", 0, 16)]  # 4 + 5 would leave 1
    scheduler.abort("b")
    scheduler.add(make_request("c", 12, max_tokens=1))
    assert chunks(run_step(scheduler, executor)) == [("c", 0, 12)]  # 5 + 3 leave 2


def test_the_watermark_does_not_keep_out_a_request_that_is_alone():
    scheduler = make_scheduler(num_blocks=11, block_size=4, watermark=0.5)
    request = make_request("a", 38, max_tokens=3)
    scheduler.add(request)
    run_to_end(scheduler, FakeExecutor(scheduler.memory, never_ends))
    assert len(request.sequences[0].output_token_ids) == 3


def test_each_of_n_sequences_runs_with_its_own_stream():
    request = make_request("a", 5, seed=2**32 + 9, n=3)
    scheduler = make_scheduler()
    scheduler.add(request)
    run_to_end(scheduler, FakeExecutor(scheduler.memory))
    assert request.sequences[0].sampling_seed == 9
    assert len({seq.sampling_seed for seq in request.sequences}) == 3
    assert all(0 <= seq.sampling_seed < 2**32 for seq in request.sequences)
    assert [seq.index for seq in request.sequences] == [0, 1, 2]
    assert len({tuple(tokens) for tokens, _ in outputs(request)}) == 3


def test_the_preempted_resume_before_those_who_came_later():
    scheduler = make_scheduler(num_blocks=7, block_size=2, max_num_seqs=3)
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name in "abc":
        scheduler.add(make_request(name, 3, max_tokens=8))
    run_step(scheduler, executor)
    scheduler.add(make_request("d", 1, max_tokens=1))
    run_step(scheduler, executor)
    batch = run_step(scheduler, executor)
    assert names(batch.preempted) == ["c"]
    assert batch.prefills == []  # no admission while blocks are short
    admitted = []
    while scheduler.has_work:
        admitted += [name for name, *_ in chunks(run_step(scheduler, executor))]
    assert admitted.index("c") < admitted.index("d")


def test_a_preempted_sequence_prefills_its_prompt_and_output_together():
    scheduler = make_scheduler(num_blocks=7, block_size=2)
    executor = FakeExecutor(scheduler.memory, never_ends)
    first, second = (make_request(name, 3, max_tokens=6) for name in "ab")
    scheduler.add(first)
    scheduler.add(second)
    while not scheduler.counters.num_preemptions:
        run_step(scheduler, executor)
    victim = second.sequences[0]
    assert victim.status is SequenceStatus.WAITING
    assert victim.num_computed_tokens == 0
    assert second.num_preemptions == 1
    num_tokens = victim.num_tokens
    assert num_tokens > 3
    while victim.status is SequenceStatus.WAITING:
        batch = run_step(scheduler, executor)
    assert chunks(batch) == [("b", 0, num_tokens)]
    run_to_end(scheduler, executor)
    assert victim.num_output_tokens == 6


def test_a_sequence_in_mid_prefill_is_preempted_before_older_ones():
    scheduler = make_scheduler(num_blocks=7, block_size=2, max_num_seqs=2, max_num_batched_tokens=2)
    executor = FakeExecutor(scheduler.memory, never_ends)
    scheduler.add(make_request("a", 2, max_tokens=6))
    scheduler.add(make_request("b", 8, max_tokens=2))
    assert chunks(run_step(scheduler, executor)) == [("a", 0, 2)]
    assert chunks(run_step(scheduler, executor)) == [("b", 0, 1)]  # four blocks, a has two
    assert chunks(run_step(scheduler, executor)) == [("b", 1, 1)]
    batch = run_step(scheduler, executor)
    assert (names(batch.decodes), names(batch.preempted)) == (["a"], ["b"])
    assert batch.prefills == []
    assert scheduler.counters.num_recomputed_tokens == 2
    run_to_end(scheduler, executor)


def test_a_pool_of_the_exact_size_holds_a_sequence_to_its_end():
    """The last token's slot is never needed: 5 + 4 tokens take 8 slots."""
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    request = make_request("a", 5, max_tokens=4)
    scheduler.add(request)
    run_to_end(scheduler, FakeExecutor(scheduler.memory, never_ends))
    assert outputs(request) == [([6, 7, 1, 2], "length")]
    assert scheduler.counters.num_preemptions == 0


class RecordingManager(BlockManager):
    """Notes what is asked of it, and denies the appends it is told to."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size, enable_prefix_caching=False)
        self.max_num_tokens: list[int] = []
        self.num_denials = 0

    def allocate(self, seq_id, token_ids, **limits):
        self.max_num_tokens.append(limits["max_num_tokens"])
        return super().allocate(seq_id, token_ids, **limits)

    def append(self, seq_id, num_tokens):
        if self.num_denials:
            self.num_denials -= 1
            return False
        return super().append(seq_id, num_tokens)


def test_memory_is_told_the_most_slots_a_sequence_can_need():
    scheduler = make_scheduler(memory=RecordingManager(9, 4))
    scheduler.add(make_request("a", 5, max_tokens=4))
    scheduler.schedule()
    assert scheduler.memory.max_num_tokens == [8]


def test_nobody_is_admitted_in_an_iteration_that_preempted():
    scheduler = make_scheduler(memory=RecordingManager(9, 4))
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name in "ab":
        scheduler.add(make_request(name, 5, max_tokens=4))
    run_step(scheduler, executor)
    scheduler.memory.num_denials = 1
    batch = run_step(scheduler, executor)
    assert (names(batch.preempted), batch.prefills) == (["b"], [])
    assert chunks(run_step(scheduler, executor)) == [("b", 0, 6)]


def test_host_side_imports_no_jax():
    code = (
        "import sys, paged_jax.scheduling.scheduler, paged_jax.memory.block_manager; "
        "sys.exit('jax' in sys.modules or 'flax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
