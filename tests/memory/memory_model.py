"""A scheduler and a device in miniature, which know what every slot has to hold.

The model drives a `BlockManager` as an engine does: it plans (admits, appends, forks, frees, pins),
then runs the step (copies, writes, takes in the results, commits). It keeps what the device's
slots hold: the salt and all tokens up to the slot's own. And it keeps which contents are to be
found, without any notion of blocks, so that it can tell what `allocate` has to answer.
"""

from dataclasses import dataclass
from itertools import count

import pytest

from paged_jax.memory.block_manager import BlockManager
from paged_jax.memory.usage import MemoryUsage

type Content = tuple[str | None, tuple[int, ...]]  # salt, all tokens up to the end of slot or block

SALTS = (None, "tenant")
PROMPT = (0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0)
MAX_LEN = 24
MAX_RUNNING = 8


@dataclass(eq=False)
class Sequence:
    seq_id: int
    salt: str | None
    tokens: list[int]
    use_cache: bool = True
    num_prefill: int = 0  # slots asked for when it was admitted
    num_slots: int = 0  # asked for so far
    num_computed: int = 0
    num_committed: int = 0  # blocks
    planned: int | None = None  # tokens computed once the next step is done
    leader: "Sequence | None" = None  # that writes the next step's tokens for this one as well

    def content(self, num_tokens: int) -> Content:
        return self.salt, tuple(self.tokens[:num_tokens])


