"""The jitted steps: in place, and the same numbers however a prompt is cut or batched."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import SamplingParams
from paged_jax.executor.prefill_arrays import PrefillShape, prefill_arrays
from paged_jax.executor.sampling_rows import SamplingArrays, sampling_rows
from paged_jax.memory.block_manager import BlockManager
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import bind, init_params
from paged_jax.scheduling.batch import PrefillChunk
from paged_jax.scheduling.request import Request
from paged_jax.steps import kv_cache
from paged_jax.steps.attention import PagedAttention, causal_attention
from paged_jax.steps.logits import NO_SLOT
from paged_jax.steps.model_steps import decode_step, head_step, prefill_step

CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
)
S, NUM_BLOCKS, MAX_LEN, MAX_CHUNKS = 16, 40, 256, 4
ATTENTION = PagedAttention(CONFIG.head_dim**-0.5, None, "xla", "xla")
STATIC = {"config": CONFIG, "attention": ATTENTION}


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, seed=1)


def new_cache(fill: float = 0.0, num_blocks: int = NUM_BLOCKS):
    cache = kv_cache.create(
        num_layers=CONFIG.num_layers,
        num_blocks=num_blocks,
        num_kv_heads=CONFIG.num_kv_heads,
        block_size=S,
        head_dim=CONFIG.head_dim,
        dtype="float32",
    )
    return jax.tree.map(lambda x: jnp.full_like(x, fill), cache)


def greedy(seqs, num_rows: int):
    """A batch of sequences that need no history."""
    rows = sampling_rows(seqs, num_rows)
    return SamplingArrays(CONFIG.vocab_size).batch(rows, seqs, [NO_SLOT] * len(seqs))


class Host:
    """Sequences with block tables, and the steps over them; the cache starts out as NaN."""

    def __init__(self, params, lengths: list[int], seed: int = 0):
        rng = np.random.default_rng(seed)
        self.params = params
        self.cache = new_cache(np.nan)
        self.history = jnp.zeros((1, MAX_LEN), jnp.int32)
        self.memory = BlockManager(NUM_BLOCKS, S)
        self.seqs = [
            Request(
                str(i),
                tuple(rng.integers(0, CONFIG.vocab_size, length).tolist()),
                SamplingParams(temperature=0, max_tokens=20, logprobs=5),
                0.0,
                0,
            ).sequences[0]
            for i, length in enumerate(lengths)
        ]
        # Tables that interleave.
        for seq in self.seqs:
            self.memory.allocate(seq.seq_id, seq.token_ids[:1], max_num_tokens=MAX_LEN)
        for grown in range(1, MAX_LEN):
            for seq in self.seqs:
                if grown <= seq.num_tokens + 20:
                    assert self.memory.append(seq.seq_id, grown)

    def prefill(self, chunks: list[tuple[int, int, int]], bucket: int) -> np.ndarray:
        """(sequence, start, number of tokens) -> hidden states of each chunk's last token."""
        parts = [PrefillChunk(self.seqs[i], start, n) for i, start, n in chunks]
        arrays = prefill_arrays(
            parts,
            PrefillShape.of(bucket, MAX_CHUNKS),
            self.memory,
            max_chunks=MAX_CHUNKS,
            max_blocks=MAX_LEN // S,
        )
        self.cache, (hidden, _) = prefill_step(self.params, self.cache, *arrays, **STATIC)
        return np.asarray(hidden)[: len(chunks)]

    def decode(self, rows: list[int], bucket: int):
        """One token for each of these sequences; the greedy tokens and their log-probabilities."""
        seqs = [self.seqs[i] for i in rows]
        tokens, positions, lens = (np.zeros(bucket, np.int32) for _ in range(3))
        tables = np.zeros((bucket, MAX_LEN // S), np.int32)
        for row, seq in enumerate(seqs):
            tokens[row], positions[row] = seq.token_ids[-1], seq.num_tokens - 1
            lens[row] = seq.num_tokens
            table = self.memory.block_table(seq.seq_id)
            tables[row, : len(table)] = table
        sampling = greedy(seqs, bucket)
        self.cache, sampled, self.history = decode_step(
            self.params,
            self.cache,
            tokens,
            positions,
            tables,
            lens,
            sampling,
            self.history,
            **STATIC,
        )
        return sampled

    def contents(self, i: int) -> np.ndarray:
        """Keys and values of a sequence's slots, whatever its blocks: [leaves, slots, Hk, D]."""
        table = self.memory.block_table(self.seqs[i].seq_id)
        leaves = np.stack([np.asarray(leaf)[table] for leaf in jax.tree.leaves(self.cache)])
        L, n, Hk, _, D = leaves.shape
        return leaves.swapaxes(2, 3).reshape(L, n * S, Hk, D)


@partial(jax.jit, static_argnums=0)
def dense_hidden(config, params, tokens):
    """Hidden states of a plain causal forward pass over i32[T]."""
    model = bind(config, params)
    positions = jnp.arange(tokens.shape[0])[None]
    none = [None] * config.num_layers
    hidden, _ = model(tokens[None], positions, causal_attention, none, config.head_dim**-0.5)
    return hidden[0], model.logits(hidden[0])


def dense(params, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(hidden states, logits) of each token, padded for one compilation."""
    padded = np.zeros(MAX_LEN, np.int32)
    padded[: len(token_ids)] = token_ids
    return tuple(np.asarray(x)[: len(token_ids)] for x in dense_hidden(CONFIG, params, padded))


CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize(
    "cuts",
    [[100], [64, 36], [1, 99], [33, 16, 51], [7] * 14 + [2], [16] * 6 + [4]],
    ids=str,
)
def test_prefill_in_chunks_is_the_dense_forward_pass(params, cuts):
    host = Host(params, [100])
    wanted, _ = dense(params, host.seqs[0].token_ids)
    start = 0
    for size in cuts:
        [hidden] = host.prefill([(0, start, size)], bucket=100)
        start += size
        np.testing.assert_allclose(hidden, wanted[start - 1], **CLOSE)
    contents = host.contents(0)
    assert np.isfinite(contents[:, :100]).all()
    assert np.isnan(contents[:, 100:]).all(), "nothing is written beyond the prompt"


def test_prompts_together_are_each_alone(params):
    """Four prompts in one step, and later chunks of some next to beginnings of others."""
    lengths = [20, 57, 3, 16]
    host = Host(params, lengths)
    first = host.prefill([(0, 0, 20), (1, 0, 40), (2, 0, 3)], bucket=100)
    second = host.prefill([(1, 40, 17), (3, 0, 16)], bucket=100)
    wanted = [dense(params, seq.token_ids)[0] for seq in host.seqs]
    for hidden, (i, at) in zip(
        [*first, *second], [(0, 19), (1, 39), (2, 2), (1, 56), (3, 15)], strict=True
    ):
        np.testing.assert_allclose(hidden, wanted[i][at], **CLOSE)
    for i, length in enumerate(lengths):
        alone = Host(params, lengths)
        alone.prefill([(i, 0, length)], bucket=100)
        np.testing.assert_allclose(
            host.contents(i)[:, :length], alone.contents(i)[:, :length], **CLOSE
        )


def test_decode_after_prefill_is_the_dense_forward_pass(params):
    """Sequences of different lengths in one batch, over block borders."""
    lengths = [31, 5, 64]
    host = Host(params, lengths)
    for i, length in enumerate(lengths):
        host.prefill([(i, 0, length)], bucket=100)
    for _ in range(18):
        for i, seq in enumerate(host.seqs):
            seq.token_ids.append((7 * seq.num_tokens + i) % CONFIG.vocab_size)
        sampled = host.decode([2, 0, 1], bucket=4)
        for row, i in enumerate([2, 0, 1]):
            logits = dense(params, host.seqs[i].token_ids)[1][-1]
            assert sampled.tokens[row] == logits.argmax()
            logprobs = np.asarray(jax.nn.log_softmax(logits))
            np.testing.assert_allclose(
                sampled.top_logprobs[row][:5], np.sort(logprobs)[::-1][:5], rtol=1e-4
            )


def test_the_head_samples_the_rows_it_is_given(params):
    host = Host(params, [20, 57, 3])
    arrays = [(0, 0, 20), (1, 0, 50), (2, 0, 3)]
    hidden = np.zeros((MAX_CHUNKS, CONFIG.hidden_size), np.float32)
    hidden[:3] = host.prefill(arrays, bucket=100)
    completing = [host.seqs[0], host.seqs[2]]
    sampled = head_step(
        params,
        hidden,
        np.array([0, 2], np.int32),
        np.array([19, 2], np.int32),
        greedy(completing, 2),
        host.history,
        config=CONFIG,
    )
    wanted = [dense(params, seq.token_ids)[1][-1].argmax() for seq in completing]
    assert sampled.tokens.tolist() == wanted


def blocks_of(host: Host, rows: list[int]) -> set[int]:
    return {block for i in rows for block in host.memory.block_table(host.seqs[i].seq_id)}


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_padding_writes_to_the_null_block_alone(params, step):
    """All but the slots of the batch's own tokens is bit for bit what it was, NaN included."""
    host = Host(params, [30, 50])
    host.prefill([(0, 0, 30)], bucket=100)
    before = [np.array(leaf) for leaf in jax.tree.leaves(host.cache)]
    if step == "decode":
        host.seqs[0].token_ids.append(1)
        host.decode([0], bucket=4)
        written = {(0, position) for position in [30]}
    else:
        host.prefill([(1, 0, 7)], bucket=100)
        written = {(1, position) for position in range(7)}
    slots = [
        host.memory.block_table(host.seqs[i].seq_id)[at // S] * S + at % S for i, at in written
    ]
    for old, leaf in zip(before, jax.tree.leaves(host.cache), strict=True):
        changed = (old.view(np.uint32) != np.asarray(leaf).view(np.uint32)).any(axis=(1, 3))
        assert set(np.flatnonzero(changed[1:]) + S) == set(slots)


def test_a_batch_of_padding_alone_changes_nothing_but_the_null_block(params):
    host = Host(params, [30])
    host.prefill([(0, 0, 30)], bucket=100)
    before = [np.array(leaf)[1:] for leaf in jax.tree.leaves(host.cache)]
    host.decode([], bucket=4)
    host.prefill([], bucket=100)
    for old, leaf in zip(before, jax.tree.leaves(host.cache), strict=True):
        np.testing.assert_array_equal(old, np.asarray(leaf)[1:])


def arguments(params, step: str, num_blocks: int):
    cache = new_cache(num_blocks=num_blocks)
    if step == "decode":
        B = 8
        zeros, tables = np.zeros(B, np.int32), np.zeros((B, MAX_LEN // S), np.int32)
        history = jnp.zeros((B, MAX_LEN), jnp.int32)
        return params, cache, zeros, zeros, tables, zeros, greedy([], B), history
    arrays = prefill_arrays(
        [],
        PrefillShape.of(32, MAX_CHUNKS),
        BlockManager(2, S),
        max_chunks=MAX_CHUNKS,
        max_blocks=MAX_LEN // S,
    )
    return params, cache, *arrays


def assert_in_place(compiled, cache) -> None:
    """The compiled step takes over the whole cache and works in a tenth of its size."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes, "parts of the cache are copied"
    assert memory.temp_size_in_bytes < num_bytes / 10, f"{memory.temp_size_in_bytes} temporary"


STEPS = {"decode": decode_step, "prefill": prefill_step}


@pytest.mark.parametrize("step", STEPS)
def test_steps_update_the_cache_in_place(params, step):
    args = arguments(params, step, num_blocks=4000)
    compiled = STEPS[step].lower(*args, **STATIC).compile()
    assert_in_place(compiled, args[1])


def test_a_step_that_does_not_donate_the_cache_is_noticed(params):
    """So that the test above can fail."""
    copying = jax.jit(decode_step.__wrapped__, static_argnames=("config", "attention"))
    args = arguments(params, "decode", num_blocks=4000)
    with pytest.raises(AssertionError, match="parts of the cache are copied"):
        assert_in_place(copying.lower(*args, **STATIC).compile(), args[1])


@pytest.mark.parametrize("step", STEPS)
def test_steps_leave_the_cache_where_it_lies(params, step):
    args = arguments(params, step, num_blocks=100)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(args[1])]
    cache, *_ = STEPS[step](*args, **STATIC)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)] == before
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(args[1]))
