"""What fits in a GPU's memory, as the engine and a plan for another GPU count it."""

import pytest

from paged_jax import Engine
from paged_jax.memory.sizing import (
    bytes_per_block,
    kv_bytes_per_token,
    num_blocks_in,
    num_sequences_in,
    room_for_kv,
)

GIB = 2**30


def test_a_token_of_opt_13b_takes_800_kib():
    per_token = kv_bytes_per_token(num_layers=40, num_kv_heads=40, head_dim=128, bytes_per_value=2)
    assert per_token == 800 * 1024
    assert 2048 * per_token == pytest.approx(1.6e9, rel=0.05)


def test_the_room_is_what_weights_and_others_leave_of_a_share():
    assert room_for_kv(100, 30) == 70
    assert room_for_kv(100, 30, share=0.9, in_use_bytes=5) == 55
    assert room_for_kv(100, 130) == -30
    for share in (0.0, -1.0, 1.1):
        with pytest.raises(ValueError, match=f"at most 1, got {share}"):
            room_for_kv(100, 30, share=share)


def test_the_null_block_takes_room_and_is_not_counted():
    assert num_blocks_in(1000, 100) == 9
    assert num_blocks_in(199, 100) == 0
    assert num_blocks_in(-5, 100) == 0


def test_sequences_take_whole_blocks():
    assert num_sequences_in(100, 16, 16) == 100
    assert num_sequences_in(100, 16, 17) == 50
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        num_sequences_in(100, 16, 0)


def test_the_engine_sizes_its_pool_by_the_same_functions(tiny_model, monkeypatch):
    """On a machine whose memory holds the weights and seven blocks."""
    config = tiny_model.config
    per_block = bytes_per_block(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=16,
        head_dim=config.head_dim,
        bytes_per_value=4,
    )
    room = 7 * per_block + 5
    monkeypatch.setattr("paged_jax.engine.pool_size.HOST_POOL_BYTES", room)
    engine = Engine(tiny_model, block_size=16, warm_up=False)
    assert engine.num_blocks == num_blocks_in(room, per_block) == 6
