"""Swap space: blocks in host memory, their holders, and what is still to move there and back.

A sequence that is swapped out has a table of host blocks.

| contents of a host block                  | noted in | held by                               |
|-------------------------------------------|----------|---------------------------------------|
| still to come from a device block         | `_outs`  | tables of swapped sequences           |
| there                                     |          | tables of swapped sequences           |
| there, and still to go to a device block  | `ins`    | the device block, and tables as above |

So a device block that waits for its contents can be swapped out again without being moved at all,
and nothing is swapped out over its host block meanwhile.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

from paged_jax.memory.interface import Swaps


class SwappedTable(NamedTuple):
    """A sequence that is swapped out."""

    blocks: list[int]  # host blocks, in order of position
    num_full: int  # leading blocks that are known to be fully computed
    num_prefill_tokens: int
    group: int  # one number for all sequences that were swapped out together


class SwapSpace:
    """`num_blocks` host blocks, numbered from 0. Device blocks are known by their numbers alone."""

    def __init__(self, num_blocks: int):
        if num_blocks < 0:
            raise ValueError(f"num_swap_blocks must be at least 0, got {num_blocks}")
        self.num_blocks = num_blocks
        self.tables: dict[int, SwappedTable] = {}  # by sequence
        self.ins: dict[int, int] = {}  # device block -> host block that its contents come from
        self._outs: dict[int, int] = {}  # host block -> device block that its contents come from
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack
        self._ref_counts = [0] * num_blocks  # tables that hold a block, and swaps in from it
        self._groups = count()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def put(self, sequences: Mapping[int, tuple[Sequence[int], int, int]]) -> bool:
        """Take in sequences together, each as (device blocks, `num_full`, `num_prefill_tokens`).

        A device block holds its contents, or waits for them in `ins`. False, and nothing changes,
        if there is no room.
        """
        blocks = dict.fromkeys(block for table, *_ in sequences.values() for block in table)
        host_of = {block: self.ins[block] for block in blocks if block in self.ins}
        to_move = [block for block in blocks if block not in host_of]
        if len(to_move) > len(self._free):
            return False
        for block in to_move:
            host_of[block] = host = self._free.pop()
            self._outs[host] = block
        group = next(self._groups)
        for seq_id, (table, num_full, num_prefill_tokens) in sequences.items():
            hosts = [host_of[block] for block in table]
            self.tables[seq_id] = SwappedTable(hosts, num_full, num_prefill_tokens, group)
            for host in hosts:
                self._ref_counts[host] += 1
        return True

    def restore(self, seq_id: int) -> None:
        """Forget a sequence that has a device table again, or has ended."""
        for host in self.tables.pop(seq_id).blocks:
            self._release(host)

    free = restore

    def add_in(self, host: int, block: int) -> None:
        """Note that a device block gets its contents from a host block."""
        self.ins[block] = host
        self._ref_counts[host] += 1

    def cancel_in(self, block: int) -> None:
        """A device block is given back: if its contents were still to come, they need not."""
        host = self.ins.pop(block, None)
        if host is not None:
            self._release(host)

    def pending(self) -> Swaps:
        return Swaps(
            [(block, host) for host, block in self._outs.items()],
            [(host, block) for block, host in self.ins.items()],
        )

    def take_outs(self) -> list[tuple[int, int]]:
        outs = self.pending().outs
        self._outs.clear()
        return outs

    def take(self) -> Swaps:
        swaps = self.pending()
        self._outs.clear()
        self._drop_ins()
        return swaps

    def lose_device(self) -> list[int]:
        """Forget every group of which a block was still to come from the device.

        Returns the forgotten sequences.
        """
        self._drop_ins()
        groups = {
            table.group
            for table in self.tables.values()
            if not self._outs.keys().isdisjoint(table.blocks)
        }
        lost = [seq_id for seq_id, table in self.tables.items() if table.group in groups]
        for seq_id in lost:
            self.free(seq_id)
        return lost

    def _drop_ins(self) -> None:
        hosts = list(self.ins.values())
        self.ins.clear()
        for host in hosts:
            self._release(host)

    def _release(self, host: int) -> None:
        self._ref_counts[host] -= 1
        if not self._ref_counts[host]:
            self._outs.pop(host, None)
            self._free.append(host)

    def check_invariants(self) -> None:
        """AssertionError unless every host block is free, or held as often as it counts."""
        tables = [table.blocks for table in self.tables.values()]
        assert all(len(set(table)) == len(table) for table in tables), "a host block twice"
        held = Counter(host for table in tables for host in table) + Counter(self.ins.values())
        free = set(self._free)
        assert len(free) == len(self._free), f"listed as free twice: {sorted(self._free)}"
        for host, num_refs in enumerate(self._ref_counts):
            assert num_refs == held[host], f"host block {host}: {num_refs=}, held {held[host]}"
            assert (num_refs == 0) == (host in free), f"host block {host}: {num_refs=}, {free=}"
        assert free.isdisjoint(self._outs), "a swap out to a free host block"
