"""Forks share blocks; who writes into a shared one takes a copy; branches die alone."""

import pytest

from paged_jax.memory.block_manager import BlockManager


def admit(manager: BlockManager, seq_id: int, num_tokens: int) -> list[int]:
    """A sequence of tokens that no other has; returns its live table."""
    tokens = [1000 * (seq_id + 1) + i for i in range(num_tokens)]
    assert manager.allocate(seq_id, tokens, max_num_tokens=2 * num_tokens) == 0
    return manager.block_table(seq_id)


def test_a_fork_takes_no_block():
    manager = BlockManager(num_blocks=6, block_size=4)
    table = admit(manager, 0, 6)
    manager.fork(0, 1)
    manager.fork(1, 2)
    assert manager.block_table(1) == manager.block_table(2) == table
    assert manager.num_free_blocks == 3
    assert manager.take_copies() == []
    assert manager.stats.forks == 2
    manager.check_invariants()


def test_the_first_write_copies_and_the_last_holder_writes_in_place():
    manager = BlockManager(num_blocks=9, block_size=4)
    table = admit(manager, 0, 6)
    full, partial = table
    manager.fork(0, 1)
    manager.fork(0, 2)
    assert manager.num_free_blocks == 6
    assert all(manager.append(seq_id, 7) for seq_id in (0, 1, 2))
    first, second = table[1], manager.block_table(1)[1]
    assert manager.block_table(2) == [full, partial]
    assert manager.take_copies() == [(partial, first), (partial, second)]
    assert len({partial, first, second}) == 3
    assert table[0] == manager.block_table(1)[0] == full
    assert manager.num_free_blocks == 4
    # No further copy, up to the next border and beyond it.
    for num_tokens in (8, 9):
        assert all(manager.append(seq_id, num_tokens) for seq_id in (0, 1, 2))
    assert manager.take_copies() == []
    assert manager.stats.copies == 2


def test_at_a_block_border_branches_take_a_new_block_each_and_copy_nothing():
    manager = BlockManager(num_blocks=9, block_size=4)
    admit(manager, 0, 8)
    manager.fork(0, 1)
    assert manager.append(0, 9)
    assert manager.append(1, 9)
    assert manager.take_copies() == []
    assert manager.block_table(0)[:2] == manager.block_table(1)[:2]
    assert manager.block_table(0)[2] != manager.block_table(1)[2]


def test_blocks_of_one_slot_are_never_copied():
    manager = BlockManager(num_blocks=9, block_size=1)
    admit(manager, 0, 3)
    manager.fork(0, 1)
    assert manager.append(0, 4)
    assert manager.append(1, 4)
    assert manager.take_copies() == []
    assert manager.num_free_blocks == 3


def test_a_branch_that_dies_gives_its_blocks_back_at_once():
    manager = BlockManager(num_blocks=9, block_size=4)
    admit(manager, 0, 6)
    manager.fork(0, 1)
    manager.append(1, 7)
    assert manager.num_free_blocks == 5
    manager.free(1)
    assert manager.num_free_blocks == 6
    assert manager.take_copies() == [], "the copy was for nobody"
    assert manager.stats.copies == 0
    assert manager.append(0, 7)
    assert manager.take_copies() == [], "nobody shares the block any more"
    manager.check_invariants()


def test_two_branches_that_die_in_one_step_free_a_shared_block_once():
    manager = BlockManager(num_blocks=4, block_size=4)
    admit(manager, 0, 6)
    manager.fork(0, 1)
    manager.free(0)
    assert manager.num_free_blocks == 1
    manager.free(1)
    assert manager.num_free_blocks == 3
    with pytest.raises(KeyError):
        manager.free(1)
    manager.check_invariants()


def test_a_copy_without_a_free_block_is_refused_and_changes_nothing():
    manager = BlockManager(num_blocks=3, block_size=4)
    table = admit(manager, 0, 6)
    manager.fork(0, 1)
    before = list(table)
    assert not manager.append(0, 7)
    assert table == before
    assert manager.take_copies() == []
    manager.check_invariants()
    manager.free(1)  # preempted: now the block is its own
    assert manager.append(0, 7)
    assert table == before


def test_a_fork_of_a_copy_still_to_be_made_copies_from_its_source():
    manager = BlockManager(num_blocks=9, block_size=4)
    partial = admit(manager, 0, 2)[0]
    manager.fork(0, 1)
    manager.append(1, 3)
    manager.fork(1, 2)
    manager.append(2, 3)
    first, second = manager.block_table(1)[0], manager.block_table(2)[0]
    assert manager.take_copies() == [(partial, first), (partial, second)]
    assert len({partial, first, second}) == 3


def test_a_target_occurs_once_however_often_its_block_changes_hands():
    manager = BlockManager(num_blocks=4, block_size=4)
    partial = admit(manager, 0, 2)[0]
    manager.fork(0, 1)
    manager.append(1, 3)
    target = manager.block_table(1)[0]
    manager.free(1)
    manager.fork(0, 2)
    manager.append(2, 3)
    assert manager.block_table(2) == [target], "the block freed last is taken first"
    assert manager.take_copies() == [(partial, target)]


