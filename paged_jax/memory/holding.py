"""What the block manager keeps for each sequence beside its table."""

from collections.abc import Hashable, Sequence

from paged_jax.memory.prefix_cache import Node


class Holding:
    """One sequence's part in the prefix cache, and what it may share."""

    __slots__ = (
        "last_node",
        "next_full",
        "num_prefill_tokens",
        "num_published",
        "num_restored",
        "salt",
        "shares",
    )

    def __init__(
        self,
        salt: Hashable,
        num_prefill_tokens: int,
        block_size: int,
        match: Sequence[Node],
        *,
        num_restored: int = 0,
        shares: bool = False,
    ):
        self.salt = salt
        self.num_prefill_tokens = num_prefill_tokens  # slots asked for by `allocate`
        self.num_published = len(match)  # leading blocks that have nodes
        self.last_node = match[-1] if match else None  # of the last of these
        self.next_full = (len(match) + 1) * block_size  # tokens that complete one more block
        # Leading blocks that it had published before it was swapped out, and may have to again.
        self.num_restored = num_restored
        self.shares = shares  # whether another sequence may hold its blocks beyond those published

    @property
    def num_full(self) -> int:
        """Leading blocks that are known to be computed."""
        return max(self.num_published, self.num_restored)
