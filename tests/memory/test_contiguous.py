"""Contiguous memory: what the Orca baselines reserve, what they waste, and what does not fit."""

import pytest

from paged_jax.memory.block_manager import BlockManager
from paged_jax.memory.interface import MemoryManager
from paged_jax.memory.policies import make_memory, memory_policies
from paged_jax.memory.usage import MemoryUsage


def manager_of(policy: str, num_slots: int, *, block_size: int = 1, max_model_len: int = 64):
    return make_memory(policy, 1 + num_slots // block_size, block_size, max_model_len=max_model_len)


def allocate(manager: MemoryManager, seq_id: int, num_prompt: int, num_output: int, **options):
    """Whether a sequence gets in that ends after so many tokens; the last one needs no slot."""
    found = manager.allocate(
        seq_id, [7] * num_prompt, max_num_tokens=num_prompt + num_output - 1, **options
    )
    assert found in (0, None)
    return found is not None


def test_contiguous_holes_cannot_be_used_together_and_blocks_can():
    """Four reservations, the 2nd and 4th freed: a fifth fits their sum, but neither hole."""
    contiguous, paged = manager_of("orca_oracle", 64), BlockManager(5, 16)
    for seq_id in range(4):
        assert allocate(contiguous, seq_id, 8, 9)
        assert paged.allocate(seq_id, [7] * 16, max_num_tokens=16) == 0
    for manager in (contiguous, paged):
        manager.free(1)
        manager.free(3)
    assert not allocate(contiguous, 4, 24, 9)
    assert contiguous.usage({0: 16, 2: 16}) == MemoryUsage(
        token_states=32, reserved=0, internal=0, external=32, free=0
    )
    assert paged.allocate(4, [7] * 32, max_num_tokens=32) == 0
    assert paged.num_free_blocks == 0


def test_2048_slots_for_three_tokens_waste_2045_and_blocks_of_16_at_most_15():
    contiguous = manager_of("orca_max", 2048, max_model_len=2048)
    assert contiguous.allocate(0, [7, 7], max_num_tokens=3) == 0
    assert contiguous.append(0, 3)
    assert contiguous.usage({0: 3}) == MemoryUsage(
        token_states=3, reserved=0, internal=2045, external=0, free=0
    )
    paged = BlockManager(129, 16)
    paged.allocate(0, [7, 7], max_num_tokens=3)
    paged.append(0, 3)
    assert paged.usage({0: 3}).internal == 13 <= 15


@pytest.mark.parametrize(
    ("policy", "num_output", "reserved"),
    [
        ("orca_oracle", 25, 34),
        ("orca_oracle", 1, 10),
        ("orca_pow2", 25, 10 + 32),  # the paper's example: 25 tokens, 32 positions
        ("orca_pow2", 32, 10 + 32),
        ("orca_pow2", 33, 64),  # the longest sequence there is, not 10 + 64
        ("orca_pow2", 1, 10 + 1),
        ("orca_max", 1, 64),
        ("orca_max", 54, 64),
    ],
)
def test_what_each_policy_reserves(policy, num_output, reserved):
    manager = manager_of(policy, 64)
    assert allocate(manager, 0, 10, num_output)
    assert manager.block_table(0) == list(range(1, 1 + reserved))
    usage = manager.usage({0: 10})
    needed = 10 + num_output - 1
    assert usage.token_states + usage.reserved == needed
    assert usage.internal == reserved - needed
    assert usage.external + usage.free == 64 - reserved
    if policy == "orca_pow2":
        assert reserved - 10 <= 2 * num_output


def test_a_chunk_is_split_into_what_is_used_what_is_not_and_rounding():
    manager = manager_of("orca_pow2", 256, block_size=4)
    allocate(manager, 0, 10, 25)  # 42 slots in a chunk of 16 blocks, 34 of which will be used
    assert manager.usage({0: 6}) == MemoryUsage(
        token_states=6, reserved=28, internal=8, external=22, free=192
    )
    assert len(manager.block_table(0)) == 11
    assert manager.num_free_blocks == 48


def test_max_holds_as_many_of_the_longest_as_fit_whatever_comes():
    """15.7K slots: seven sequences, and the rest of the pool is of no use to anybody."""
    manager = manager_of("orca_max", 15_728, block_size=16, max_model_len=2048)
    admitted = [allocate(manager, seq_id, 10, 10) for seq_id in range(8)]
    assert admitted == [True] * 7 + [False]
    usage = manager.usage(dict.fromkeys(range(7), 10))
    assert usage.external == 15_728 - 7 * 2048
    assert usage.shares()["external"] == pytest.approx(0.0885, abs=1e-4)
    assert usage.free == 0


def test_holes_count_as_external_while_they_are_too_small_for_what_waits():
    manager = manager_of("orca_oracle", 64)
    for seq_id in range(8):
        allocate(manager, seq_id, 4, 5)
    for seq_id in (0, 2, 4):
        manager.free(seq_id)
    computed = dict.fromkeys((1, 3, 5, 6, 7), 4)
    assert (manager.usage(computed).external, manager.usage(computed).free) == (0, 24)
    assert not allocate(manager, 8, 4, 6)  # 9 slots: a chunk of 16
    assert (manager.usage(computed).external, manager.usage(computed).free) == (24, 0)
    manager.free(1)  # now there is room; whether somebody still waits is not known yet
    del computed[1]
    assert (manager.usage(computed).external, manager.usage(computed).free) == (0, 32)
    assert allocate(manager, 8, 4, 6)
    assert manager.usage(computed | {8: 0}).external == 7  # the rounding


def test_freed_reservations_can_be_had_again_in_one_piece():
    manager = manager_of("orca_oracle", 64)
    for _ in range(3):
        for seq_id in range(16):
            assert allocate(manager, seq_id, 2, 3)
        assert not allocate(manager, 16, 1, 1)
        for seq_id in (3, 14, 7, 0, 9, 1, 15, 4, 12, 2, 8, 13, 5, 11, 6, 10):
            manager.free(seq_id)
        assert allocate(manager, 0, 32, 33), "the pool as a whole"
        manager.free(0)
        manager.check_invariants()


def test_sequences_never_ask_for_more_than_was_reserved():
    manager = manager_of("orca_oracle", 64)
    allocate(manager, 0, 4, 5)
    allocate(manager, 1, 4, 5)
    table = list(manager.block_table(0))
    for num_tokens in range(5, 9):
        assert manager.append(0, num_tokens)
    assert manager.block_table(0) == table
    with pytest.raises(ValueError, match="sequence 0: 9 slots asked for, 8 reserved"):
        manager.append(0, 9)


def test_admission_leaves_no_blocks_free_since_nobody_grows():
    manager = manager_of("orca_oracle", 64)
    assert allocate(manager, 0, 32, 33, keep_free_blocks=60)


@pytest.mark.parametrize("policy", ["orca_max", "orca_pow2", "orca_oracle"])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("max_model_len", [5, 16, 33])
def test_what_is_needed_is_what_an_empty_pool_must_have(policy, block_size, max_model_len):
    def num_held(num_blocks: int) -> int:
        manager = make_memory(policy, 1 + num_blocks, block_size, max_model_len=max_model_len)
        most = max_model_len - 1
        return sum(manager.allocate(i, [7] * 3, max_num_tokens=most) is not None for i in range(3))

    manager = make_memory(policy, 1000, block_size, max_model_len=max_model_len)
    needed = manager.num_blocks_needed(3, max_model_len - 1)
    assert manager.num_blocks_needed(3, max_model_len - 1, 3) == 3 * needed
    for num_blocks in (needed, 2 * needed - 1, 2 * needed, 3 * needed - 1, 3 * needed):
        assert num_held(num_blocks) == num_blocks // needed


def test_nothing_is_found_kept_or_pinned():
    manager = manager_of("orca_oracle", 64)
    allocate(manager, 0, 16, 1)
    manager.commit_full_blocks(0, [7] * 16, 16)
    manager.free(0)
    assert manager.num_cached_blocks == manager.num_pinned_blocks == 0
    assert allocate(manager, 1, 16, 1), "and nothing of it was found"
    assert manager.num_pinned_tokens([7] * 16) == 0
    with pytest.raises(ValueError, match="contiguous memory keeps no prefixes"):
        manager.pin([7] * 16)
    with pytest.raises(KeyError):
        manager.unpin([7] * 16)


def test_a_sequence_is_allocated_once_and_freed_once():
    manager = manager_of("orca_oracle", 64)
    allocate(manager, 3, 4, 1)
    with pytest.raises(ValueError, match="sequence 3 has a block table already"):
        allocate(manager, 3, 4, 1)
    with pytest.raises(ValueError, match="sequence 4 has no tokens"):
        allocate(manager, 4, 0, 2)
    manager.free(3)
    with pytest.raises(KeyError, match="3"):
        manager.free(3)


def test_reset_forgets_every_sequence():
    manager = manager_of("orca_pow2", 64)
    for seq_id in range(3):
        allocate(manager, seq_id, 4, 5)
    manager.fork(1, 9)
    assert sorted(manager.reset()) == [0, 1, 2, 9]
    manager.check_invariants()
    assert manager.num_free_blocks == 64


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        ("orca_max", "every sequence reserves at least 64 slots, a chunk of 16 blocks of 4"),
        ("orca", "unknown memory_policy 'orca'; one of paged, orca_max, orca_pow2, orca_oracle"),
    ],
)
def test_what_cannot_be_is_refused(policy, error):
    with pytest.raises(ValueError, match=error):
        make_memory(policy, 1 + 15, 4, max_model_len=64)
    assert "orca_max" in memory_policies()


