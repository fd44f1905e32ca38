"""Runs iterations on the device with the jitted steps."""

import time
import types
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered

from paged_jax.config import EngineConfig
from paged_jax.executor.buckets import bucket_of, min_rows, padded, prefill_buckets
from paged_jax.executor.compilation import WarmUp
from paged_jax.executor.decode_rows import DecodeRows, TokenFeed
from paged_jax.executor.histories import Histories
from paged_jax.executor.interface import StepResult
from paged_jax.executor.pending import SCORE_ROWS, PendingSteps, prompt_logprobs
from paged_jax.executor.prefill_arrays import PrefillArrays, PrefillShape, prefill_arrays
from paged_jax.executor.sampling_rows import SamplingArrays, sampling_rows, token_masks
from paged_jax.executor.settings import current_device
from paged_jax.executor.swap_pool import BlockMoves, SwapPool, read_step, write_step
from paged_jax.memory.interface import MemoryManager
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import Params, expected_shapes, nest
from paged_jax.outputs import TokenLogprobs
from paged_jax.scheduling.batch import PrefillChunk, ScheduledBatch
from paged_jax.scheduling.request import Sequence
from paged_jax.steps.attention import PagedAttention
from paged_jax.steps.kv_cache import PagedKVCache
from paged_jax.steps.logits import ArrayLike, LogitsProcessor
from paged_jax.steps.model_steps import (
    copy_step,
    decode_step,
    head_step,
    hold_step,
    prefill_step,
    remember_step,
    score_step,
    take_step,
)
from paged_jax.steps.sampling import Sampled, SamplingBatch


