"""Contiguous memory under random sequences and forks: every slot holds its own, nothing leaks."""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import count, product

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_jax.memory.policies import make_memory
from paged_jax.memory.usage import MemoryUsage

MAX_LEN = 24


@dataclass(eq=False)
class Sequence:
    """`tokens` are all it has; the last one is not computed until it has been decoded."""

    seq_id: int
    tokens: list[int]
    max_num_tokens: int
    num_prompt: int
    num_reserved: int
    num_computed: int = 0
    planned: bool = False  # its last token is computed in the next step


class ContiguousMachine(RuleBasedStateMachine):
    """Drives a manager as a scheduler does, with a device that knows what every slot holds."""

    @initialize(
        policy=st.sampled_from(["orca_max", "orca_pow2", "orca_oracle"]),
        num_blocks=st.integers(32, 80),
        block_size=st.sampled_from([1, 2, 4]),
    )
    def start(self, policy: str, num_blocks: int, block_size: int):
        self.policy, self.num_blocks, self.size = policy, num_blocks, block_size
        self.manager = make_memory(policy, 1 + num_blocks, block_size, max_model_len=MAX_LEN)
        self.device: dict[int, list[object]] = {
            block: [None] * block_size for block in range(1 + num_blocks)
        }
        self.running: list[Sequence] = []
        self.ids, self.tokens = count(), count()
        self.seen: Counter[str] = Counter()

    def pick(self, index: int) -> Sequence:
        return self.running[index % len(self.running)]

    def holders(self, block: int) -> list[Sequence]:
        return [s for s in self.running if block in self.manager.block_table(s.seq_id)]

    @rule(
        num_prompt=st.integers(1, MAX_LEN - 1),
        num_output=st.integers(1, MAX_LEN),
        num_sequences=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def allocate(self, num_prompt: int, num_output: int, num_sequences: int):
        num_output = min(num_output, MAX_LEN - num_prompt)
        tokens = [next(self.tokens) for _ in range(num_prompt)]
        most = num_prompt + num_output - 1
        seq = Sequence(next(self.ids), tokens, most, num_prompt, 0)
        free = self.manager.num_free_blocks
        found = self.manager.allocate(
            seq.seq_id, tokens, max_num_tokens=most, num_sequences=num_sequences
        )
        chunk = self.manager.num_blocks_needed(num_prompt, most)
        num_chunks = min(num_sequences, self.num_blocks // chunk)  # as many as ever fit
        if found is None:
            assert self.manager.num_free_blocks == free
            self.seen["refusals"] += 1
            return
        assert found == 0
        assert free - self.manager.num_free_blocks == num_chunks * chunk
        table = self.manager.block_table(seq.seq_id)
        seq.num_reserved = len(table) * self.size
        assert seq.num_reserved >= most
        assert self.manager.num_forks_left(seq.seq_id) == num_chunks - 1
        self.running.append(seq)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 30))
    def plan(self, index: int):
        """Compute the prompt in the next step, or the last token, for which it needs its slot."""
        seq = self.pick(index)
        if seq.num_computed < len(seq.tokens) and not seq.planned:
            if len(seq.tokens) > seq.num_prompt:
                before = list(self.manager.block_table(seq.seq_id))
                shared = len(self.holders(before[0])) > 1
                if not self.manager.append(seq.seq_id, len(seq.tokens)):
                    assert shared
                    assert self.manager.block_table(seq.seq_id) == before
                    self.seen["failures"] += 1
                    self.free(len(self.running) - 1)  # preempted
                    return
                after = self.manager.block_table(seq.seq_id)
                assert (after == before) != shared
                assert self.manager.num_forks_left(seq.seq_id) == 0
                self.seen["moves"] += shared
                assert self.holders(after[0]) == [seq]
                assert self.manager.append(seq.seq_id, len(seq.tokens)), "asked again"
            seq.planned = True

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 30))
    def fork(self, index: int):
        """Between steps, when the newest token has been sampled: the child gets another one."""
        parent = self.pick(index)
        if parent.planned or parent.num_computed < len(parent.tokens) - 1 or len(self.running) > 7:
            return
        if parent.num_computed == 0:
            return
        child = Sequence(
            next(self.ids),
            list(parent.tokens),
            parent.max_num_tokens,
            parent.num_prompt,
            parent.num_reserved,
            parent.num_computed,
        )
        free = self.manager.num_free_blocks
        self.manager.fork(parent.seq_id, child.seq_id)
        assert self.manager.num_free_blocks == free
        if child.num_computed < len(child.tokens):
            child.tokens[-1] = next(self.tokens)
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 30))
    def free(self, index: int):
        seq = self.running.pop(index % len(self.running))
        tables = [list(self.manager.block_table(other.seq_id)) for other in self.running]
        self.manager.free(seq.seq_id)
        # Copies from it may be pending: then one who was to get one has its chunk instead.
        now = [self.manager.block_table(other.seq_id) for other in self.running]
        self.seen["undone moves"] += tables != now

    @precondition(lambda self: self.running)
    @rule(is_lost=st.sampled_from([False, False, True]))
    def step(self, is_lost: bool):
        """Copy, write, sample. A step that is lost has not begun: its copies stay pending."""
        if is_lost:
            for seq in self.running:
                seq.planned = False
            self.seen["lost copies"] += bool(self.manager.pending_copies())
            return
        copies = self.manager.take_copies()
        sources, targets = {s for s, _ in copies}, [t for _, t in copies]
        assert sources.isdisjoint(targets)
        assert len(set(targets)) == len(targets)
        for source, target in copies:
            self.device[target] = list(self.device[source])
        assert self.manager.take_copies() == []
        for seq in self.running:
            if not seq.planned:
                continue
            table = self.manager.block_table(seq.seq_id)
            for position in range(seq.num_computed, len(seq.tokens)):
                block = table[position // self.size]
                assert self.holders(block) == [seq], "shared, yet written"
                self.device[block][position % self.size] = tuple(seq.tokens[: position + 1])
            seq.num_computed, seq.planned = len(seq.tokens), False
            seq.tokens.append(next(self.tokens))
        self.check_contents({})
        for index in reversed(range(len(self.running))):
            if len(self.running[index].tokens) > self.running[index].max_num_tokens:
                self.free(index)  # its last token needs no slot

    def check_contents(self, copies: dict[int, int]) -> None:
        for seq in self.running:
            table = self.manager.block_table(seq.seq_id)
            for position in range(seq.num_computed):
                block = table[position // self.size]
                slots = self.device[copies.get(block, block)]
                assert slots[position % self.size] == tuple(seq.tokens[: position + 1])

    @rule()
    def plan_all(self):
        for seq in list(self.running):
            if seq in self.running:
                self.plan(self.running.index(seq))

    @invariant()
    def holds(self):
        manager = self.manager
        manager.check_invariants()
        self.check_contents({target: source for source, target in manager.pending_copies()})
        chunks: dict[int, list[Sequence]] = {}
        for seq in self.running:
            table = manager.block_table(seq.seq_id)
            assert table == list(range(table[0], table[0] + len(table))), "in one piece"
            chunks.setdefault(table[0], []).append(seq)
        blocks = [b for seqs in chunks.values() for b in manager.block_table(seqs[0].seq_id)]
        assert len(set(blocks)) == len(blocks), "two reservations overlap"
        usage = manager.usage({seq.seq_id: seq.num_computed for seq in self.running})
        assert usage.total == self.num_blocks * self.size
        assert min(usage.reserved, usage.internal, usage.external, usage.free) >= 0
        assert usage.token_states == sum(
            max(seq.num_computed for seq in seqs) for seqs in chunks.values()
        )
        assert usage.shared == self.size * sum(
            (len(seqs) - 1) * len(manager.block_table(seqs[0].seq_id)) for seqs in chunks.values()
        )
        if self.policy == "orca_oracle":
            assert usage.internal == 0

    def teardown(self):
        if hasattr(self, "manager"):
            while self.running:
                self.free(0)
            self.manager.check_invariants()
            assert self.manager.pending_copies() == []
            assert self.manager.num_free_blocks == self.num_blocks
            assert self.manager.usage({}) == MemoryUsage(
                0, 0, 0, self.manager.usage({}).external, self.manager.usage({}).free
            )


def test_a_long_random_walk_keeps_every_promise():
    """The same, as often as things happen in a busy engine."""
    seen: Counter[str] = Counter()
    rng = random.Random(0)
    for policy, block_size in product(("orca_max", "orca_pow2", "orca_oracle"), (1, 2, 4)):
        machine = ContiguousMachine()
        machine.start(policy, rng.randrange(32, 80), block_size)
        for _ in range(600):
            index = rng.randrange(30)
            match rng.choices(range(6), [4, 2, 8, 6, 2, 8])[0]:
                case 0:
                    machine.allocate(rng.randint(1, 8), rng.randint(1, 15), rng.choice([1, 2, 3]))
                case 1 if machine.running:
                    machine.plan(index)
                case 2:
                    machine.plan_all()
                case 3 if machine.running:
                    machine.fork(index)
                case 4 if machine.running:
                    machine.free(index)
                case 5:
                    machine.step(is_lost=rng.random() < 0.3)
            machine.holds()
        machine.teardown()
        seen += machine.seen
    assert min(seen[event] for event in EVENTS) > 20, seen


EVENTS = ("refusals", "failures", "moves", "undone moves", "lost copies")

TestContiguousMachine = ContiguousMachine.TestCase
TestContiguousMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)
