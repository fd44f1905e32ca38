"""Sequences swapped out to host blocks and back: what moves, what is shared, what fits."""

import pytest

from paged_jax.memory.block_manager import BlockManager


def tokens_of(seq_id: int, num_tokens: int) -> list[int]:
    """Those that no other sequence has."""
    return [1000 * (seq_id + 1) + i for i in range(num_tokens)]


def admit(manager: BlockManager, seq_id: int, num_tokens: int) -> list[int]:
    """A sequence of its own tokens, all computed and committed; returns its live table."""
    tokens = tokens_of(seq_id, num_tokens)
    assert manager.allocate(seq_id, tokens, max_num_tokens=2 * num_tokens) == 0
    manager.commit_full_blocks(seq_id, tokens, num_tokens)
    return manager.block_table(seq_id)


def restore(manager: BlockManager, num_tokens: int, *seq_ids: int, keep: int = 0) -> bool:
    tokens = {seq_id: tokens_of(seq_id, num_tokens) for seq_id in seq_ids}
    return manager.swap_in(seq_ids, tokens, keep_free_blocks=keep)


def fill(manager: BlockManager) -> None:
    """Take every block, and give it back with nothing cached."""
    size = manager.num_free_blocks * manager.block_size
    manager.allocate(99, tokens_of(99, size), max_num_tokens=size, use_cache=False)
    manager.free(99)


def test_all_blocks_go_to_the_host_and_come_back_into_any_others():
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=5)
    blocks = list(admit(manager, 0, 10))
    assert manager.swap_out([0])
    assert (manager.num_free_blocks, manager.num_free_swap_blocks) == (8, 2)
    outs, ins = manager.take_swaps()
    assert [block for block, _ in outs] == blocks
    assert len({host for _, host in outs}) == 3
    assert ins == []
    with pytest.raises(KeyError):
        manager.block_table(0)

    fill(manager)
    others = list(admit(manager, 1, 4))
    assert restore(manager, 10, 0)
    table = manager.block_table(0)
    assert not {*table} & {*others}
    assert manager.pending_swaps().ins == [
        (host, block) for (_, host), block in zip(outs, table, strict=True)
    ]
    assert manager.num_free_swap_blocks == 2, "held until they have been read"
    manager.take_swaps()
    assert manager.num_free_swap_blocks == 5
    manager.check_invariants()


def test_what_the_prefix_cache_still_holds_is_not_moved_back():
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=4)
    first, second, partial = admit(manager, 0, 10)
    manager.swap_out([0])
    outs = manager.take_swaps().outs
    manager.allocate(1, tokens_of(1, 28), max_num_tokens=28)  # evicts the second, and not the first
    assert manager.stats.evictions == 1
    manager.free(1)
    assert restore(manager, 10, 0)
    assert manager.block_table(0)[0] == first
    assert second != partial
    assert [host for host, _ in manager.pending_swaps().ins] == [host for _, host in outs[1:]]


def test_what_is_found_under_another_salt_is_not_taken():
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=4)
    tokens = tokens_of(0, 8)
    for seq_id, salt in ((0, "a"), (1, "b")):
        manager.allocate(seq_id, tokens, salt=salt, max_num_tokens=8)
        manager.commit_full_blocks(seq_id, tokens, 8)
    manager.swap_out([0])
    manager.take_swaps()
    manager.allocate(2, tokens_of(2, 24), max_num_tokens=24)
    manager.free(2)
    assert manager.swap_in([0], {0: tokens}, salt="a")
    assert len(manager.pending_swaps().ins) == 2


def test_blocks_that_are_still_to_be_written_are_not_taken_from_the_cache():
    """Half of its prompt is computed; another has computed all of the same since."""
    manager = BlockManager(num_blocks=17, block_size=4, num_swap_blocks=4)
    tokens = tokens_of(0, 16)
    manager.allocate(0, tokens, max_num_tokens=16)
    manager.commit_full_blocks(0, tokens, 8)
    manager.swap_out([0])
    manager.allocate(1, tokens, max_num_tokens=16)
    manager.commit_full_blocks(1, tokens, 16)
    manager.take_swaps()
    assert manager.swap_in([0], {0: tokens})
    table, other = manager.block_table(0), manager.block_table(1)
    assert table[:2] == other[:2]
    assert not {*table[2:]} & {*other}


