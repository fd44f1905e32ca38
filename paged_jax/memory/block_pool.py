"""Physical blocks: which are free, which are cached, and the references to all others."""

from collections import OrderedDict

NULL_BLOCK = 0


class BlockPool:
    """`num_blocks` physical blocks, of which block 0 is the null block and never handed out.

    A block is in exactly one state:

    | state  | references   | contents                          |
    |--------|--------------|-----------------------------------|
    | used   | at least one | of the sequences that hold it     |
    | cached | none         | kept until the block is needed    |
    | free   | none         | worthless                         |

    The free list is a stack: the block freed last is reused first. Cached blocks stand in the order
    in which their last reference was dropped, so the first is the least recently used.
    """

    __slots__ = ("_cached", "_free", "capacity", "num_blocks", "ref_counts")

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.capacity = num_blocks - 1  # blocks that can be handed out, used or not
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        # References to each block; public for hot loops, which only read it.
        self.ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out; a cached block counts once it is evicted."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def cached(self) -> list[int]:
        """The cached blocks in the order of eviction."""
        return list(self._cached)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free) - len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference; RuntimeError if there are fewer."""
        free = self._free
        if count > len(free):
            raise RuntimeError(f"{count} blocks asked for, {len(free)} free of {self.capacity}")
        first = len(free) - count
        blocks = free[first:]
        del free[first:]
        blocks.reverse()
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def acquire(self, block: int) -> None:
        """Add a reference to a used or cached block; RuntimeError if it is free."""
        count = self.ref_counts[block]
        if count == 0:
            if block not in self._cached:
                raise RuntimeError(f"block {block} is not in use, it cannot be shared")
            del self._cached[block]
        self.ref_counts[block] = count + 1

    def release(self, block: int, *, keep: bool = False) -> None:
        """Drop a reference; RuntimeError if there is none.

        Dropping the last one frees the block, or makes it the newest cached block if `keep`.
        """
        count = self.ref_counts[block]
        if count == 0:
            raise RuntimeError(f"block {block} is not in use, it cannot be freed (freed twice?)")
        self.ref_counts[block] = count - 1
        if count == 1:
            if keep:
                self._cached[block] = None
            else:
                self._free.append(block)

    def exchange(self, block: int, other: int) -> None:
        """Let two used blocks exchange their references."""
        counts = self.ref_counts
        counts[block], counts[other] = counts[other], counts[block]

    def evict(self) -> int:
        """Free the least recently used cached block and return it; KeyError if there is none."""
        block, _ = self._cached.popitem(last=False)
        self._free.append(block)
        return block

    def discard(self, block: int) -> None:
        """Free this cached block; KeyError if it is not cached."""
        del self._cached[block]
        self._free.append(block)

    def check_invariants(self) -> None:
        """AssertionError unless every block is in exactly one state."""
        free = set(self._free)
        assert len(free) == len(self._free), f"listed as free twice: {sorted(self._free)}"
        unused = free | self._cached.keys()
        assert len(unused) == len(free) + len(self._cached), "a block is free and cached"
        assert NULL_BLOCK not in unused, "the null block can be handed out"
        assert self.ref_counts[NULL_BLOCK] == 0, "the null block is referenced"
        for block in range(1, self.num_blocks):
            count = self.ref_counts[block]
            assert count >= 0, f"block {block} has {count} references"
            assert (count == 0) == (block in unused), f"block {block}: {count=}, {unused=}"
