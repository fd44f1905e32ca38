"""Block manager: tables cover exactly what was asked for, all or nothing, and nothing leaks."""

import pytest

from paged_jax.memory.block_manager import BlockManager
from paged_jax.memory.interface import MemoryManager
from paged_jax.memory.usage import MemoryUsage


def allocate(manager: MemoryManager, seq_id: int, num_tokens: int, keep: int = 0) -> bool:
    """Whether a sequence of that many tokens, none of them cached, gets a table."""
    found = manager.allocate(
        seq_id, [7] * num_tokens, max_num_tokens=2 * num_tokens, keep_free_blocks=keep
    )
    assert found in (0, None)
    return found is not None


def test_capacity_leaves_out_the_null_block():
    manager = BlockManager(num_blocks=9, block_size=4)
    assert manager.num_total_blocks == manager.num_free_blocks == 8
    assert allocate(manager, 0, 32)
    assert not allocate(manager, 1, 1)


def test_a_table_grows_only_at_block_borders():
    manager = BlockManager(num_blocks=9, block_size=4)
    assert allocate(manager, 0, 3)
    table = manager.block_table(0)
    lengths = []
    for num_tokens in range(4, 14):
        assert manager.append(0, num_tokens)
        lengths.append(len(table))
    assert lengths == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert manager.block_table(0) is table  # the live list: a mirror copies its tail


def test_append_may_add_several_blocks_and_repeats_harmlessly():
    manager = BlockManager(num_blocks=9, block_size=4)
    allocate(manager, 0, 1)
    assert manager.append(0, 17)
    assert manager.append(0, 17)
    assert manager.append(0, 2)
    assert len(manager.block_table(0)) == 5


def test_append_is_all_or_nothing():
    manager = BlockManager(num_blocks=5, block_size=4)
    allocate(manager, 0, 8)
    allocate(manager, 1, 4)
    before = list(manager.block_table(0))
    assert not manager.append(0, 16)
    assert manager.block_table(0) == before
    assert manager.num_free_blocks == 1
    assert manager.append(0, 12)


def test_allocate_is_all_or_nothing_and_keeps_blocks_free():
    manager = BlockManager(num_blocks=5, block_size=4)
    assert not allocate(manager, 0, 17)
    assert not allocate(manager, 0, 12, keep=2)
    assert manager.num_free_blocks == 4
    assert allocate(manager, 0, 12, keep=1)
    assert manager.num_free_blocks == 1


def test_freed_blocks_are_reused():
    manager = BlockManager(num_blocks=5, block_size=4)
    allocate(manager, 0, 8)
    allocate(manager, 1, 8)
    blocks = list(manager.block_table(0))
    manager.free(0)
    allocate(manager, 2, 8)
    assert manager.block_table(2) == blocks


def test_a_sequence_is_freed_once_and_allocated_once():
    manager = BlockManager(num_blocks=5, block_size=4)
    allocate(manager, 7, 4)
    with pytest.raises(ValueError, match="sequence 7 has a block table already"):
        allocate(manager, 7, 4)
    manager.free(7)
    with pytest.raises(KeyError, match="7"):
        manager.free(7)
    manager.check_invariants()


def test_freeing_a_table_whose_block_is_free_already_raises_with_the_block():
    manager = BlockManager(num_blocks=5, block_size=4)
    allocate(manager, 0, 4)
    manager.block_table(0).append(3)  # breaks the contract: the list is not the caller's
    with pytest.raises(RuntimeError, match="block 3 is not in use"):
        manager.free(0)


def test_a_sequence_without_tokens_is_refused():
    manager = BlockManager(num_blocks=5, block_size=4)
    with pytest.raises(ValueError, match="sequence 3 has no tokens"):
        allocate(manager, 3, 0)


@pytest.mark.parametrize("block_size", [0, -1])
def test_block_size_must_be_positive(block_size):
    with pytest.raises(ValueError, match=f"block_size must be at least 1, got {block_size}"):
        BlockManager(num_blocks=4, block_size=block_size)


def test_holes_between_sequences_are_usable():
    """The paper's external fragmentation: two holes hold what fits neither of them."""
    manager = BlockManager(num_blocks=9, block_size=4)
    for seq_id in range(4):
        assert allocate(manager, seq_id, 8)
    manager.free(1)
    manager.free(3)
    assert allocate(manager, 4, 16)
    assert manager.num_free_blocks == 0


@pytest.mark.parametrize("num_tokens", [1, 3, 15, 16, 17, 31, 32, 33])
def test_a_sequence_wastes_less_than_a_block(num_tokens):
    """Where a reservation of 2048 slots wastes 2045 on a sequence of 3 tokens."""
    manager = BlockManager(num_blocks=2048 // 16 + 1, block_size=16)
    manager.allocate(0, [7], max_num_tokens=2048)
    for length in range(2, num_tokens + 1):
        manager.append(0, length)
    usage = manager.usage({0: num_tokens})
    assert usage.internal == -num_tokens % 16 <= 15
    assert usage.reserved == usage.external == 0


def test_usage_tells_tokens_to_come_from_waste():
    manager = BlockManager(num_blocks=11, block_size=16)
    allocate(manager, 0, 40)  # a prompt of which one chunk of 24 is computed
    allocate(manager, 1, 16)
    manager.append(1, 17)  # decodes into its second block
    usage = manager.usage({0: 24, 1: 17})
    assert usage == MemoryUsage(
        token_states=41, reserved=16, internal=8 + 15, external=0, free=5 * 16
    )
    assert usage.total == manager.num_total_blocks * 16
    assert sum(usage.shares().values()) == pytest.approx(1.0)
    assert usage.shares()["token_states"] == pytest.approx(41 / 160)


def test_usage_of_an_empty_pool_is_free():
    assert BlockManager(num_blocks=3, block_size=2).usage({}).shares()["free"] == 1.0
