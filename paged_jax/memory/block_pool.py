"""Physical blocks: which are free, and how many tables hold each of the others."""

NULL_BLOCK = 0


class BlockPool:
    """`num_blocks` physical blocks, of which block 0 is the null block and never handed out.

    A block is free (count 0, on the free list) or used (count >= 1, not on it), never both. The
    free list is a stack: recently freed blocks are reused first.
    """

    __slots__ = ("_free", "_ref_counts", "num_blocks")

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._ref_counts = [0] * num_blocks

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out in all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block: int) -> int:
        """How many references to `block` are held; 0 means free."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference; RuntimeError if there are fewer."""
        free = self._free
        if count > len(free):
            raise RuntimeError(f"{count} blocks asked for, {len(free)} free of {self.capacity}")
        first = len(free) - count
        blocks = free[first:]
        del free[first:]
        blocks.reverse()
        ref_counts = self._ref_counts
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def acquire(self, block: int) -> None:
        """Add a reference to a used block; RuntimeError if it is free."""
        if self._ref_counts[block] == 0:
            raise RuntimeError(f"block {block} is not in use, it cannot be shared")
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference, the last one frees the block; RuntimeError if it is free already."""
        count = self._ref_counts[block]
        if count == 0:
            raise RuntimeError(f"block {block} is not in use, it cannot be freed (freed twice?)")
        self._ref_counts[block] = count - 1
        if count == 1:
            self._free.append(block)

    def check_invariants(self) -> None:
        """AssertionError unless every block is in exactly one state."""
        free = set(self._free)
        assert len(free) == len(self._free), f"listed as free twice: {sorted(self._free)}"
        assert NULL_BLOCK not in free, "the null block is on the free list"
        assert self._ref_counts[NULL_BLOCK] == 0, "the null block is referenced"
        for block in range(1, self.num_blocks):
            count = self._ref_counts[block]
            assert count >= 0, f"block {block} has {count} references"
            assert (count == 0) == (block in free), f"block {block}: {count=}, {block in free=}"
