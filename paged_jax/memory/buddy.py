"""Buddy allocation: consecutive units in chunks of 1, 2, 4, ... (Knuth, TAOCP, section 2.5).

A chunk of `2**order` units begins at a multiple of its size. The two halves of a chunk are buddies:
their addresses differ in one bit, that of their size. A freed chunk merges with its buddy as long
as the buddy is free as a whole. So an aligned range of `2**order` units is free if and only if it
lies in a free chunk.

A pool whose size is no power of two begins as the chunks of its binary digits, the largest first: a
chunk's buddy is then either in the pool as a whole or never free.
"""

from bisect import bisect_left, insort


def order_of(num_units: int) -> int:
    """The order of the smallest chunk that has `num_units` units, at least one."""
    return (num_units - 1).bit_length()


class BuddyAllocator:
    """Hands out chunks of the units 0 to `num_units` - 1.

    Each comes from the smallest free chunk in which it fits, at the lowest address.
    """

    __slots__ = ("_free", "_orders", "num_free", "num_units")

    def __init__(self, num_units: int):
        if num_units < 1:
            raise ValueError(f"a pool has at least one unit, got {num_units}")
        self.num_units = self.num_free = num_units
        self._orders: dict[int, int] = {}  # address -> order, of chunks handed out
        # Addresses of free chunks by order, each list ascending.
        self._free: list[list[int]] = [[] for _ in range(num_units.bit_length())]
        start = 0
        for order in reversed(range(num_units.bit_length())):
            if num_units >> order & 1:
                self._free[order].append(start)
                start += 1 << order

    def capacity(self, order: int) -> int:
        """How many chunks of this order the empty pool holds."""
        return self.num_units >> order  # a binary digit below the order holds none

    def num_free_chunks(self, order: int) -> int:
        """How many chunks of this order can be handed out now."""
        return sum(len(free) << (k - order) for k, free in enumerate(self._free) if k >= order)

    def num_free_below(self, order: int) -> int:
        """Free units in holes in which no chunk of this order fits."""
        return sum(len(free) << k for k, free in enumerate(self._free[:order]))

    def allocate(self, order: int) -> int | None:
        """The address of a chunk of `2**order` units; None where every hole is too small."""
        for found in range(order, len(self._free)):
            if self._free[found]:
                break
        else:
            return None
        start = self._free[found].pop(0)
        for half in reversed(range(order, found)):
            self._free[half].append(start + (1 << half))  # the list is empty, so it stays sorted
        self._orders[start] = order
        self.num_free -= 1 << order
        return start

    def free(self, start: int) -> None:
        """Take a chunk back and merge it with its buddies; KeyError if it was not handed out."""
        order = self._orders.pop(start)
        self.num_free += 1 << order
        while order + 1 < len(self._free):
            free, buddy = self._free[order], start ^ (1 << order)
            at = bisect_left(free, buddy)
            if at == len(free) or free[at] != buddy:
                break
            del free[at]
            start &= buddy
            order += 1
        insort(self._free[order], start)

    def check_invariants(self) -> None:
        """AssertionError unless chunks tile the pool and no two free buddies stand side by side."""
        free = [(start, order) for order, starts in enumerate(self._free) for start in starts]
        end = 0
        for start, order in sorted([*free, *self._orders.items()]):
            assert start == end, f"units {end} to {start} are in no chunk, or in two"
            assert start % (1 << order) == 0, f"chunk {start} of order {order} is not aligned"
            end = start + (1 << order)
        assert end == self.num_units
        for start, order in free:
            assert (start ^ (1 << order), order) not in free, f"chunk {start} did not coalesce"
        assert self.num_free == sum(1 << order for _, order in free)
        assert all(starts == sorted(starts) for starts in self._free)