def test_a_source_that_all_others_let_go_of_is_written_in_place():
    manager = BlockManager(num_blocks=4, block_size=4)
    a = admit(manager, 0, 2)[0]
    b = admit(manager, 1, 2)[0]
    manager.fork(0, 2)
    manager.append(2, 3)  # a -> c
    table = manager.block_table(2)
    c = table[0]
    manager.free(0)
    assert table == [a]
    assert manager.pending_copies() == []
    manager.check_invariants()
    manager.fork(1, 3)
    manager.append(3, 3)
    assert manager.take_copies() == [(b, c)]


def test_of_several_copies_of_one_block_the_last_holder_s_absence_saves_one():
    """Forks of a copy that is still to be made go back with it."""
    manager = BlockManager(num_blocks=9, block_size=4)
    a = admit(manager, 0, 6)[1]
    for child in (1, 2):
        manager.fork(0, child)
        manager.append(child, 7)
    manager.fork(1, 3)
    other = manager.block_table(2)[1]
    num_free = manager.num_free_blocks
    manager.free(0)
    assert [manager.block_table(seq_id)[1] for seq_id in (1, 2, 3)] == [a, other, a]
    assert manager.num_free_blocks == num_free + 1
    assert manager.pending_copies() == [(a, other)]
    manager.check_invariants()
    manager.free(1)
    manager.free(3)
    assert manager.block_table(2)[1] == a
    assert manager.take_copies() == []
    manager.check_invariants()


def test_reordered_beams_copy_once_for_each_surviving_divergence():
    """Of beams 0, 1 and 2, two go on from beam 2, one from beam 0, and beam 1 dies."""
    manager = BlockManager(num_blocks=20, block_size=4)
    admit(manager, 0, 6)
    for beam in (1, 2):
        manager.fork(0, beam)
    for beam in range(3):
        manager.append(beam, 7)
    assert len(manager.take_copies()) == 2
    num_free = manager.num_free_blocks
    manager.fork(2, 3)
    manager.free(1)
    assert manager.num_free_blocks == num_free + 1
    for beam in (3, 2, 0):
        assert manager.append(beam, 8)
    copies = manager.take_copies()
    assert copies == [(manager.block_table(2)[1], manager.block_table(3)[1])]
    manager.check_invariants()


def test_copies_are_pending_until_a_step_makes_them():
    """A step may fail before it does; then the next one has its copies and those since."""
    manager = BlockManager(num_blocks=20, block_size=4)
    table = admit(manager, 0, 6)
    partial = table[1]
    for child in (1, 2):
        manager.fork(0, child)
    manager.append(0, 7)
    assert manager.pending_copies() == manager.pending_copies() == [(partial, table[1])]
    manager.append(1, 7)
    other = manager.block_table(1)[1]
    assert manager.pending_copies() == [(partial, table[1]), (partial, other)]
    manager.free(0)
    assert manager.take_copies() == [(partial, other)]
    assert manager.pending_copies() == []
    assert manager.stats.copies == 1


def test_a_fork_needs_a_parent_and_an_id_of_its_own():
    manager = BlockManager(num_blocks=5, block_size=4)
    admit(manager, 0, 4)
    with pytest.raises(KeyError):
        manager.fork(7, 1)
    with pytest.raises(ValueError, match="sequence 0 has a block table already"):
        manager.fork(0, 0)
    manager.check_invariants()


def test_parallel_samples_hold_half_the_prompt_blocks_of_requests_apart():
    """Four samples of 100 prompt tokens in 7 blocks: 7 + 3 against 28."""
    apart = BlockManager(num_blocks=100, block_size=16)
    for seq_id in range(4):
        admit(apart, seq_id, 100)
        apart.append(seq_id, 101)
    together = BlockManager(num_blocks=100, block_size=16)
    admit(together, 0, 100)
    for seq_id in (1, 2, 3):
        together.fork(0, seq_id)
    for seq_id in range(4):
        together.append(seq_id, 101)
    held = [manager.num_total_blocks - manager.num_free_blocks for manager in (apart, together)]
    assert held == [28, 10]


def test_usage_counts_a_shared_slot_once():
    manager = BlockManager(num_blocks=11, block_size=4)
    admit(manager, 0, 6)
    for seq_id in (1, 2):
        manager.fork(0, seq_id)
    usage = manager.usage(dict.fromkeys(range(3), 6))
    assert (usage.token_states, usage.internal, usage.free) == (6, 2, 32)
    assert usage.shared == 16
    for seq_id in range(3):
        manager.append(seq_id, 7)
    usage = manager.usage(dict.fromkeys(range(3), 7))
    assert (usage.token_states, usage.internal, usage.free) == (4 + 3 * 3, 3, 24)
    assert usage.shared == 8
    assert usage.total == 40


def test_usage_while_the_shared_prompt_is_written():
    """The siblings fork when the last chunk is planned, before it is computed."""
    manager = BlockManager(num_blocks=11, block_size=4)
    admit(manager, 0, 10)
    manager.fork(0, 1)
    usage = manager.usage({0: 8, 1: 0})
    assert (usage.token_states, usage.reserved, usage.internal) == (8, 2, 2)
