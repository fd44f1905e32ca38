"""A device that works off a queue in virtual time, and knows what every slot was computed from."""

from types import SimpleNamespace

import numpy as np

from paged_jax.executor.interface import Executor, StepResult
from paged_jax.memory.block_manager import BlockManager
from paged_jax.outputs import TokenLogprobs
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Sequence
from tests.scheduling.fakes import VOCAB_SIZE, next_token


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class QueuedDevice(Executor):
    """Takes what the host knows at a dispatch, and computes when the result is asked for, in order.

    A decode behind an iteration whose tokens are not known yet takes its token from that iteration.
    Every step checks that all it attends to is really there: a slot that somebody else has written
    since, because its block was given away too early, fails at once.

    host_s: what a dispatch takes the host; device_s: what an iteration takes the device.
    """

    def __init__(self, memory: BlockManager, clock: Clock, *, host_s: float, device_s: float):
        self.memory = memory
        self.clock = clock
        self.host_s, self.device_s = host_s, device_s
        self.events: list[tuple[str, int]] = []  # ("dispatch" | "result", number of the iteration)
        # What the n-th call raises, as ("dispatch" | "result", n); negative n: once it is done.
        self.faults: dict[tuple[str, int], BaseException] = {}
        self.bad_tokens: set[tuple[int, int]] = set()  # (sequence, length): rows not finite
        self.slots: dict[int, object] = {}
        self.host_slots: dict[int, object] = {}
        self.num_dispatched = 0
        self.busy_until = 0.0
        self._queue: list[Job] = []

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.dispatch(batch).result()

    def dispatch(self, batch: ScheduledBatch, *, after: "Job | None" = None) -> "Job":
        number = self.num_dispatched
        self.num_dispatched += 1
        self.fail(("dispatch", number))
        assert self.memory.take_swaps() == (batch.swap_outs, batch.swap_ins)
        assert self.memory.take_copies() == batch.copies
        self.clock.now += self.host_s
        job = Job(self, batch, after, number)
        self.events.append(("dispatch", job.number))
        job.start_s = max(self.clock.now, self.busy_until)
        job.end_s = self.busy_until = job.start_s + self.device_s
        self._queue.append(job)
        self.fail(("dispatch", -1 - number))
        return job

    def fail(self, call: tuple[str, int]) -> None:
        if call in self.faults:
            raise self.faults.pop(call)

    def compute_until(self, job: "Job") -> None:
        while job in self._queue:
            self._queue.pop(0).compute()


class Job:
    """A dispatched iteration: the tables and tokens that the host knew then."""

    def __init__(
        self, device: QueuedDevice, batch: ScheduledBatch, after: "Job | None", number: int
    ):
        self.device, self.batch, self.number = device, batch, number
        self.after = after
        self.start_s = self.end_s = 0.0
        self.tokens: dict[int, int] = {}  # by sequence
        self.views: dict[int, list[int]] = {}
        self.sampled = list(batch.sampled)
        size = device.memory.block_size
        self.rows: list[tuple[Sequence, list[int], list[int], int, bool]] = []
        for seq in batch.decodes:
            num_tokens = seq.num_tokens + (after is not None)
            self._add(seq, num_tokens - 1, num_tokens, size, is_decode=True)
        for chunk in batch.prefills:
            self._add(chunk.seq, chunk.start, chunk.start + chunk.num_tokens, size)

    def _add(self, seq, start: int, end: int, size: int, *, is_decode: bool = False) -> None:
        table = self.device.memory.block_table(seq.seq_id)
        slots = [table[at // size] * size + at % size for at in range(end)]
        self.rows.append((seq, list(seq.token_ids), slots, start, is_decode))

    def compute(self) -> None:
        device, batch = self.device, self.batch
        size = device.memory.block_size
        for source, target, moves in (
            (device.slots, device.host_slots, batch.swap_outs),
            (device.host_slots, device.slots, batch.swap_ins),
            (device.slots, device.slots, batch.copies),
        ):
            moved = [
                (to * size + i, source.get(block * size + i))
                for block, to in moves
                for i in range(size)
            ]
            target.update(moved)
        written: set[int] = set()
        for seq, tokens, slots, start, is_decode in self.rows:
            if is_decode and self.after is not None:
                tokens.append(self.after.tokens[seq.seq_id])
            self.views[seq.seq_id] = tokens
            assert written.isdisjoint(slots[start:]), "two sequences write to one slot"
            written.update(slots[start:])
            for at in range(start, len(slots)):
                device.slots[slots[at]] = _content(seq, tokens, at)
        for seq, tokens, slots, _, _ in self.rows:
            held = [device.slots.get(slot) for slot in slots]
            assert held == [_content(seq, tokens, at) for at in range(len(slots))]
        for chunk in batch.prefills:
            for fork in chunk.forks:
                self.views[fork.seq_id] = self.views[chunk.seq.seq_id]
        for seq in self.sampled:
            view = SimpleNamespace(
                token_ids=self.views[seq.seq_id], sampling_seed=seq.sampling_seed
            )
            self.tokens[seq.seq_id] = next_token(view)
        self.after = None

    def result(self) -> StepResult:
        device = self.device
        device.events.append(("result", self.number))
        device.fail(("result", self.number))
        device.compute_until(self)
        device.fail(("result", -1 - self.number))
        device.clock.now = max(device.clock.now, self.end_s)
        logprobs = [
            _logprobs(self.views[seq.seq_id]) if seq.request.params.wants_candidates else None
            for seq in self.sampled
        ]
        failed = {
            index: "not finite"
            for index, seq in enumerate(self.sampled)
            if (seq.request.seed, len(self.views[seq.seq_id])) in device.bad_tokens
        }
        tokens = [self.tokens[seq.seq_id] for seq in self.sampled]
        return StepResult(tokens, logprobs, self.end_s - self.start_s, failed=failed)


def _content(seq: Sequence, tokens: list[int], at: int) -> object:
    return seq.request.params.cache_salt, *tokens[: at + 1]


def _logprobs(tokens: list[int]) -> TokenLogprobs:
    row = np.log(np.random.default_rng(tokens).dirichlet(np.ones(VOCAB_SIZE)))
    top = sorted(enumerate(row.tolist()), key=lambda pair: -pair[1])
    return TokenLogprobs(float(row[0]), tuple(top[:20]))
