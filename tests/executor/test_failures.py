"""What the executor says of steps that go wrong: logits that are no numbers, a lost cache."""

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from paged_jax import Engine, SamplingParams
from paged_jax.executor import jax_executor
from paged_jax.executor.compilation import count_compilations
from paged_jax.scheduling.request import Request
from paged_jax.steps.kv_cache import PagedKVCache

GREEDY = {"temperature": 0.0, "max_tokens": 8}


class Loop:
    """An engine's scheduler and executor, driven by hand."""

    def __init__(self, model):
        self.engine = Engine(
            model,
            num_blocks=16,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=64,
            max_prefill_seqs=4,
            enable_prefix_caching=False,
            warm_up=False,
        )
        self.scheduler, self.executor = self.engine.core.scheduler, self.engine.executor
        self.names: list[str] = []

    def add(self, name: str, prompt: str, **params):
        request = Request(name, tuple(prompt.encode()), SamplingParams(**GREEDY | params), 0.0, 0)
        self.scheduler.add(request)
        self.names.append(name)
        return request.sequences[0]

    def step(self):
        batch = self.scheduler.schedule()
        result = self.executor.execute(batch)
        self.scheduler.update(batch, result.tokens, result.logprobs)
        return [seq.request.request_id for seq in batch.sampled], result

    def fill(self, seq, value: float) -> None:
        """Put this in place of the sequence's first key and value in every layer."""
        block = self.scheduler.memory.block_table(seq.seq_id)[0]
        cache = self.executor.cache
        self.executor.cache = jax.tree.map(lambda x: x.at[block, :, 0].set(value), cache)


@pytest.fixture
def loop(tiny_model):
    loop = Loop(tiny_model)
    yield loop
    for name in loop.names:
        loop.scheduler.abort(name)


def test_a_decode_of_a_spoilt_cache_fails_and_its_neighbours_do_not(loop):
    seqs = [loop.add(name, prompt) for name, prompt in [("a", "abc"), ("b", "bcd"), ("c", "cde")]]
    loop.step()
    loop.fill(seqs[1], np.nan)
    sampled, result = loop.step()
    assert [sampled[i] for i in result.failed] == ["b"]


def test_a_prompt_whose_first_chunk_went_wrong_fails_when_it_is_complete(loop):
    short = loop.add("short", "ab")
    loop.step()
    long = loop.add("long", "a long prompt in two chunks")
    sampled, result = loop.step()
    assert sampled == ["short"]
    assert result.failed == {}
    loop.fill(long, np.nan)
    sampled, result = loop.step()
    assert sampled == ["short", "long"]
    assert result.failed == {1: "the logits of its output token 0 are not finite"}, (
        "an index into the iteration's tokens, decodes first"
    )
    assert short.num_output_tokens == 3


def test_steps_that_work_fail_nobody(loop):
    loop.add("a", "some text", max_tokens=3)
    while loop.scheduler.has_work:
        assert loop.step()[1].failed == {}
    assert not loop.executor.cache_is_lost


def test_a_cache_is_lost_only_if_the_failed_step_has_taken_it(loop, monkeypatch):
    loop.add("a", "abc")
    loop.step()

    def before(*args, **kwargs):
        raise RuntimeError("before")

    decode_step = jax_executor.decode_step

    def after(*args, **kwargs):
        decode_step(*args, **kwargs)
        raise RuntimeError("after")

    monkeypatch.setattr(jax_executor, "decode_step", before)
    with pytest.raises(RuntimeError, match="before"):
        loop.step()
    assert not loop.executor.cache_is_lost
    monkeypatch.setattr(jax_executor, "decode_step", after)
    with pytest.raises(RuntimeError, match="after"):
        loop.step()
    assert loop.executor.cache_is_lost


class Uncomputed:
    """An array whose computation has failed on the device, after its dispatch.

    Steps that fail on a CPU do so within the call, so that none of them leaves such an array.
    """

    def is_deleted(self) -> bool:
        return False

    def block_until_ready(self) -> None:
        raise JaxRuntimeError("INTERNAL: the device failed")


def test_a_cache_that_a_step_could_not_compute_is_lost(loop):
    cache = loop.executor.cache
    loop.executor.cache = PagedKVCache(cache.k, (*cache.v[:-1], Uncomputed()))
    assert loop.executor.cache_is_lost
    loop.executor.cache = cache
    assert not loop.executor.cache_is_lost


def test_a_new_cache_takes_the_place_of_one_that_is_lost(loop):
    wanted_seq = loop.add("a", "abc")
    while loop.scheduler.has_work:
        loop.step()
    executor = loop.executor
    like = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), executor.cache)
    jax.tree.map(lambda x: x.delete(), executor.cache)
    assert executor.cache_is_lost
    executor.reset_cache()
    assert not executor.cache_is_lost
    assert isinstance(executor.cache, PagedKVCache)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), executor.cache) == like
    seq = loop.add("b", "abc")
    with count_compilations() as count:
        while loop.scheduler.has_work:
            loop.step()
    assert seq.output_token_ids == wanted_seq.output_token_ids
    assert count.programs == 0