class JaxExecutor:
    """Owns parameters and cache; turns scheduled batches into steps.

    The cache is donated to each step and replaced by the cache that the step returns. `params` may
    be set later than the rest: compiling needs their shapes alone. A step waits until `warm_up`, if
    there is one, has compiled it.

    processors: what requests choose by `SamplingParams.logits_processors`; applied in this order.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: EngineConfig,
        attention: PagedAttention,
        cache: PagedKVCache,
        memory: MemoryManager,
        processors: Mapping[str, LogitsProcessor] = types.MappingProxyType({}),
    ):
        self._static: dict[str, Any] = {"config": config, "attention": attention}
        self._head_static = {"config": config, "processors": tuple(processors.values())}
        self._decode_static = self._static | self._head_static
        self.params: Params = {}
        self.cache = cache
        self.warm_up: WarmUp | None = None
        self._on_device = current_device()  # steps run on it, whatever is the default then
        self._memory = memory
        self._max_prefill_seqs = max_prefill_seqs = options.max_prefill_seqs
        least = min_rows(jax.default_backend(), cache.k[0].dtype)
        max_num_seqs = max(least, options.max_num_seqs)
        self._swap_pool = SwapPool(cache, memory.num_swap_blocks)
        self._prefill_buckets = prefill_buckets(options.max_num_batched_tokens)
        # With forks a prefill may start `max_num_seqs` sequences.
        sizes = (1, min(4, max_prefill_seqs), max_prefill_seqs, max_num_seqs)
        self._head_buckets = sorted({max(least, size) for size in sizes})
        self._histories = Histories(
            max_num_seqs, options.max_model_len, self._head_buckets, self._require
        )
        self._sampling = SamplingArrays(config.vocab_size, tuple(processors))
        self._rows = DecodeRows(
            memory,
            self._sampling,
            self._histories,
            min_rows=least,
            max_num_seqs=max_num_seqs,
            max_model_len=options.max_model_len,
        )
        # Room for the tokens of the widest step, whether it decodes or starts sequences.
        self._feed = TokenFeed(max(self._head_buckets), self._require)
        self._copy_buckets = sorted({min(size, max_num_seqs) for size in (2, 8, max_num_seqs)})
        self.num_padded_tokens = 0  # prefill tokens that were padding, since the start
        self.num_prefill_tokens = 0  # prefill tokens computed, padding included

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run an iteration and wait for its tokens."""
        return self.dispatch(batch).result()

    def dispatch(self, batch: ScheduledBatch, *, after: PendingSteps | None = None) -> PendingSteps:
        """Prepare all arrays, then hand the steps to the device without waiting for them.

        after: the iteration before, if the host does not have its tokens yet. The batch decodes
            these tokens, which then go from step to step on the device.
        """
        with self._on_device():
            return self._dispatch(batch, after)

    def _dispatch(self, batch: ScheduledBatch, after: PendingSteps | None) -> PendingSteps:
        first_seqs = list(batch.first_sampled())
        if batch.resumed or batch.swap_outs or batch.swap_ins:
            # Tables are others than before, perhaps in an iteration that has not been dispatched.
            self._rows.forget()
        errors: dict[int, str] = {}  # by sequence
        decode = self._decode_arrays(batch, after, errors)
        prefill = self._prefill_layout(batch.prefills) if batch.prefills else None
        head = self._head_arrays(batch, first_seqs, errors) if first_seqs else None
        copies = self._copy_arrays(batch.copies)
        swap_outs = self._swap_arrays("read", batch.swap_outs)
        swap_ins = self._swap_arrays("write", [(block, host) for host, block in batch.swap_ins])
        scores = any(chunk.seq.request.lacks_prompt_logprobs for chunk in batch.prefills)
        if scores:
            self._require("score", SCORE_ROWS)

        start = time.perf_counter()
        swap_s = 0.0
        if swap_outs or swap_ins:
            self._swap(swap_outs, swap_ins)
            swap_s = time.perf_counter() - start
        steps: list[tuple[list[Sequence], Sampled]] = []
        last = None
        score: Callable[[], list[list[TokenLogprobs]]] = list
        if copies:
            for arrays in copies:
                self.cache = copy_step(self.cache, *arrays)
            self._memory.take_copies()
        if decode:
            self.cache, sampled, self._histories.array = decode_step(
                self.params, self.cache, *decode, self._histories.array, **self._decode_static
            )
            steps.append((batch.decodes, sampled))
        if prefill:
            self.cache, (last, hidden) = prefill_step(
                self.params, self.cache, *prefill, **self._static
            )
            if head:
                sampled = head_step(
                    self.params, last, *head, self._histories.array, **self._head_static
                )
                steps.append((first_seqs, sampled))
            if scores:
                score = partial(self._score, batch.prefills, hidden)
        return PendingSteps(
            steps, last, score, start_s=start, swap_s=swap_s, after=after, errors=errors
        )

    def _score(self, chunks: list[PrefillChunk], hidden: jax.Array) -> list[list[TokenLogprobs]]:
        step = partial(score_step, self.params, config=self._static["config"])
        with self._on_device():
            return prompt_logprobs(chunks, hidden, step)

    def _swap(self, outs: list[BlockMoves], ins: list[BlockMoves]) -> None:
        """Move blocks to host memory, then others from there, and wait for the moves."""
        pool = self._swap_pool
        for blocks, hosts in outs:
            pool.put(hosts, read_step(self.cache, blocks))
        self._memory.take_swap_outs()
        for blocks, hosts in ins:
            self.cache = write_step(self.cache, pool.get(hosts, len(blocks)), blocks)
        jax.block_until_ready(jax.tree.leaves(self.cache))
        self._memory.take_swaps()

    @property
    def cache_is_lost(self) -> bool:
        """Whether the cache is gone: a step took it and failed, or an empty one had no room.

        So it is if the history is gone: sequences whose tokens stood there begin anew.
        """
        leaves = jax.tree.leaves((self.cache, self._histories.array))
        if any(not isinstance(leaf, jax.Array) or leaf.is_deleted() for leaf in leaves):
            return True
        try:
            jax.block_until_ready(leaves)
        except jax.errors.JaxRuntimeError:
            return True
        return False

    def reset_cache(self) -> None:
        """Start again with an empty cache of the same shape."""
        # The old cache goes first: there may be no room for both.
        self.cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.cache)
        with self._on_device():
            self.cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.cache)
            self._histories.reset()
        self._rows.forget()

    def _require(self, step: str, bucket: int) -> None:
        if self.warm_up is not None:
            self.warm_up.require(f"{step} {bucket}")

    # Arrays of the steps, each of which is compiled by the time that its arrays are returned

    def _decode_arrays(
        self, batch: ScheduledBatch, after: PendingSteps | None, errors: dict[int, str]
    ) -> tuple[ArrayLike, np.ndarray, np.ndarray, np.ndarray, SamplingBatch] | None:
        """Arguments of `decode_step`; None if the batch decodes nothing."""
        if not batch.decodes:
            self._rows.forget()
            return None
        tokens, positions, tables, lens, sampling = self._rows.update(
            batch.decodes, tables_changed=bool(batch.copies), is_ahead=after is not None
        )
        bucket = len(tokens)
        self._require("decode", bucket)
        if self._rows.has_constraints:
            sampling = self._masked(sampling, batch.decodes, bucket, errors)
        if after is None:
            return tokens, positions, tables, lens, sampling
        fed = self._feed.tokens(batch.decodes, after.steps, bucket)
        return fed, positions, tables, lens, sampling

    def _masked(
        self, sampling: SamplingBatch, seqs: list[Sequence], num_rows: int, errors: dict[int, str]
    ) -> SamplingBatch:
        """The batch with masks of constraints; `errors` gets why a sequence's has raised."""
        masks, raised = token_masks(seqs, num_rows, self._sampling.vocab_size)
        errors |= raised
        return replace(sampling, rules=replace(sampling.rules, allowed=masks))

    def _prefill_layout(self, chunks: list[PrefillChunk]) -> PrefillArrays:
        """Arguments of `prefill_step`."""
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        bucket = bucket_of(self._prefill_buckets, num_tokens)
        self.num_prefill_tokens += bucket
        self.num_padded_tokens += bucket - num_tokens
        self._require("prefill", bucket)
        return self._prefill_arrays(chunks, bucket)

    def _prefill_arrays(self, chunks: list[PrefillChunk], bucket: int) -> PrefillArrays:
        return prefill_arrays(
            chunks,
            PrefillShape.of(bucket, self._max_prefill_seqs),
            self._memory,
            max_chunks=self._max_prefill_seqs,
            max_blocks=self._rows.block_tables.shape[1],
        )

    def _copy_arrays(self, copies: list[tuple[int, int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Arguments (sources, targets) of as many `copy_step`s as it takes, in any order.

        They are filled up with copies of the null block to itself.
        """
        steps = []
        for part in batched(copies, self._copy_buckets[-1]):
            bucket = bucket_of(self._copy_buckets, len(part))
            self._require("copy", bucket)
            sources, targets = zip(*part, strict=True)
            steps.append((padded(sources, bucket), padded(targets, bucket)))
        return steps

    def _swap_arrays(self, step: str, moves: list[tuple[int, int]]) -> list[BlockMoves]:
        parts = list(self._swap_pool.parts(moves))
        for blocks, _ in parts:
            self._require(step, len(blocks))
        return parts

    def _head_arrays(
        self, batch: ScheduledBatch, seqs: list[Sequence], errors: dict[int, str]
    ) -> tuple[np.ndarray, np.ndarray, SamplingBatch]:
        """Arguments of `head_step` for the prompts that complete; forks repeat their row."""
        rows = [
            row
            for row, chunk in enumerate(batch.prefills)
            if chunk.completes
            for _ in (chunk.seq, *chunk.forks)
        ]
        bucket = bucket_of(self._head_buckets, len(rows))
        self._require("head", bucket)
        positions = padded([seq.num_tokens - 1 for seq in seqs], bucket)
        slots = self._histories.slots(seqs, beside=batch.decodes, anew=True)
        sampling = self._sampling.batch(sampling_rows(seqs, bucket), seqs, slots)
        if any(seq.constraint is not None for seq in seqs):
            sampling = self._masked(sampling, seqs, bucket, errors)
        return padded(rows, bucket), positions, sampling

    def lowerings(self) -> dict[str, Callable[[], Lowered]]:
        """Every step that can occur, by name, as a function that traces it for compilation.

        The steps that a first request needs come first. None where jit is disabled.
        """
        if jax.config.jax_disable_jit:
            return {}
        config, dtype = self._static["config"], self.cache.k[0].dtype
        shapes = expected_shapes(config)
        params = nest({name: jax.ShapeDtypeStruct(s, dtype) for name, s in shapes.items()})
        cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.cache)
        num_blocks = self._rows.block_tables.shape[1]

        history = jax.ShapeDtypeStruct(self._histories.array.shape, np.int32)

        def sampling(bucket: int) -> SamplingBatch:
            return self._sampling.batch(sampling_rows([], bucket), [], [])

        def decode(bucket: int) -> Lowered:
            zeros = np.zeros(bucket, np.int32)
            tables = np.zeros((bucket, num_blocks), np.int32)
            rows = (zeros, zeros, tables, zeros, sampling(bucket), history)
            return decode_step.lower(params, cache, *rows, **self._decode_static)

        def prefill(bucket: int) -> Lowered:
            arrays = self._prefill_arrays([], bucket)
            return prefill_step.lower(params, cache, *arrays, **self._static)

        def head(bucket: int) -> Lowered:
            hidden = jax.ShapeDtypeStruct((self._max_prefill_seqs, config.hidden_size), dtype)
            zeros = np.zeros(bucket, np.int32)
            rows = (zeros, zeros, sampling(bucket), history)
            return head_step.lower(params, hidden, *rows, **self._head_static)

        def remember(bucket: int) -> Lowered:
            tokens = np.zeros(history.shape[1], np.int32)
            return remember_step.lower(history, tokens, np.zeros(bucket, np.int32))

        def score(rows: int) -> Lowered:
            hidden = jax.ShapeDtypeStruct((rows, config.hidden_size), dtype)
            return score_step.lower(params, hidden, np.zeros(rows, np.int32), config=config)

        def copy(bucket: int) -> Lowered:
            zeros = np.zeros(bucket, np.int32)
            return copy_step.lower(cache, zeros, zeros)

        def read(bucket: int) -> Lowered:
            return read_step.lower(cache, np.zeros(bucket, np.int32))

        def write(bucket: int) -> Lowered:
            return write_step.lower(
                cache, self._swap_pool.get([], bucket), np.zeros(bucket, np.int32)
            )

        def hold(bucket: int) -> Lowered:
            return hold_step.lower(self._feed.empty, np.zeros(bucket, np.int32), np.int32(0))

        def take(bucket: int) -> Lowered:
            return take_step.lower(self._feed.empty, np.zeros(bucket, np.int32))

        sampled_buckets = sorted({*self._rows.buckets, *self._head_buckets})
        steps: dict[Callable[[int], Lowered], Seq[int]] = {
            head: self._head_buckets,
            prefill: self._prefill_buckets,
            decode: self._rows.buckets,
            copy: self._copy_buckets,
            remember: self._head_buckets,
            score: [SCORE_ROWS],
            read: self._swap_pool.buckets,
            write: self._swap_pool.buckets,
            hold: sampled_buckets,
            take: self._rows.buckets,
        }
        sizes = ((lower, bucket) for lower, buckets in steps.items() for bucket in buckets)
        return {f"{lower.__name__} {bucket}": partial(lower, bucket) for lower, bucket in sizes}
