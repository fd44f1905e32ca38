"""A model and a cache without a device, to run the scheduler against."""

from collections.abc import Callable, Iterable

import numpy as np

from paged_jax.config import EngineConfig
from paged_jax.memory.block_manager import BlockManager
from paged_jax.memory.interface import MemoryManager
from paged_jax.outputs import TokenLogprobs
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.estimates import StepEstimates
from paged_jax.scheduling.policies import Policy
from paged_jax.scheduling.request import Request, Sequence
from paged_jax.scheduling.scheduler import Scheduler

EOS = 0
VOCAB_SIZE = 50


def make_scheduler(
    num_blocks: int = 65,
    block_size: int = 4,
    *,
    enable_prefix_caching: bool = False,
    num_swap_blocks: int = 0,
    memory: BlockManager | None = None,
    **options,
) -> Scheduler:
    if memory is None:
        memory = BlockManager(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_swap_blocks=num_swap_blocks,
        )
    return scheduler_over(memory, enable_prefix_caching=enable_prefix_caching, **options)


def scheduler_over(
    memory: MemoryManager,
    *,
    policy: str | Policy = "fcfs",
    eos_token_ids: tuple[int, ...] = (EOS,),
    prefill_sizes: tuple[int, ...] = (),
    estimates: StepEstimates | None = None,
    **options,
) -> Scheduler:
    small = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "max_prefill_seqs": 8,
        "watermark": 0.0,
    }
    return Scheduler(
        memory,
        EngineConfig(scheduling_policy=policy, **small | options),
        eos_token_ids=eos_token_ids,
        prefill_sizes=prefill_sizes,
        estimates=estimates,
    )


def make_request(
    name: str,
    num_prompt: int,
    *,
    seed: int = 0,
    prompt_seed: int | None = None,
    arrival: float = 0.0,
    priority: int = 0,
    deadline_s: float | None = None,
    **params,
):
    start = 7 * (seed if prompt_seed is None else prompt_seed)
    prompt = tuple(1 + (start + 3 * i) % (VOCAB_SIZE - 1) for i in range(num_prompt))
    return Request(name, prompt, SamplingParams(**params), arrival, seed, priority, deadline_s)


def next_token(seq: Sequence) -> int:
    """A stand-in for sampling: it depends on the sequence's tokens and seed, on nothing else."""
    return (hash((seq.sampling_seed, *seq.token_ids)) >> 7) % VOCAB_SIZE


class FakeExecutor:
    """Keeps, for each slot, the tokens that what it holds was computed from.

    Every step first swaps and copies, then writes, then checks that what it would attend to is
    really there: a block lent to two sequences, a table that moved, a copy or a swap that was
    forgotten, a hit on what has not been computed or a token that was skipped fails at once.
    """

    def __init__(self, memory: BlockManager, sample: Callable[[Sequence], int] = next_token):
        self.memory = memory
        self.sample = sample
        self.slots: dict[int, int | None] = {}  # prefixes of tokens, by their number
        self.host_slots: dict[int, int | None] = {}
        self._prefixes: dict[tuple[object, object], int] = {}  # (what is before, token) -> number
        self._prefixes_of: dict[int, list[int]] = {}  # by sequence, up to each of its tokens

    def run(self, batch: ScheduledBatch) -> list[int]:
        size = self.memory.block_size
        assert self.memory.take_swaps() == (batch.swap_outs, batch.swap_ins)
        assert self.memory.take_copies() == batch.copies
        _move(self.slots, self.host_slots, batch.swap_outs, size)
        _move(self.host_slots, self.slots, batch.swap_ins, size)
        _move(self.slots, self.slots, batch.copies, size)
        chunks = [(seq, seq.num_tokens - 1, seq.num_tokens) for seq in batch.decodes]
        chunks += [
            (chunk.seq, chunk.start, chunk.start + chunk.num_tokens) for chunk in batch.prefills
        ]
        assert len({seq.seq_id for seq, _, _ in chunks}) == len(chunks), "one entry per sequence"
        written: set[int] = set()
        for seq, start, end in chunks:
            assert start == seq.num_computed_tokens
            slots, contents = self._slots_of(seq, start, end), self._contents(seq)[start:end]
            assert written.isdisjoint(slots), "two sequences write to one slot"
            written.update(slots)
            self.slots.update(zip(slots, contents, strict=True))
        for seq, _, end in chunks:
            held = [self.slots.get(slot) for slot in self._slots_of(seq, 0, end)]
            assert held == self._contents(seq)[:end]
        return [self.sample(seq) for seq in batch.sampled]

    def logprobs(self, batch: ScheduledBatch) -> list[TokenLogprobs | None]:
        """Stand-ins that depend on the sequence's tokens alone, for those who need them."""
        return [
            _logprobs(seq) if seq.request.params.wants_candidates else None for seq in batch.sampled
        ]

    def _slots_of(self, seq: Sequence, start: int, end: int) -> list[int]:
        size = self.memory.block_size
        table = self.memory.block_table(seq.seq_id)
        return [table[at // size] * size + at % size for at in range(start, end)]

    def _contents(self, seq: Sequence) -> list[int]:
        """What slots hold once they are computed: a number for the tokens up to each."""
        prefixes = self._prefixes_of.setdefault(seq.seq_id, [])
        for token in seq.token_ids[len(prefixes) :]:
            before = prefixes[-1] if prefixes else (seq.request.params.cache_salt,)
            prefixes.append(self._prefixes.setdefault((before, token), len(self._prefixes)))
        return prefixes


def _move(
    source: dict[int, int | None],
    target: dict[int, int | None],
    blocks: list[tuple[int, int]],
    size: int,
) -> None:
    """Move the contents of blocks of `size` slots at once; what was never written is None."""
    moved = [
        (to * size + i, source.get(block * size + i)) for block, to in blocks for i in range(size)
    ]
    target.update(moved)


def _logprobs(seq: Sequence) -> TokenLogprobs:
    rng = np.random.default_rng(seq.token_ids)
    row = np.log(rng.dirichlet(np.ones(VOCAB_SIZE)))
    top = sorted(enumerate(row.tolist()), key=lambda pair: -pair[1])
    return TokenLogprobs(float(row[0]), tuple(top[:20]))


def run_step(scheduler: Scheduler, executor: FakeExecutor) -> ScheduledBatch:
    """One iteration; fails if it has nothing to do or a block has leaked."""
    batch = scheduler.schedule()
    assert batch.num_tokens > 0
    tokens, logprobs = executor.run(batch), executor.logprobs(batch)
    scheduler.update(batch, tokens, logprobs)
    executor.memory.check_invariants()
    return batch


def run_to_end(scheduler: Scheduler, executor: FakeExecutor) -> list[ScheduledBatch]:
    """All iterations until there is no more work; all blocks are free or pinned then."""
    batches = []
    while scheduler.has_work:
        batches.append(run_step(scheduler, executor))
    memory = scheduler.memory
    assert memory.num_free_blocks + memory.num_pinned_blocks == memory.num_total_blocks
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
    """(generated tokens, finish reason) of each sequence, or of each hypothesis of a search."""
    if request.beam_search is not None:
        return [(h.token_ids, h.finish_reason) for h in request.beam_search.hypotheses]
    return [(seq.output_token_ids, seq.finish_reason) for seq in request.sequences]