def test_samples_share_on_return_what_they_shared():
    manager = BlockManager(num_blocks=12, block_size=4, num_swap_blocks=6)
    admit(manager, 0, 10)
    for child in (1, 2):
        manager.fork(0, child)
    for seq_id in (0, 1):
        assert manager.append(seq_id, 11)
    assert len(manager.take_copies()) == 2
    assert manager.swap_out([0, 1, 2])
    assert manager.num_free_swap_blocks == 1, "two blocks in common, three of their own"
    manager.take_swaps()
    fill(manager)
    tokens = {seq_id: tokens_of(0, 10) for seq_id in (0, 1, 2)}
    assert manager.swap_in([0, 1, 2], tokens)
    tables = [manager.block_table(seq_id) for seq_id in (0, 1, 2)]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({*tables[0], *tables[1], *tables[2]}) == 5
    manager.take_swaps()
    assert all(manager.append(seq_id, 12) for seq_id in (0, 1, 2))
    assert manager.take_copies() == []
    manager.check_invariants()


def test_a_block_that_was_to_be_copied_goes_out_as_its_source():
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=4)
    shared = admit(manager, 0, 2)[0]
    manager.fork(0, 1)
    manager.append(1, 3)
    assert manager.swap_out([1])
    assert [block for block, _ in manager.pending_swaps().outs] == [shared]
    assert manager.pending_copies() == []
    assert manager.append(0, 3), "the block is its own now"
    manager.check_invariants()


def test_a_group_goes_whole_or_not_at_all():
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=3)
    tables = [list(admit(manager, seq_id, 8)) for seq_id in (0, 1)]
    assert not manager.swap_out([0, 1])
    assert [manager.block_table(seq_id) for seq_id in (0, 1)] == tables
    assert manager.pending_swaps() == ([], [])
    assert manager.num_free_swap_blocks == 3
    assert manager.swap_out([1])
    assert not manager.swap_out([0])


def test_without_a_host_pool_nothing_is_swapped_out():
    manager = BlockManager(num_blocks=9, block_size=4)
    admit(manager, 0, 4)
    assert manager.num_swap_blocks == manager.num_free_swap_blocks == 0
    assert not manager.swap_out([0])
    with pytest.raises(ValueError, match="num_swap_blocks must be at least 0, got -1"):
        BlockManager(num_blocks=9, block_size=4, num_swap_blocks=-1)


def test_a_group_that_does_not_fit_stays_where_it_is():
    manager = BlockManager(num_blocks=5, block_size=4, num_swap_blocks=3)
    admit(manager, 0, 10)
    manager.swap_out([0])
    manager.take_swaps()
    fill(manager)
    admit(manager, 1, 8)
    assert not restore(manager, 10, 0)
    manager.free(1)
    assert not restore(manager, 10, 0, keep=2)
    assert manager.pending_swaps() == ([], [])
    assert restore(manager, 10, 0, keep=1)


def test_cached_blocks_that_it_takes_again_count_as_free_ones_it_needs():
    manager = BlockManager(num_blocks=5, block_size=4, num_swap_blocks=3)
    admit(manager, 0, 10)
    manager.swap_out([0])
    manager.take_swaps()
    admit(manager, 1, 8)
    assert manager.num_cached_blocks == 2
    assert not restore(manager, 10, 0)
    assert manager.num_cached_blocks == 2


def test_host_blocks_are_not_used_again_until_they_have_been_read():
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=2)
    admit(manager, 0, 8)
    admit(manager, 1, 8)
    manager.swap_out([0])
    manager.take_swaps()
    fill(manager)
    assert restore(manager, 8, 0)
    assert not manager.swap_out([1])
    manager.take_swaps()
    assert manager.swap_out([1])


def test_what_has_not_come_back_yet_is_not_moved_out_again():
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=2)
    admit(manager, 0, 8)
    manager.swap_out([0])
    manager.take_swaps()
    fill(manager)
    assert restore(manager, 8, 0)
    hosts = [host for host, _ in manager.pending_swaps().ins]
    assert manager.swap_out([0]), "though the host pool is full"
    assert manager.pending_swaps() == ([], [])
    assert restore(manager, 8, 0)
    assert [host for host, _ in manager.pending_swaps().ins] == hosts


def test_what_has_not_gone_yet_goes_there_and_back():
    """The step that was to move it failed, and now it can go on."""
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=2)
    manager.allocate(0, tokens_of(0, 8), max_num_tokens=8)  # nothing is committed
    blocks = list(manager.block_table(0))
    manager.swap_out([0])
    assert restore(manager, 8, 0)
    outs, ins = manager.pending_swaps()
    assert [block for block, _ in outs] == blocks
    assert [host for host, _ in ins] == [host for _, host in outs]
    assert manager.take_swap_outs() == outs
    assert manager.take_swaps() == ([], ins)
    assert manager.num_free_swap_blocks == 2


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_sequence_that_ends_while_swapped_out_frees_its_host_blocks(is_moved):
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=4)
    admit(manager, 0, 6)
    manager.fork(0, 1)
    manager.swap_out([0, 1])
    if is_moved:
        manager.take_swaps()
    manager.free(0)
    assert manager.num_free_swap_blocks == 2
    manager.free(1)
    assert manager.num_free_swap_blocks == 4
    assert manager.pending_swaps() == ([], [])
    with pytest.raises(KeyError):
        manager.free(1)


