"""The miniature of `memory_model` with a host pool: what is swapped out, and what it has to be.

A label stands for the contents that one host block keeps. Sequences that share a block when they
are swapped out share its label. It is given anew each time, unless the contents have not come from
the host yet when they go there again.
"""

from itertools import chain, count

import pytest

from tests.memory.memory_model import MAX_RUNNING, Content, Model, Sequence

Label = int


class SwapModel(Model):
    """`Model`, with groups of sequences swapped out and in, faults, and the loss of the device."""

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool = True, num_swap_blocks: int
    ):
        super().__init__(num_blocks, block_size, caching=caching, num_swap_blocks=num_swap_blocks)
        self.num_swap_blocks = num_swap_blocks
        self.host: dict[int, list[Content | None]] = {}  # host block -> contents of its slots
        self.swapped: list[list[Sequence]] = []  # groups
        self.labels: dict[int, list[Label]] = {}  # of those swapped out
        self.num_full: dict[int, int] = {}  # blocks that a sequence has committed once
        self.ins: dict[int, Label] = {}  # device blocks whose contents are still to come
        self.outs: set[Label] = set()  # still to be read from the device
        self.new_labels = count()
        events = ["out", "in", "no_room", "restored_hits", "shared", "back", "lost"]
        self.seen |= dict.fromkeys(events, 0)

    # Planning

    def swap_out(self, indices: set[int]) -> None:
        """Preempt some of those that run, together; what was planned for them is not done."""
        leaders = {id(seq.leader) for seq in self.running}
        group = [
            seq
            for i, seq in enumerate(self.running)
            if i in indices and not seq.leader and id(seq) not in leaders
        ]
        group = [seq for seq in group if seq.salt == group[0].salt]
        if not group:
            return
        manager, labels = self.manager, {}
        label_of = dict(self.ins)
        for seq in group:
            blocks = [self.copies.get(b, b) for b in manager.block_table(seq.seq_id)]
            for block in blocks:
                if block not in label_of:
                    label_of[block] = next(self.new_labels)
            labels[seq.seq_id] = [label_of[block] for block in blocks]
        new = {label for table in labels.values() for label in table} - {*self.ins.values()}
        new -= self.kept()
        fits = len(new) <= manager.num_free_swap_blocks
        before = {seq.seq_id: list(manager.block_table(seq.seq_id)) for seq in group}
        num_free = manager.num_free_blocks
        assert manager.swap_out([seq.seq_id for seq in group]) == fits
        if not fits:
            self.seen["no_room"] += 1
            assert manager.num_free_blocks == num_free
            assert all(manager.block_table(seq_id) == table for seq_id, table in before.items())
            return
        self.seen["out"] += 1
        self.seen["back"] += any(label in self.ins.values() for label in label_of.values())
        occurrences = list(chain(*labels.values()))
        self.seen["shared"] += len({*occurrences}) < len(occurrences)
        self.outs |= new
        self.labels |= labels
        for seq in group:
            self.num_full[seq.seq_id] = max(seq.num_committed, self.num_full.get(seq.seq_id, 0))
            self.running.remove(seq)
            self.let_go(self.contents(seq, seq.num_committed))
            seq.planned = None
            with pytest.raises(KeyError):
                manager.block_table(seq.seq_id)
        self.swapped.append(group)
        self.forget_unheld()

    def swap_in(self, index: int, keep: int = 0) -> None:
        """Let a group go on, in whatever blocks."""
        if not self.swapped:
            return
        group = self.swapped[index % len(self.swapped)]
        if len(self.running) + len(group) > MAX_RUNNING:
            return
        manager, matched, hits = self.manager, {}, []
        for seq in group:
            _, found = self.expected_hits(seq, self.num_full[seq.seq_id])
            matched[seq.seq_id] = found
            hits += found
        labels = {label for seq in group for label in self.labels[seq.seq_id]}
        on_device = {
            label
            for seq in group
            for label, _ in zip(self.labels[seq.seq_id], matched[seq.seq_id], strict=False)
        }
        to_move = labels - on_device
        num_unheld = len({*hits} - self.held())
        fits = len(to_move) + num_unheld + keep <= manager.num_free_blocks
        if fits:
            self.cached = [content for content in self.cached if content not in hits]
            self.expect_taken(len(to_move))
        tokens = {seq.seq_id: seq.tokens for seq in group}
        ids = list(tokens)
        salt = group[0].salt
        assert manager.swap_in(ids, tokens, salt=salt, keep_free_blocks=keep) == fits
        if not fits:
            self.seen["failures"] += 1
            return
        self.seen["in"] += 1
        self.seen["restored_hits"] += len(on_device)
        block_of: dict[Label, int] = {}
        for seq in group:
            table, seq_labels = manager.block_table(seq.seq_id), self.labels.pop(seq.seq_id)
            for label, block in zip(seq_labels, table, strict=True):
                assert block_of.setdefault(label, block) == block, "what they shared they share"
            seq.num_committed = len(matched[seq.seq_id])
        for label in to_move:
            self.ins[block_of[label]] = label
            self.fresh.add(block_of[label])
        assert len({block_of[label] for label in to_move}) == len(to_move)
        self.swapped.remove(group)
        self.running += group
        self.forget_unheld()  # what was found on the device

    def free_swapped(self, index: int, member: int) -> None:
        """End one of a group that is swapped out."""
        if not self.swapped:
            return
        group = self.swapped[index % len(self.swapped)]
        seq = group.pop(member % len(group))
        if not group:
            self.swapped.remove(group)
        del self.labels[seq.seq_id]
        self.manager.free(seq.seq_id)
        with pytest.raises(KeyError):
            self.manager.free(seq.seq_id)
        self.forget_unheld()

    def discard(self, index: int) -> None:
        """End a sequence whose results are worthless: nobody is to find them."""
        seq = self.pick(index)
        if seq is None or seq.leader or self.followers(seq):
            return
        self.running.remove(seq)
        self.manager.free(seq.seq_id, discard=True)
        contents = self.contents(seq, seq.num_committed)
        held = self.held()
        worthless = next((content for content in contents if content not in held), None)
        if worthless is not None:
            salt, tokens = worthless
            self.cached = [
                (of, after)
                for of, after in self.cached
                if of != salt or after[: len(tokens)] != tokens
            ]
        self.forget_unheld()

    def lose_device(self) -> None:
        """A failed step took the cache with it; who ran waits again."""
        lost = [group for group in self.swapped if self.labels_of(group) & self.outs]
        ids = {seq.seq_id for seq in chain(self.running, *lost)}
        assert sorted(self.manager.reset()) == sorted(ids)
        for seq in self.running:
            seq.planned = seq.leader = None
            self.num_full.pop(seq.seq_id, None)
        self.waiting = (self.waiting + self.running)[-5:]
        for group in lost:
            self.swapped.remove(group)
            for seq in group:
                del self.labels[seq.seq_id]
        self.seen["lost"] += bool(lost)
        self.running, self.cached, self.pins, self.copies = [], [], {}, {}
        self.device, self.fresh, self.ins, self.outs = {}, set(), {}, set()

    def fork(self, index: int, apart: bool = False) -> None:
        parent, num_running = self.pick(index), len(self.running)
        super().fork(index, apart)
        for child in self.running[num_running:]:
            assert parent is not None
            self.num_full[child.seq_id] = self.num_full.get(parent.seq_id, 0)

    def free(self, index: int, comes_back: bool = False) -> None:
        super().free(index, comes_back)
        for seq in self.waiting:
            self.num_full.pop(seq.seq_id, None)
        self.forget_unheld()

    # The step

    def fail(self, stage: int) -> None:
        """A step that does not get beyond reading, swapping or copying blocks."""
        if any(seq.leader for seq in self.running):
            return
        if stage > 0:
            self.read_outs()
        if stage > 1:
            self.spoil_fresh()
            self.write_ins()
        for seq in self.running:
            seq.planned = None
        self.check_contents(self.copies)

    def move_blocks(self) -> None:
        self.read_outs()
        self.spoil_fresh()
        self.write_ins()
        assert self.manager.pending_swaps() == ([], [])
        self.copy_blocks()

    def read_outs(self) -> None:
        outs = self.manager.take_swap_outs()
        assert len({host for _, host in outs}) == len(outs) == len(self.outs)
        unwritten = [None] * self.block_size
        self.host |= {host: list(self.device.get(block, unwritten)) for block, host in outs}
        self.outs = set()
        assert self.manager.take_swap_outs() == []

    def write_ins(self) -> None:
        outs, ins = self.manager.take_swaps()
        assert outs == []
        assert {block for _, block in ins} == self.ins.keys()
        assert len(ins) == len(self.ins)
        self.device |= {block: list(self.host[host]) for host, block in ins}
        self.ins = {}
        self.fresh -= {block for _, block in ins}

    # What is to be expected

    def slots(self, block: int) -> list[Content | None]:
        outs, ins = self.manager.pending_swaps()
        host = {block: host for host, block in ins}.get(block)
        return self.device[block] if host is None else self.host_slots(host, outs)

    def host_slots(self, host: int, outs: list[tuple[int, int]]) -> list[Content | None]:
        source = {host: block for block, host in outs}.get(host)
        return self.host[host] if source is None else self.device[source]

    def labels_of(self, group: list[Sequence]) -> set[Label]:
        return {label for seq in group for label in self.labels[seq.seq_id]}

    def kept(self) -> set[Label]:
        """Labels of the host blocks in use."""
        return set().union(*self.labels.values(), self.ins.values())

    def forget_unheld(self) -> None:
        self.copies = {t: s for t, s in self.copies.items() if self.num_holders(t)}
        self.ins = {block: label for block, label in self.ins.items() if self.num_holders(block)}
        self.outs &= self.kept()

    def check(self) -> None:
        super().check()
        manager = self.manager
        assert manager.num_swap_blocks == self.num_swap_blocks
        assert manager.num_free_swap_blocks == self.num_swap_blocks - len(self.kept())

    def check_contents(self, copies: dict[int, int]) -> None:
        super().check_contents(copies)
        outs, _ = self.manager.pending_swaps()
        for seq in chain(*self.swapped):
            hosts = self.manager._swaps.tables[seq.seq_id].blocks
            for position in range(seq.num_computed):
                slots = self.host_slots(hosts[position // self.block_size], outs)
                assert slots[position % self.block_size] == seq.content(position + 1)

    def end(self) -> None:
        while self.swapped:
            self.free_swapped(0, 0)
        super().end()
        assert self.manager.num_free_swap_blocks == self.num_swap_blocks
        assert self.manager.pending_swaps() == ([], [])