class Model:
    """Each method is an action, and checks its outcome. Numbers choose among what there is."""

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool = True, num_swap_blocks: int = 0
    ):
        self.manager = BlockManager(
            1 + num_blocks,
            block_size,
            enable_prefix_caching=caching,
            num_swap_blocks=num_swap_blocks,
        )
        self.num_blocks, self.block_size, self.caching = num_blocks, block_size, caching
        self.device: dict[int, list[Content | None]] = {}  # block -> contents of its slots
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.pins: dict[Content, int] = {}  # prefix -> blocks
        self.cached: list[Content] = []  # of blocks that nobody holds, next to be evicted first
        self.copies: dict[int, int] = {}  # target -> source, until the step
        self.fresh: set[int] = set()  # blocks taken since the last step
        self.ids = count()
        self.seen = {"hits": 0, "failures": 0, "copies": 0, "evictions": 0, "duplicates": 0}

    # Planning

    def add(self, num_tokens: int, variant: int, salt: int, use_cache: bool = True) -> None:
        """Queue a prompt. All begin alike, but for one token that may differ."""
        if len(self.waiting) > 5:
            self.waiting.pop(0)
        tokens = list(PROMPT[: 1 + num_tokens % len(PROMPT)])
        if variant < len(tokens):
            tokens[variant] = 2
        salt_of = SALTS[salt % len(SALTS)]
        self.waiting.append(Sequence(next(self.ids), salt_of, tokens, use_cache))

    def admit(self, index: int, keep: int = 0) -> None:
        """Try a sequence that waits, for the first time or again."""
        if not self.waiting or len(self.running) >= MAX_RUNNING:
            return
        seq = self.waiting[index % len(self.waiting)]
        num_tokens = len(seq.tokens)
        num_blocks = -(-num_tokens // self.block_size)
        held, hits = 0, []
        if seq.use_cache:
            held, hits = self.expected_hits(seq, (num_tokens - 1) // self.block_size)
        fits = num_blocks - held + keep <= self.manager.num_free_blocks
        if fits:
            self.cached = [content for content in self.cached if content not in hits]
            self.expect_taken(num_blocks - len(hits))
        found = self.manager.allocate(
            seq.seq_id,
            seq.tokens,
            salt=seq.salt,
            max_num_tokens=MAX_LEN,
            keep_free_blocks=keep,
            use_cache=seq.use_cache,
        )
        assert found == (len(hits) * self.block_size if fits else None)
        if found is None:
            self.seen["failures"] += 1
            return
        self.seen["hits"] += len(hits)
        self.fresh |= set(self.manager.block_table(seq.seq_id)[len(hits) :])
        seq.num_prefill = seq.num_slots = num_tokens
        seq.num_computed, seq.num_committed = found, len(hits)
        self.waiting.remove(seq)
        self.running.append(seq)

    def prefill(self, index: int, num_tokens: int) -> None:
        """Plan a chunk of a prompt."""
        seq = self.pick(index)
        if seq is None or seq.planned or seq.leader:
            return
        if seq.num_computed < seq.num_prefill:
            seq.planned = min(seq.num_computed + max(1, num_tokens), seq.num_prefill)

    def decode(self, index: int) -> None:
        """Plan a sequence's newest token, if all before it are computed."""
        seq = self.pick(index)
        if seq is None or seq.planned or seq.leader:
            return
        if not seq.num_prefill <= seq.num_computed < len(seq.tokens):
            return
        num_tokens, table = len(seq.tokens), self.manager.block_table(seq.seq_id)
        at, before = (num_tokens - 1) // self.block_size, list(table)
        is_shared = at < len(table) and self.num_holders(table[at]) > 1
        takes_block = is_shared or at == len(table)
        fits = not takes_block or self.manager.num_free_blocks > 0
        if takes_block and fits:
            self.expect_taken(1)
        assert self.manager.append(seq.seq_id, num_tokens) == fits
        if not fits:
            self.seen["failures"] += 1
            assert table == before
            return
        assert self.manager.append(seq.seq_id, num_tokens), "asked again"
        assert len(table) == at + 1, "no more blocks than it needs"
        assert table[:at] == before[:at]
        assert self.num_holders(table[at]) == 1
        assert (table == before) == (not takes_block), "what nobody shares is written in place"
        if takes_block:
            self.fresh.add(table[at])
        if is_shared:
            self.copies[table[at]] = self.copies.get(before[at], before[at])
        seq.planned = seq.num_slots = num_tokens

    def fork(self, index: int, apart: bool = False) -> None:
        """Branch off a sequence: between steps, or in one that writes for both.

        `apart`: in a step in which both decode, each a token of its own.
        """
        parent = self.pick(index)
        if parent is None or len(self.running) >= MAX_RUNNING:
            return
        leader = parent.leader or (parent if parent.planned else None)
        apart = apart and leader is parent and parent.num_computed >= parent.num_prefill
        if ((leader and leader.planned) or parent.num_computed) < parent.num_prefill:
            return
        child = Sequence(next(self.ids), parent.salt, list(parent.tokens))
        child.leader = None if apart else leader
        child.num_prefill, child.num_slots = parent.num_prefill, parent.num_slots
        child.num_computed, child.num_committed = parent.num_computed, parent.num_committed
        num_free = self.manager.num_free_blocks
        self.manager.fork(parent.seq_id, child.seq_id)
        assert self.manager.num_free_blocks == num_free
        if child.leader is None and child.num_computed < len(child.tokens):
            child.tokens[-1] = 1 - child.tokens[-1]
        self.running.append(child)
        if apart:
            self.decode(len(self.running) - 1)
            if not child.planned:  # the parent would write what the child holds as well
                self.free(len(self.running) - 1)

    def free(self, index: int, comes_back: bool = False) -> None:
        """End a sequence, and those for which it would have written; or preempt it."""
        seq = self.pick(index)
        if seq is None:
            return
        for ended in (seq, *self.followers(seq)):
            self.running.remove(ended)
            self.manager.free(ended.seq_id)
            self.let_go(self.contents(ended, ended.num_committed))
            with pytest.raises(KeyError):
                self.manager.free(ended.seq_id)
        self.copies = {t: s for t, s in self.copies.items() if self.num_holders(t)}
        if comes_back:
            seq.planned = seq.leader = None
            self.waiting.append(seq)

    def pin(self, num_tokens: int, salt: int) -> None:
        if not self.caching or len(self.pins) > 1:
            return
        prefix = SALTS[salt % len(SALTS)], PROMPT[: num_tokens % len(PROMPT)]
        _, hits = self.expected_hits(as_sequence(prefix), len(prefix[1]) // self.block_size)
        assert self.manager.pin(prefix[1], prefix[0]) == len(hits) * self.block_size
        self.cached = [content for content in self.cached if content not in hits]
        self.pins[prefix] = len(hits)

    def unpin(self, index: int) -> None:
        if self.pins:
            prefix = list(self.pins)[index % len(self.pins)]
            num_blocks = self.pins.pop(prefix)
            self.manager.unpin(prefix[1], prefix[0])
            self.let_go(self.contents(as_sequence(prefix), num_blocks))

    # The step

    def step(self, token: int, is_lost: bool = False) -> None:
        """Copy, write, take in the results (unless they are lost on the way), commit."""
        self.check_contents(self.copies)
        self.move_blocks()
        self.check_contents({})
        leaders = [seq for seq in self.running if seq.planned]
        for seq in leaders:
            self.write(seq)
        if is_lost and not any(seq.leader for seq in self.running):
            leaders = []
        for seq in self.running:
            writer = seq.leader or seq
            if writer in leaders:
                assert writer.planned is not None
                seq.num_computed = writer.planned
                if seq.num_computed == len(seq.tokens) < MAX_LEN:
                    token = 1 - token
                    seq.tokens.append(token)
        for seq in self.running:
            seq.planned = seq.leader = None
            self.commit_full_blocks(seq)
        self.check_contents({})

    def move_blocks(self) -> None:
        self.spoil_fresh()
        self.copy_blocks()

    def spoil_fresh(self) -> None:
        """What blocks held before they were taken is gone."""
        self.device |= {block: [None] * self.block_size for block in self.fresh}

    def copy_blocks(self) -> None:
        copies = self.manager.take_copies()
        assert not {source for source, _ in copies} & {target for _, target in copies}
        assert len(copies) == len(self.copies)
        assert {target: source for source, target in copies} == self.copies
        assert self.manager.take_copies() == []
        for source, target in copies:
            self.device[target] = list(self.device[source])
        self.copies, self.fresh = {}, set()
        self.seen["copies"] += len(copies)

    def write(self, seq: Sequence) -> None:
        assert seq.planned is not None
        table = self.manager.block_table(seq.seq_id)
        for position in range(seq.num_computed, seq.planned):
            block = table[position // self.block_size]
            assert self.num_holders(block) == 1 + len(self.followers(seq)), "shared, yet written"
            self.device[block][position % self.block_size] = seq.content(position + 1)

    def commit_full_blocks(self, seq: Sequence) -> None:
        self.manager.commit_full_blocks(seq.seq_id, seq.tokens, seq.num_computed)
        num_full = seq.num_computed // self.block_size
        if num_full > seq.num_committed:
            contents = self.contents(seq, num_full)[seq.num_committed :]
            self.seen["duplicates"] += len({*contents} & {*self.cached, *self.held()})
            self.cached = [content for content in self.cached if content not in contents]
            seq.num_committed = num_full

    # What is to be expected

    def expect_taken(self, num_blocks: int) -> None:
        """Note the evictions for as many blocks: free ones go first, then the oldest cached."""
        manager = self.manager
        num_evicted = max(0, num_blocks - (manager.num_free_blocks - manager.num_cached_blocks))
        del self.cached[:num_evicted]
        self.seen["evictions"] += num_evicted

    def pick(self, index: int) -> Sequence | None:
        return self.running[index % len(self.running)] if self.running else None

    def followers(self, leader: Sequence) -> list[Sequence]:
        return [seq for seq in self.running if seq.leader is leader]

    def num_holders(self, block: int) -> int:
        return self.manager._pool.ref_counts[block]

    def contents(self, seq: Sequence, num_blocks: int) -> list[Content]:
        return [seq.content((i + 1) * self.block_size) for i in range(num_blocks)]

    def held(self) -> set[Content]:
        """Committed contents of blocks that somebody holds."""
        held = {c for seq in self.running for c in self.contents(seq, seq.num_committed)}
        for prefix, num_blocks in self.pins.items():
            held.update(self.contents(as_sequence(prefix), num_blocks))
        return held

    def expected_hits(self, seq: Sequence, max_blocks: int) -> tuple[int, list[Content]]:
        """What is to be found of a sequence, and how much of it is held by others."""
        contents, held = self.contents(seq, max_blocks), self.held()
        known = held | set(self.cached)
        num_known = next((i for i, c in enumerate(contents) if c not in known), max_blocks)
        num_held = next((i for i, c in enumerate(contents) if c not in held), max_blocks)
        return num_held, contents[:num_known]

    def let_go(self, contents: list[Content]) -> None:
        if self.caching:
            held = self.held()
            self.cached += [content for content in reversed(contents) if content not in held]

    def expected_usage(self) -> MemoryUsage:
        size = self.block_size
        computed: dict[int, int] = {}
        asked_for: dict[int, int] = {}
        num_table_blocks = 0
        for seq in self.running:
            table = self.manager.block_table(seq.seq_id)
            num_table_blocks += len(table)
            for i, block in enumerate(table):
                filled = min(size, max(0, seq.num_computed - i * size))
                computed[block] = max(computed.get(block, 0), filled)
                wanted = min(size, max(0, seq.num_prefill - i * size))
                asked_for[block] = max(asked_for.get(block, 0), wanted)
        saved = num_table_blocks - len(computed)
        pinned = {block for blocks in self.manager._pins.values() for block in blocks}
        computed |= dict.fromkeys(pinned, size)
        token_states = sum(computed.values())
        reserved = sum(max(0, asked_for[block] - computed[block]) for block in asked_for)
        return MemoryUsage(
            token_states=token_states,
            reserved=reserved,
            internal=len(computed) * size - token_states - reserved,
            external=0,
            free=(self.num_blocks - len(computed)) * size,
            cached=len(self.cached) * size,
            shared=saved * size,
        )

    def check(self) -> None:
        """What holds between any two actions."""
        manager = self.manager
        manager.check_invariants()
        assert manager.num_cached_blocks == len(self.cached)
        usage = manager.usage({seq.seq_id: seq.num_computed for seq in self.running})
        assert usage == self.expected_usage()
        assert usage.total == self.num_blocks * self.block_size
        assert manager.stats.evictions == self.seen["evictions"]
        assert manager.stats.copies == self.seen["copies"]

    def check_contents(self, copies: dict[int, int]) -> None:
        """Each computed slot holds its sequence's tokens, seen through copies still to be made."""
        for seq in self.running:
            table = self.manager.block_table(seq.seq_id)
            assert len(table) == -(-seq.num_slots // self.block_size)
            for position in range(seq.num_computed):
                block = table[position // self.block_size]
                slots = self.slots(copies.get(block, block))
                assert slots[position % self.block_size] == seq.content(position + 1)

    def slots(self, block: int) -> list[Content | None]:
        """What a block holds, or is to hold before anything is copied."""
        return self.device[block]

    def end(self) -> None:
        """End everything; nothing may be left in use."""
        while self.running:
            self.free(0)
        while self.pins:
            self.unpin(0)
        self.check()
        assert self.manager.num_free_blocks == self.num_blocks


def as_sequence(prefix: Content) -> Sequence:
    salt, tokens = prefix
    return Sequence(-1, salt, list(tokens))
