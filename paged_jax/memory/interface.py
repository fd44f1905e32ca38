"""What the scheduler and the executor ask of any memory manager, paged or contiguous."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

from paged_jax.memory.usage import MemoryUsage, SharingStats


class Swaps(NamedTuple):
    """Blocks to move between device and host, before blocks are copied or written.

    All `outs` are read before any of the `ins` is written: a block may be in both.
    """

    outs: list[tuple[int, int]]  # (device block, host block); no host block twice
    ins: list[tuple[int, int]]  # (host block, device block); no device block twice


class MemoryManager(Protocol):
    """Grants KV slots to sequences, which it knows by id alone.

    A slot holds the keys and values of one token. A request that cannot be met now is answered with
    None or False and changes nothing, so the caller never has to ask before it acts.

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
        """Blocks that can be handed out now, cached blocks included."""

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

        Each has at most `max_num_tokens` slots. They never fit if that is more than all blocks
        beside the pinned ones.
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

        The computed tokens lead the sequence: their blocks were found in the prefix cache, among
        blocks committed under an equal `salt`. Their number is a multiple of the block size and
        leaves out at least the last token; it is 0 if not `use_cache`.

        None, and nothing changes, unless the rest fits and leaves `keep_free_blocks` blocks free.

        Contiguous managers reserve by the other arguments, so that no sequence has to grow, and
        keep no blocks free for that:

        max_num_tokens: the most slots that the sequence can come to need.
        num_prompt_tokens: how many of its tokens it began with; None: all of them.
        num_sequences: sequences that there will be, itself included, when it is first appended to.
        """

    def num_forks_left(self, seq_id: int, num_pending: int = 0) -> int:
        """How many sequences can branch off now and still get blocks of their own to write.

        `num_pending` sequences are about to branch off others.
        """

    def append(self, seq_id: int, num_tokens: int) -> bool:
        """Make the sequence's table cover `num_tokens` slots, and the last of these writable.

        If other sequences hold its block as well, another block takes its place in the table, and
        the copy between them is pending until `take_copies`. Otherwise a table that covers the
        slots already is left as it is. No more blocks are taken than that needs.

        The slots after it, up to the end of its block, can be written too until the sequence is
        forked: callers need not ask for them. False, and nothing changes, when memory is out.
        """

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give a new sequence the table of another, without taking a block.

        An iteration that writes the parent's blocks writes for both sequences, and the child is
        appended to in the next one, as copies come before writes. Only if the iteration is a decode
        may the child take part in it with a token of its own; it is appended to at once then.
        """

    def pending_copies(self) -> list[tuple[int, int]]:
        """Blocks to copy, as (source, target), before anything else is written to the cache.

        The order does not matter: no block is both source and target, and none is target twice.
        """

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the pending copies, which are pending no longer: call it where they are made.

        A copy that is made twice would undo what was written since, or read a block that another
        sequence holds by then. So copies stay pending until a step makes them, however many steps
        fail before.
        """

    def commit_full_blocks(
        self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        """Let other sequences find the full blocks whose keys and values are in the cache.

        `token_ids` are all tokens of the sequence, of which the first `num_computed_tokens` are
        computed. It is called in every iteration, and looks only at blocks completed since.
        """

    def free(self, seq_id: int, *, discard: bool = False) -> None:
        """Take back all blocks of a sequence and forget it; KeyError if it holds none.

        Blocks that no other sequence holds are free. Committed blocks stay cached until they are
        needed, unless `discard`: then they are found no more, nor are blocks cached after them. For
        a sequence that is swapped out, its blocks in host memory are free.
        """

    def swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Move all blocks of these sequences to the host pool; they have no table until `swap_in`.

        A block that several of them hold takes one host block, and is shared again on their return.
        Their device blocks are given back at once, as by `free`; the copies to host memory are
        pending. False, and nothing changes, if the host pool lacks room.
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

        `token_ids` maps each sequence to its tokens, `salt` is that of `allocate`. Leading blocks
        that the prefix cache still holds are taken from there; the copies of all others are
        pending, and their host blocks are free once these are made. False, and nothing changes,
        unless all of the sequences fit and leave `keep_free_blocks` blocks free.
        """

    def pending_swaps(self) -> Swaps:
        """Blocks to move, before `pending_copies`."""

    def take_swaps(self) -> Swaps:
        """Return the pending swaps, which are pending no longer: call it where they are made.

        Until then sequences may end, or be swapped again, and what is pending changes with it.
        """

    def take_swap_outs(self) -> list[tuple[int, int]]:
        """Take only the pending swaps out, which must not be made again after a swap in."""

    def reset(self) -> list[int]:
        """The device's cache is lost: forget all that it held, prefixes and pins included.

        Returns the sequences that lost their tables, which are forgotten as by `free`: all that had
        one, and all that were swapped out together with a block which had not reached the host yet.
        The other swapped sequences keep their blocks.
        """

    def pin(
        self, token_ids: Sequence[int], salt: Hashable = None, *, leave_blocks: int = 0
    ) -> int | None:
        """Hold the committed blocks of a prefix so that they are never evicted.

        Returns how many leading tokens they hold. A prefix that is pinned again holds the blocks
        committed since as well. None, and nothing changes, unless `leave_blocks` blocks are left
        that no pinned prefix holds. ValueError where nothing can be pinned.
        """

    def num_pinned_tokens(self, token_ids: Sequence[int], salt: Hashable = None) -> int:
        """How many leading tokens `allocate` is sure to find, as pinned prefixes hold them."""

    def unpin(self, token_ids: Sequence[int], salt: Hashable = None) -> None:
        """Let go of a pinned prefix; KeyError if it is not pinned."""

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's physical blocks in order of position.

        This is the live list, not a copy: callers only read it. Until the sequence is freed

        - it grows at its end;
        - `append` may replace the block of the slot that it makes writable;
        - while the copy to that block is pending, its source takes its place again if all other
          sequences let go of the source;
        - every other entry stays as it is, unless memory is contiguous: then all entries are
          replaced together.
        """

    def usage(self, num_computed_tokens: Mapping[int, int]) -> MemoryUsage:
        """Split all slots by what they hold.

        `num_computed_tokens` maps each sequence that holds a table to the number of its tokens
        whose keys and values are in the cache, tokens that `allocate` found there included.
        """
