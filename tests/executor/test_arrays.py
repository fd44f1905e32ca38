"""The arrays that go to the device, against plain constructions from the sequences."""

import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.executor.buckets import (
    MIN_PREFILL_TOKENS,
    bucket_of,
    decode_buckets,
    padded,
    prefill_buckets,
)
from paged_jax.executor.decode_rows import DecodeRows
from paged_jax.executor.histories import Histories
from paged_jax.executor.prefill_arrays import PrefillShape, prefill_arrays
from paged_jax.executor.sampling_rows import SamplingArrays, sampling_rows
from paged_jax.memory.block_manager import BlockManager
from paged_jax.scheduling.batch import PrefillChunk
from paged_jax.steps.logits import NO_SLOT
from tests.scheduling.fakes import (
    VOCAB_SIZE,
    FakeExecutor,
    make_request,
    make_scheduler,
    never_ends,
    run_step,
)

MAX_SEQS, MAX_LEN, BLOCK_SIZE = 6, 64, 4

PARAMS = (
    {"temperature": 0},
    {"temperature": 0.7, "top_k": 3},
    {"top_p": 0.5, "seed": 5},
    {"repetition_penalty": 1.5},
    {"temperature": 0, "frequency_penalty": 0.5, "logprobs": 2},
    {"min_tokens": 4, "stop_token_ids": [7, 9]},
    {"logit_bias": {3: 1.5, 4: -100.0}},
    {"min_p": 0.2, "logprobs": 0},
)


