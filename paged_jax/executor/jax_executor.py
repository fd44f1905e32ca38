"""Runs iterations on the device with the jitted steps."""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.stages import Lowered

from paged_jax.attention import PagedAttention
from paged_jax.decode import decode_step, head_step, prefill_step
from paged_jax.executor.buckets import bucket_of, padded
from paged_jax.executor.decode_rows import DecodeRows
from paged_jax.executor.interface import StepResult, TokenLogprobs
from paged_jax.executor.prefill_arrays import PrefillArrays, PrefillShape, prefill_arrays
from paged_jax.executor.sampling_rows import needs_history, sampling_batch, sampling_rows
from paged_jax.kv_cache import PagedKVCache
from paged_jax.memory.interface import MemoryManager
from paged_jax.models.config import ModelConfig
from paged_jax.models.split import Params
from paged_jax.sampling import Sampled
from paged_jax.scheduling.batch import PrefillChunk, ScheduledBatch
from paged_jax.scheduling.request import Sequence


class JaxExecutor:
    """Owns parameters and cache; turns scheduled batches into steps.

    The cache is donated to each step and replaced by what comes back.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        cache: PagedKVCache,
        memory: MemoryManager,
        *,
        attention: str,
        max_num_seqs: int,
        prefill_buckets: Seq[int],
        max_prefill_seqs: int,
        max_model_len: int,
    ):
        self._static: dict[str, Any] = {
            "config": config,
            "attention": PagedAttention(
                config.head_dim**-0.5, config.sliding_window, impl=attention
            ),
        }
        self._params = params
        self.cache = cache
        self._memory = memory
        self._max_prefill_seqs = max_prefill_seqs
        self._max_model_len = max_model_len
        self._rows = DecodeRows(memory, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self._prefill_buckets = prefill_buckets
        self._head_buckets = sorted({1, min(4, max_prefill_seqs), max_prefill_seqs})
        self.num_padded_tokens = 0  # prefill tokens that were padding, since the start
        self.num_prefill_tokens = 0  # prefill tokens computed, padding included

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Dispatch the decode step and the prefill step, then wait for both."""
        if batch.decodes:
            rows = self._rows.update(batch.decodes)
        else:
            self._rows.forget()
        layout = self._prefill_layout(batch.prefills) if batch.prefills else None
        start = time.perf_counter()
        steps: list[tuple[list[Sequence], Sampled]] = []
        if batch.decodes:
            self.cache, sampled = decode_step(self._params, self.cache, *rows, **self._static)
            steps.append((batch.decodes, sampled))
        if layout is not None:
            self.cache, hidden = prefill_step(self._params, self.cache, *layout, **self._static)
            completing = [i for i, chunk in enumerate(batch.prefills) if chunk.completes]
            if completing:
                seqs = [batch.prefills[i].seq for i in completing]
                steps.append((seqs, self._head(hidden, completing, seqs)))
            else:
                hidden.block_until_ready()
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for seqs, sampled in steps:
            tokens += np.asarray(sampled.tokens)[: len(seqs)].tolist()
            logprobs += _logprobs(seqs, sampled)
        return StepResult(tokens, logprobs, time.perf_counter() - start)

    def _prefill_layout(self, chunks: list[PrefillChunk]) -> PrefillArrays:
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        bucket = bucket_of(self._prefill_buckets, num_tokens)
        self.num_prefill_tokens += bucket
        self.num_padded_tokens += bucket - num_tokens
        return self._prefill_arrays(chunks, bucket)

    def _prefill_arrays(self, chunks: list[PrefillChunk], bucket: int) -> PrefillArrays:
        return prefill_arrays(
            chunks,
            PrefillShape.of(bucket, self._max_prefill_seqs),
            self._memory,
            max_chunks=self._max_prefill_seqs,
            max_blocks=self._rows.block_tables.shape[1],
        )

    def _head(self, hidden: jax.Array, rows: list[int], seqs: list[Sequence]) -> Sampled:
        bucket = bucket_of(self._head_buckets, len(rows))
        history = np.zeros((bucket, self._max_model_len), np.int32)
        for row, seq in enumerate(seqs):
            if needs_history(seq):
                history[row, : seq.num_tokens] = seq.token_ids
        positions = padded([seq.num_tokens - 1 for seq in seqs], bucket)
        return head_step(
            self._params,
            hidden,
            padded(rows, bucket),
            positions,
            sampling_batch(sampling_rows(seqs, bucket), history),
            config=self._static["config"],
        )

    def lowerings(self) -> Iterator[tuple[str, Callable[[], Lowered]]]:
        """Every step that can occur, by name, as a function that traces it for compilation."""
        for bucket in self._rows.buckets:
            yield f"decode {bucket}", partial(self._lower_decode, bucket)
        for bucket in self._prefill_buckets:
            yield f"prefill {bucket}", partial(self._lower_prefill, bucket)
        for bucket in self._head_buckets:
            yield f"head {bucket}", partial(self._lower_head, bucket)

    def _lower_decode(self, bucket: int) -> Lowered:
        zeros = np.zeros(bucket, np.int32)
        tables = np.zeros((bucket, self._rows.block_tables.shape[1]), np.int32)
        history = np.zeros((bucket, self._max_model_len), np.int32)
        sampling = sampling_batch(sampling_rows([], bucket), history)
        return decode_step.lower(
            self._params, self.cache, zeros, zeros, tables, zeros, sampling, **self._static
        )

    def _lower_prefill(self, bucket: int) -> Lowered:
        arrays = self._prefill_arrays([], bucket)
        return prefill_step.lower(self._params, self.cache, *arrays, **self._static)

    def _lower_head(self, bucket: int) -> Lowered:
        config = self._static["config"]
        hidden = jax.ShapeDtypeStruct(
            (self._max_prefill_seqs, config.hidden_size), self.cache.k[0].dtype
        )
        zeros = np.zeros(bucket, np.int32)
        history = np.zeros((bucket, self._max_model_len), np.int32)
        sampling = sampling_batch(sampling_rows([], bucket), history)
        return head_step.lower(self._params, hidden, zeros, zeros, sampling, config=config)


def _logprobs(seqs: list[Sequence], sampled: Sampled) -> list[TokenLogprobs | None]:
    """Fetches the log-probabilities only where a sequence asks for them."""
    counts = [seq.request.params.logprobs for seq in seqs]
    if all(count is None for count in counts):
        return [None] * len(seqs)
    own = np.asarray(sampled.logprobs)
    top_tokens, top = np.asarray(sampled.top_tokens), np.asarray(sampled.top_logprobs)
    return [
        None
        if count is None
        else TokenLogprobs(
            float(own[row]),
            tuple(zip(top_tokens[row, :count].tolist(), top[row, :count].tolist(), strict=True)),
        )
        for row, count in enumerate(counts)
    ]