def test_a_sequence_that_ends_before_it_is_back_is_not_moved():
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=4)
    admit(manager, 0, 8)
    manager.swap_out([0])
    manager.take_swaps()
    fill(manager)
    assert restore(manager, 8, 0)
    manager.free(0)
    assert manager.pending_swaps() == ([], [])
    assert (manager.num_free_blocks, manager.num_free_swap_blocks) == (8, 4)


def test_a_sequence_that_is_swapped_out_is_known_all_the_same():
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=4)
    admit(manager, 0, 4)
    admit(manager, 1, 4)
    manager.swap_out([0])
    with pytest.raises(ValueError, match="sequence 0 has a block table already"):
        admit(manager, 0, 4)
    with pytest.raises(ValueError, match="sequence 0 has a block table already"):
        manager.fork(1, 0)
    for act in (lambda: manager.swap_out([0]), lambda: manager.append(0, 5)):
        with pytest.raises(KeyError):
            act()
    with pytest.raises(KeyError):
        restore(manager, 4, 1)
    manager.check_invariants()


def test_what_is_discarded_is_not_found_nor_what_follows_it():
    manager = BlockManager(num_blocks=9, block_size=4)
    tokens = tokens_of(0, 16)
    for seq_id, num_tokens in ((0, 16), (1, 8)):
        manager.allocate(seq_id, tokens[:num_tokens], max_num_tokens=16)
        manager.commit_full_blocks(seq_id, tokens[:num_tokens], num_tokens)
    manager.free(0)  # its last two blocks are cached, and follow those that the other holds
    assert manager.num_cached_blocks == 2
    manager.free(1, discard=True)
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (0, 8)
    assert manager.allocate(2, tokens, max_num_tokens=16) == 0
    manager.check_invariants()


def test_what_others_hold_is_not_discarded():
    manager = BlockManager(num_blocks=9, block_size=4)
    tokens = tokens_of(0, 12)
    for seq_id, num_tokens in ((0, 8), (1, 12)):
        manager.allocate(seq_id, tokens[:num_tokens], max_num_tokens=12)
        manager.commit_full_blocks(seq_id, tokens[:num_tokens], num_tokens)
    manager.free(1, discard=True)
    manager.free(0)
    assert manager.allocate(2, tokens, max_num_tokens=12) == 8


def test_the_host_pool_outlives_the_cache_on_the_device():
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=6)
    for seq_id in range(4):
        admit(manager, seq_id, 8)
    assert manager.pin(tokens_of(3, 8)) == 8
    manager.free(3)
    manager.swap_out([0])
    manager.take_swaps()
    manager.swap_out([1])  # not read from the device yet
    assert manager.reset() == [2, 1]
    assert manager.num_pinned_blocks == manager.num_cached_blocks == 0
    assert (manager.num_free_blocks, manager.num_free_swap_blocks) == (8, 4)
    assert manager.pending_swaps() == ([], [])
    assert restore(manager, 8, 0)
    assert len(manager.pending_swaps().ins) == 2
    manager.check_invariants()


def test_those_that_went_out_together_are_lost_together():
    """Of a group that came back but for the step, one's last block is still on the device."""
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=6)
    admit(manager, 0, 4)
    admit(manager, 1, 4)
    manager.swap_out([0, 1])
    manager.take_swaps()
    fill(manager)
    assert restore(manager, 4, 0, 1)
    assert manager.append(1, 5)
    assert manager.swap_out([0, 1])
    assert len(manager.pending_swaps().outs) == 1
    assert sorted(manager.reset()) == [0, 1]
    assert manager.num_free_swap_blocks == 6


def test_usage_is_that_of_the_device():
    manager = BlockManager(num_blocks=9, block_size=4, num_swap_blocks=6)
    admit(manager, 0, 6)
    admit(manager, 1, 8)
    manager.swap_out([0])
    usage = manager.usage({1: 8})
    assert (usage.token_states, usage.free, usage.cached) == (8, 24, 4)
    restore(manager, 6, 0)
    usage = manager.usage({0: 6, 1: 8})
    assert (usage.token_states, usage.internal, usage.free) == (14, 2, 16)