def test_the_null_block_is_never_handed_out():
    manager = manager_of("orca_oracle", 8)
    for seq_id in range(8):
        allocate(manager, seq_id, 1, 1)
    assert sorted(block for i in range(8) for block in manager.block_table(i)) == list(range(1, 9))


# Sequences that branch off


def test_who_writes_first_moves_with_all_its_blocks_to_the_chunk_reserved_for_it():
    manager = manager_of("orca_oracle", 64, block_size=4)
    allocate(manager, 0, 10, 6, num_sequences=2)
    assert manager.num_free_blocks == 16 - 2 * 4
    assert manager.num_forks_left(0) == 1
    manager.fork(0, 1)
    assert manager.num_free_blocks == 16 - 2 * 4
    assert manager.block_table(1) == manager.block_table(0) == [1, 2, 3, 4]
    assert manager.usage({0: 10, 1: 10}) == MemoryUsage(
        token_states=10, reserved=15 + 5, internal=0, external=2, free=32, shared=16
    )
    assert manager.append(0, 11)
    assert manager.block_table(0) == [5, 6, 7, 8]
    assert manager.append(1, 11)
    assert manager.block_table(1) == [1, 2, 3, 4]
    assert manager.take_copies() == [(1, 5), (2, 6), (3, 7)]
    assert manager.usage({0: 11, 1: 11}).shared == 0


