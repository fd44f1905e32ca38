"""What fits: bytes of a token's keys and values, blocks of a pool, sequences in a pool.

An engine sizes its pool by these functions (`paged_jax.engine.pool_size`), and so does a plan for a
GPU that is not here (`experiments.paper.fig01_capacity`).
"""


def kv_bytes_per_token(
    *, num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_value: int
) -> int:
    """Bytes of one KV slot: a token's keys and values in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_value


def bytes_per_block(*, block_size: int, **layout: int) -> int:
    """Bytes of one block; `layout` has the arguments of `kv_bytes_per_token`."""
    return block_size * kv_bytes_per_token(**layout)


def room_for_kv(
    memory_bytes: int, weight_bytes: int, *, share: float = 1.0, in_use_bytes: int = 0
) -> int:
    """Bytes for the KV cache in a `share` of the memory, beside weights and bytes in use.

    The rest of the memory is for activations, the framework and the driver. A negative result says
    how many bytes are missing.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of the memory must be above 0 and at most 1, got {share}")
    return int(memory_bytes * share) - in_use_bytes - weight_bytes


def num_blocks_in(room_bytes: int, bytes_per_block: int) -> int:
    """Blocks that can be handed out, at least 0; the null block takes room as well."""
    return max(room_bytes // bytes_per_block - 1, 0)


def num_sequences_in(num_blocks: int, block_size: int, num_tokens: int) -> int:
    """Sequences of `num_tokens` slots each, none of which shares a block with another."""
    if num_tokens < 1:
        raise ValueError(f"a sequence has at least 1 token, got {num_tokens}")
    return num_blocks // -(-num_tokens // block_size)
