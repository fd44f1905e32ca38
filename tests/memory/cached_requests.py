"""Requests to a block manager, without a scheduler: admitted, computed, committed, freed."""

from collections.abc import Iterable

from paged_jax.memory.block_manager import BlockManager


class Requests:
    """Admits sequences by their tokens, and computes and commits them."""

    def __init__(self, num_blocks: int, block_size: int, **options: bool):
        self.manager = BlockManager(1 + num_blocks, block_size, **options)
        self.tokens: dict[int, list[int]] = {}

    def admit(self, tokens: Iterable[int], **options) -> tuple[int, int | None]:
        """(id of a new sequence, its cached tokens or None if it does not fit)."""
        seq_id = len(self.tokens)
        self.tokens[seq_id] = list(tokens)
        return seq_id, self.manager.allocate(
            seq_id, self.tokens[seq_id], max_num_tokens=len(self.tokens[seq_id]), **options
        )

    def compute(self, seq_id: int, num_tokens: int | None = None) -> None:
        tokens = self.tokens[seq_id]
        self.manager.commit_full_blocks(
            seq_id, tokens, len(tokens) if num_tokens is None else num_tokens
        )
        self.manager.check_invariants()

    def run(self, tokens: Iterable[int], **options) -> int:
        """A request from admission to its end; returns its cached tokens."""
        seq_id, found = self.admit(tokens, **options)
        assert found is not None
        self.compute(seq_id)
        self.manager.free(seq_id)
        self.manager.check_invariants()
        return found