def test_a_reservation_for_branches_that_never_came_is_given_up():
    manager = manager_of("orca_oracle", 64)
    allocate(manager, 0, 10, 7, num_sequences=3)
    manager.fork(0, 1)
    assert manager.num_free_blocks == 64 - 3 * 16
    manager.append(0, 11)
    assert manager.num_free_blocks == 64 - 2 * 16
    assert manager.num_forks_left(0) == 0


def test_beams_replace_each_other_within_what_was_reserved():
    manager = manager_of("orca_oracle", 48)
    allocate(manager, 0, 8, 9, num_sequences=3)
    manager.fork(0, 1)
    manager.fork(0, 2)
    assert manager.num_free_blocks == 0
    for seq_id in range(3):
        assert manager.append(seq_id, 9)
    manager.take_copies()
    for step in range(1, 8):  # one goes on in three ways, the others end
        ids = range(3 * step, 3 * step + 3)
        for seq_id in ids:
            manager.fork(3 * step - 2, seq_id)
        for seq_id in range(3 * step - 3, 3 * step):
            manager.free(seq_id)
        for seq_id in ids:
            assert manager.append(seq_id, 9 + step)
        assert len(manager.take_copies()) == 2 * (8 + step)
        manager.check_invariants()


def test_a_branch_that_nothing_was_reserved_for_needs_room_when_it_writes():
    manager = manager_of("orca_oracle", 32)
    allocate(manager, 0, 8, 9)
    allocate(manager, 1, 8, 9)
    manager.fork(0, 2)
    assert not manager.append(2, 9)
    assert manager.block_table(2) == manager.block_table(0)
    manager.free(1)
    assert manager.append(2, 9)
    assert manager.num_free_blocks == 0


def test_a_copy_that_nobody_else_needs_is_not_made():
    """As its source is let go before, the sequences that were to get the copy have it instead."""
    manager = manager_of("orca_oracle", 64)
    allocate(manager, 0, 8, 9, num_sequences=3)
    manager.fork(0, 1)
    manager.append(1, 9)
    manager.fork(1, 2)
    assert manager.pending_copies()
    manager.free(0)
    assert manager.pending_copies() == []
    assert manager.block_table(1) == manager.block_table(2) == list(range(1, 17))
    assert manager.append(2, 9)
    assert [source for source, _ in manager.take_copies()] == list(range(1, 9))
    manager.check_invariants()


def test_a_copy_of_a_copy_that_was_not_made_comes_from_the_original():
    manager = manager_of("orca_oracle", 64)
    allocate(manager, 0, 8, 9, num_sequences=3)
    manager.fork(0, 1)
    manager.append(1, 9)  # the step is lost
    manager.fork(1, 2)
    assert manager.append(2, 9)
    copies = manager.take_copies()
    assert [source for source, _ in copies] == 2 * list(range(1, 9))
    assert len({target for _, target in copies}) == 16