def assert_decode_arrays_are_fresh(arrays, seqs, memory, histories) -> None:
    """What `DecodeRows.update` gives equals what is built from nothing.

    Of the tokens that a row's sampling depends on, the newest is written by the step.
    """
    tokens, positions, tables, lens, sampling = (jax.tree.map(np.asarray, x) for x in arrays)
    B = len(tokens)
    assert len(seqs) <= B <= MAX_SEQS
    wanted_tables = np.zeros((B, MAX_LEN // BLOCK_SIZE), np.int32)
    for row, seq in enumerate(seqs):
        table = memory.block_table(seq.seq_id)
        wanted_tables[row, : len(table)] = table
    np.testing.assert_array_equal(tokens, padded([seq.token_ids[-1] for seq in seqs], B))
    np.testing.assert_array_equal(lens, padded([seq.num_tokens for seq in seqs], B))
    np.testing.assert_array_equal(positions, padded([seq.num_tokens - 1 for seq in seqs], B))
    np.testing.assert_array_equal(tables, wanted_tables)
    for array in (tokens, positions, tables, lens):
        assert array.dtype == np.int32
    slots = sampling.rules.slots
    owners = [row for row, seq in enumerate(seqs) if seq.request.params.has_penalties]
    assert np.flatnonzero(slots != NO_SLOT).tolist() == owners
    assert len(set(slots[owners])) == len(owners)
    for row in owners:
        held = np.asarray(histories.array)[slots[row], : seqs[row].num_tokens - 1]
        assert held.tolist() == seqs[row].token_ids[:-1]
    wanted = SamplingArrays(VOCAB_SIZE).batch(sampling_rows(seqs, B), seqs, slots[: len(seqs)])
    for (path, actual), value in zip(
        jax.tree.leaves_with_path(sampling), jax.tree.leaves(wanted), strict=True
    ):
        assert (actual.shape, actual.dtype) == (value.shape, value.dtype), path
        np.testing.assert_array_equal(actual, value, err_msg=str(path))


def decode_rows(memory) -> tuple[DecodeRows, Histories]:
    histories = Histories(MAX_SEQS, MAX_LEN, [MAX_SEQS])
    arrays = SamplingArrays(VOCAB_SIZE)
    rows = DecodeRows(memory, arrays, histories, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN)
    return rows, histories


def decode(histories: Histories, arrays) -> None:
    """What a decode step does to the history."""
    tokens, positions, _, _, sampling = arrays
    slots = sampling.rules.slots
    histories.array = histories.array.at[slots, positions].set(tokens, mode="drop")


@pytest.mark.parametrize("seed", range(12))
def test_decode_rows_mirror_any_run_of_joins_ends_preemptions_and_aborts(seed):
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=rng.choice([17, 25, 60]),
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=rng.choice([6, 16, 64]),
        enable_prefix_caching=seed % 2 == 0,
    )
    rows, histories = decode_rows(scheduler.memory)
    executor = FakeExecutor(scheduler.memory)
    names, num_checked = [], 0
    for i in range(150):
        if rng.random() < 0.35:
            names.append(f"r{i}")
            num_prompt = rng.randint(1, 40)
            params = rng.choice(PARAMS) | {"max_tokens": rng.randint(4, MAX_LEN - num_prompt)}
            params |= {"n": rng.choice([1, 1, 3]), "ignore_eos": rng.random() < 0.5}
            scheduler.add(make_request(names[-1], num_prompt, **{"seed": i} | params))
        if names and rng.random() < 0.1:
            scheduler.abort(rng.choice(names))
        if not scheduler.has_work:
            continue
        batch = scheduler.schedule()
        if batch.decodes:
            arrays = rows.update(batch.decodes, tables_changed=bool(batch.copies))
            assert_decode_arrays_are_fresh(arrays, batch.decodes, scheduler.memory, histories)
            num_checked += 1
        else:
            rows.forget()
        if rng.random() < 0.05:
            continue  # the step fails before it reaches the device
        if firsts := list(batch.first_sampled()):
            slots = histories.slots(firsts, beside=batch.decodes, anew=True)
            for seq, slot in zip(firsts, slots, strict=True):
                if seq.request.params.has_penalties:
                    held = np.asarray(histories.array)[slot, : seq.num_tokens]
                    assert held.tolist() == seq.token_ids
        if batch.decodes:
            decode(histories, arrays)
        tokens = executor.run(batch)
        if rng.random() < 0.05:
            continue  # its results never come
        scheduler.update(batch, tokens)
    assert num_checked > 80
    assert scheduler.memory.stats.copies > 0
    if len(names) > 3 and scheduler.memory.num_total_blocks == 16:
        assert scheduler.counters.num_preemptions > 0


def test_decode_rows_follow_blocks_that_copies_replace_and_needless_ones_put_back():
    scheduler = make_scheduler(block_size=BLOCK_SIZE, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN)
    memory, executor = scheduler.memory, FakeExecutor(scheduler.memory, never_ends)
    rows, histories = decode_rows(memory)
    request = make_request("a", 6, n=3, max_tokens=20)
    scheduler.add(request)
    run_step(scheduler, executor)
    first, second, third = request.sequences
    shared = memory.block_table(first.seq_id)[1]

    def update(batch) -> list[int]:
        """The second block of each row."""
        arrays = rows.update(batch.decodes, tables_changed=bool(batch.copies))
        assert_decode_arrays_are_fresh(arrays, batch.decodes, memory, histories)
        return arrays[2][: len(batch.decodes), 1].tolist()

    batch = scheduler.schedule()  # and this step fails before it copies anything
    one, two = (target for _, target in batch.copies)
    assert update(batch) == [one, two, shared]
    scheduler.finish(third, "abort")
    batch = scheduler.schedule()
    assert batch.copies == [(shared, two)]
    assert update(batch) == [shared, two]
    # The last copy is needless: the step that failed once more is without any.
    scheduler.finish(first, "abort")
    batch = scheduler.schedule()
    assert batch.copies == []
    assert update(batch) == [shared]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_prefill_arrays_place_every_token_of_any_chunks(data):
    bucket = data.draw(st.sampled_from(prefill_buckets(256)))
    max_chunks = data.draw(st.integers(1, 8))
    budget = data.draw(st.integers(0, bucket))
    memory = BlockManager(400, BLOCK_SIZE)
    chunks = []
    while budget and len(chunks) < max_chunks:
        size = data.draw(st.integers(1, budget))
        start = data.draw(st.integers(0, 50))
        [seq] = make_request(str(len(chunks)), start + size + 3, seed=len(chunks)).sequences
        num_cached = memory.allocate(seq.seq_id, seq.token_ids, max_num_tokens=400)
        assert num_cached == 0
        chunks.append(PrefillChunk(seq, start, size))
        budget -= size
    shape = PrefillShape.of(bucket, max_chunks)
    arrays = prefill_arrays(chunks, shape, memory, max_chunks=max_chunks, max_blocks=80)
    check_prefill_arrays(arrays, chunks, shape, memory)


def check_prefill_arrays(arrays, chunks, shape, memory) -> None:
    N, T, R = shape
    index = arrays.layout
    owner = np.array(
        [i for i, chunk in enumerate(chunks) for _ in range(chunk.num_tokens)], np.int32
    )
    n = len(owner)
    assert [array.shape for array in (arrays.tokens, arrays.positions, index.slots)] == [(N,)] * 3
    # Packed one after the other, then padding that goes to the null block.
    wanted_last = np.cumsum([chunk.num_tokens for chunk in chunks]) - 1
    np.testing.assert_array_equal(arrays.last[: len(chunks)], wanted_last)
    assert (index.slots[n:] == 0).all()
    j = 0
    for chunk in chunks:
        table = memory.block_table(chunk.seq.seq_id)
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            assert arrays.tokens[j] == chunk.seq.token_ids[position]
            assert arrays.positions[j] == position
            slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            assert index.slots[j] == slot
            j += 1
    # Each token stands in one place of the rows, which place_of names.
    flat = index.token_of.reshape(-1)
    assert index.token_of.shape == (R, T)
    assert sorted(flat[flat < N]) == list(range(n))
    assert (flat[flat >= N] == N).all()
    np.testing.assert_array_equal(flat[index.place_of[:n]], np.arange(n))
    # A row holds consecutive tokens of one sequence from its start on, and its table.
    for row in range(R):
        tokens = index.token_of[row][index.token_of[row] < N]
        if not tokens.size:
            assert index.context_lens[row] == 0
            assert not index.block_tables[row].any()
            continue
        [i] = set(owner[tokens])
        start = index.query_starts[row]
        np.testing.assert_array_equal(index.token_of[row, : tokens.size], tokens)
        np.testing.assert_array_equal(
            arrays.positions[tokens], np.arange(start, start + tokens.size)
        )
        assert index.context_lens[row] == start + tokens.size
        table = memory.block_table(chunks[i].seq.seq_id)
        np.testing.assert_array_equal(index.block_tables[row], padded(table, 80))


@pytest.mark.parametrize("max_chunks", [1, 2, 4, 16, 64])
def test_prefill_rows_suffice_for_the_worst_split_into_chunks(max_chunks):
    """One token in each chunk but the last needs the most rows."""
    for num_tokens in [*range(1, 130), 200, 256, 500, 512, 4096]:
        N, T, R = PrefillShape.of(num_tokens, max_chunks)
        num_chunks = range(1, min(max_chunks, N) + 1)
        assert max(n - 1 + -(-(N - n + 1) // T) for n in num_chunks) == R


@pytest.mark.parametrize("largest", [*range(1, 70), 100, 256, 333, 512, 4096, 5000])
def test_prefill_buckets_cover_and_at_most_double(largest):
    buckets = prefill_buckets(largest)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == largest
    assert len(buckets) < 24
    for size in range(MIN_PREFILL_TOKENS, largest + 1):
        assert size <= bucket_of(buckets, size) < 2 * size


@pytest.mark.parametrize("largest", [2, 3, 7, 16, 40])
def test_no_step_has_fewer_rows_than_the_least(largest):
    buckets = decode_buckets(largest, least=2)
    assert (buckets[0], buckets[-1]) == (2, largest)
    assert buckets == [size for size in decode_buckets(largest) if size > 1]


@pytest.mark.parametrize("largest", [*range(1, 70), 100, 256, 1000])
def test_decode_buckets_cover_and_at_most_double(largest):
    buckets = decode_buckets(largest)
    assert buckets == sorted(set(buckets))
    assert (buckets[0], buckets[-1]) == (1, largest)
    assert len(buckets) < 24
    for size in range(1, largest + 1):
        assert size <= bucket_of(buckets, size) < 2 * size or size == 1
