"""What the scheduler and the executor ask of any memory manager, paged or contiguous."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

from paged_jax.memory.usage import MemoryUsage, SharingStats


class Swaps(NamedTuple):
    """Blocks to move between device and host, in this order, before blocks are copied or written.

    All `outs` are read before any of the `ins` is written: a block may be in both.
    """

    outs: list[tuple[int, int]]  # (device block, host block); no host block twice
    ins: list[tuple[int, int]]  # (host block, device block); no device block twice


class MemoryManager(Protocol):
    """Grants KV slots to sequences, which it knows by id alone.

    A slot holds the keys and values of one token. Requests that cannot be met now are answered
    with None or False and change nothing, so the caller never has to ask before it acts.

    An id stands for one sequence: between calls its tokens may be extended, never changed.
    """

    @property
    def block_size(self) -> int:
        """Slots per block."""

    @property
    def num_total_blocks(self) -> int:
        """Blocks that can be handed out; the null block is not one of them."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, those cached included."""

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that keep a prefix for later sequences until they are needed."""

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that a pinned prefix holds."""

    @property
    def num_swap_blocks(self) -> int:
        """Blocks of the host pool, to which sequences can be swapped out; 0: they cannot."""

    @property
    def num_free_swap_blocks(self) -> int:
        """Blocks of the host pool that `swap_out` can use now."""

    @property
    def stats(self) -> SharingStats:
        """The live counts, not a copy."""

    def num_blocks_needed(
        self, num_prompt_tokens: int, max_num_tokens: int, num_sequences: int = 1
    ) -> int:
        """The most blocks that sequences of one prompt can come to hold while they run together.

        Each has at most `max_num_tokens` slots. If that is more than there are, pinned ones apart,
        they will never fit.
        """

    def allocate(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        *,
        salt: Hashable = None,
        max_num_tokens: int,
        num_prompt_tokens: int | None = None,
        num_sequences: int = 1,
        keep_free_blocks: int = 0,
        use_cache: bool = True,
    ) -> int | None:
        """Give a new sequence a table with a slot for each token; returns how many are computed.

        These lead the sequence: their blocks were found in the prefix cache. They are a multiple
        of the block size, and at least the last token is not among them. Only what was committed
        under an equal salt is found, and nothing if not `use_cache`.

        None, and nothing changes, unless the rest fits and leaves `keep_free_blocks` blocks free.
        `max_num_tokens` is the most slots the sequence can come to need, `num_sequences` how many
        there will be, itself included, by the time that it is first appended to, and
        `num_prompt_tokens` how many of its tokens it began with; None: all of them. Contiguous
        managers reserve by these, so that no sequence has to grow, and keep no blocks free for
        that.
        """

    def num_forks_left(self, seq_id: int, num_pending: int = 0) -> int:
        """How many sequences can branch off now and still get blocks of their own to write.

        `num_pending`: those about to branch off other sequences.
        """

    def append(self, seq_id: int, num_tokens: int) -> bool:
        """Make the sequence's table cover `num_tokens` slots, and the last of these writable.

        If others hold its block as well, another one takes its place in the table, and the copy
        between them is pending until `take_copies`. Otherwise a table that covers the slots
        already is left as it is. No more blocks are taken than that needs.

        The slots after it, up to the end of its block, can be written too, until the sequence is
        forked: callers need not ask for them. False, and nothing changes, when memory is out.
        """

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give a new sequence the table of another, without taking a block.

        Where an iteration is to write the parent's blocks, it writes for both: the child is
        appended to in the next one, as copies come before writes. Only if it is a decode may the
        child take part in it with a token of its own, and then has to be appended to at once.
        """

    def pending_copies(self) -> list[tuple[int, int]]:
        """Blocks to copy, as (source, target), before anything else is written to the cache.

        They may be made in any order: no block is both source and target, and none is target twice.
        """

    def take_copies(self) -> list[tuple[int, int]]:
        """The pending copies, which are so no longer: call it where they are made.

        Made twice, a copy would undo what was written since, or read a block that is another's by
        then. So they stay pending while no step makes them, should one fail before it does.
        """

    def commit_full_blocks(
        self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        """Let others find the sequence's full blocks whose keys and values are in the cache.

        `token_ids` are all its tokens, of which the first `num_computed_tokens` are computed.
        Runs once per sequence and iteration: it looks only at blocks that were completed since.
        """

    def free(self, seq_id: int, *, discard: bool = False) -> None:
        """Take back all blocks of a sequence and forget it; KeyError if it holds none.

        Blocks that nobody else holds are free; those committed stay cached until needed, unless
        `discard`: then nobody finds them any more, nor what was cached after them. Of a sequence
        that is swapped out the blocks in host memory are free.
        """

    def swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Move all blocks of these sequences to the host pool; they have no table until `swap_in`.

        A block that several of them hold takes one host block, so what they share they share on
        return. Their device blocks are given back at once, as by `free`; the copies to host memory
        are pending. False, and nothing changes, if the host pool lacks room.
        """

    def swap_in(
        self,
        seq_ids: Sequence[int],
        token_ids: Mapping[int, Sequence[int]],
        *,
        salt: Hashable = None,
        keep_free_blocks: int = 0,
    ) -> bool:
        """Give sequences that are swapped out their tables again, over any free blocks.

        `token_ids` are each one's tokens, `salt` is that of `allocate`. Leading blocks that the
        prefix cache still holds are taken from there; the copies of all others are pending. Their
        host blocks are free once these are made. False, and nothing changes, unless all of the
        sequences fit and leave `keep_free_blocks` blocks free.
        """

    def pending_swaps(self) -> Swaps:
        """Blocks to move, in this order and before `pending_copies`; likewise for `take_swaps`."""

    def take_swaps(self) -> Swaps:
        """The pending swaps, which are so no longer: call it where they have been made.

        Until then sequences may end, or be swapped again, and what is pending changes with it.
        """

    def take_swap_outs(self) -> list[tuple[int, int]]:
        """The same for the pending swaps out alone: they must not be made again after a swap in."""

    def reset(self) -> list[int]:
        """The device's cache is lost: forget all that it held, prefixes and pins included.

        Returns the sequences that lost their tables, which are forgotten as by `free`: those that
        had one, and those swapped out of which something had not reached the host yet. All others
        that are swapped out keep their blocks.
        """

    def pin(
        self, token_ids: Sequence[int], salt: Hashable = None, *, leave_blocks: int = 0
    ) -> int | None:
        """Hold the committed blocks of a prefix so that they are never evicted.

        Returns how many leading tokens they hold. Pinned again, a prefix holds the blocks that
        have been committed since as well. None, and nothing changes, unless `leave_blocks` blocks
        are left that no pinned prefix holds. ValueError where nothing can be pinned.
        """

    def num_pinned_tokens(self, token_ids: Sequence[int], salt: Hashable = None) -> int:
        """How many leading tokens `allocate` is sure to find, as pinned prefixes hold them."""

    def unpin(self, token_ids: Sequence[int], salt: Hashable = None) -> None:
        """Let go of a pinned prefix; KeyError if it is not pinned."""

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's physical blocks in order of position.

        This is the live list, not a copy: callers only read it. Until the sequence is freed it
        grows at its end, and `append` may replace the block of the slot that it makes writable. As
        long as the copy to it is pending, the block copied from takes its place again if all others
        let go of it. Every other entry stays as it is, unless memory is contiguous: then all are
        replaced together.
        """

    def usage(self, num_computed_tokens: Mapping[int, int]) -> MemoryUsage:
        """Split all slots by what they hold.

        `num_computed_tokens` maps each sequence that holds a table to the number of its tokens
        whose keys and values are in the cache, those that `allocate` found there included.
        """
