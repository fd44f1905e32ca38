"""A model and a cache without a device, to run the scheduler against."""

from collections.abc import Callable, Iterable

from paged_jax.memory.block_manager import BlockManager
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request, Sequence
from paged_jax.scheduling.sampling_params import SamplingParams
from paged_jax.scheduling.scheduler import Scheduler

EOS = 0
VOCAB_SIZE = 50


def make_scheduler(num_blocks: int = 65, block_size: int = 4, **limits) -> Scheduler:
    limits = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "max_prefill_seqs": 8,
        "eos_token_ids": (EOS,),
        "watermark": 0.0,
    } | limits
    return Scheduler(BlockManager(num_blocks, block_size), **limits)


def make_request(name: str, num_prompt: int, *, seed: int = 0, arrival: float = 0.0, **params):
    prompt = tuple(1 + (7 * seed + 3 * i) % (VOCAB_SIZE - 1) for i in range(num_prompt))
    return Request(name, prompt, SamplingParams(**params), arrival, seed)


def next_token(seq: Sequence) -> int:
    """A stand-in for sampling: it depends on the sequence's tokens and seed, on nothing else."""
    value = seq.sampling_seed
    for token in seq.token_ids:
        value = (value * 1_000_003 + token + 1) % 2**32
    return (value >> 7) % VOCAB_SIZE


class FakeExecutor:
    """Keeps, for each slot, which token of which sequence it holds.

    Every step first writes, then checks that what it would attend to is really there: a block
    lent to two sequences, a table that moved or a token that was skipped fails at once.
    """

    def __init__(self, memory: BlockManager, sample: Callable[[Sequence], int] = next_token):
        self.memory = memory
        self.sample = sample
        self.slots: dict[int, tuple[int, int, int]] = {}  # slot -> (sequence, position, token)

    def run(self, batch: ScheduledBatch) -> list[int]:
        chunks = [(seq, seq.num_tokens - 1, seq.num_tokens) for seq in batch.decodes]
        chunks += [
            (chunk.seq, chunk.start, chunk.start + chunk.num_tokens) for chunk in batch.prefills
        ]
        assert len({seq.seq_id for seq, _, _ in chunks}) == len(chunks), "one entry per sequence"
        for seq, start, end in chunks:
            assert start == seq.num_computed_tokens
            for position in range(start, end):
                self.slots[self._slot(seq, position)] = self._content(seq, position)
        for seq, _, end in chunks:
            for position in range(end):
                assert self.slots[self._slot(seq, position)] == self._content(seq, position)
        sampled = [seq for seq, _, end in chunks if end == seq.num_tokens]
        return [self.sample(seq) for seq in sampled]

    def _slot(self, seq: Sequence, position: int) -> int:
        block_size = self.memory.block_size
        block = self.memory.block_table(seq.seq_id)[position // block_size]
        return block * block_size + position % block_size

    @staticmethod
    def _content(seq: Sequence, position: int) -> tuple[int, int, int]:
        return seq.seq_id, position, seq.token_ids[position]


def run_step(scheduler: Scheduler, executor: FakeExecutor) -> ScheduledBatch:
    """One iteration; fails if it has nothing to do or a block has leaked."""
    batch = scheduler.schedule()
    assert batch.num_tokens > 0
    scheduler.update(batch, executor.run(batch))
    executor.memory.check_invariants()
    return batch


def run_to_end(scheduler: Scheduler, executor: FakeExecutor) -> list[ScheduledBatch]:
    """All iterations until there is no more work; all blocks are free then."""
    batches = []
    while scheduler.has_work:
        batches.append(run_step(scheduler, executor))
    assert scheduler.memory.num_free_blocks == scheduler.memory.num_total_blocks
    return batches


def never_ends(seq: Sequence) -> int:
    """A model without EOS: what it says tells the position."""
    return 1 + seq.num_tokens % 7


def names(sequences: Iterable[Sequence]) -> list[str]:
    return [seq.request.request_id for seq in sequences]


def chunks(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    """(request, start, number of tokens) of each prefill chunk."""
    return [(c.seq.request.request_id, c.start, c.num_tokens) for c in batch.prefills]


def outputs(request: Request) -> list[tuple[list[int], str | None]]:
    """(generated tokens, finish reason) of each sequence."""
    return [(seq.output_token_ids, seq.finish_reason) for seq in request.sequences]
