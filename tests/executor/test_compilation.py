"""Compilations: counted, and none after warm-up."""

import threading

import jax
import jax.numpy as jnp
import pytest

from paged_jax import Engine, SamplingParams
from paged_jax.executor.compilation import count_compilations, use_persistent_cache
from tests.engine.mixed_requests import mixed_requests

PROMPT = "A function definition is an "


def test_compilations_are_counted_once_each():
    @jax.jit
    def f(x):
        return x * 3 + jnp.sum(x)

    with count_compilations() as count:
        f(1.0)
        assert count.programs == 1
        f(2.0)
        assert count.programs == 1
        jax.block_until_ready(f(jax.numpy.float32(3.0)))
    before = count.programs
    f(jnp.ones(3))
    assert count.programs == before, "counting has ended"


def test_counts_side_by_side_and_of_other_threads():
    with count_compilations() as outer:
        with count_compilations() as inner:
            thread = threading.Thread(target=lambda: jax.jit(lambda x: x + 41)(1))
            thread.start()
            thread.join()
        jax.jit(lambda x: x - 41)(1)
    assert (inner.programs, outer.programs) == (1, 2)


def test_a_cache_folder_that_was_chosen_is_kept():
    chosen = jax.config.jax_compilation_cache_dir
    use_persistent_cache()
    assert jax.config.jax_compilation_cache_dir == chosen


@pytest.fixture(scope="module")
def warm_engine(tiny_model):
    """Warm, with limits that no other test uses, so that nothing is compiled already."""
    engine = Engine(
        tiny_model,
        block_size=16,
        num_blocks=24,
        max_num_seqs=3,
        max_num_batched_tokens=24,
        max_model_len=384,
        max_prefill_seqs=3,
    )
    engine.warm_up(progress=False)
    return engine


def test_nothing_compiles_after_warm_up(warm_engine):
    """Any mix of lengths, sampling and log-probabilities, preempted, streamed and aborted."""
    requests = mixed_requests()
    prompts, params = map(list, zip(*requests, strict=True))
    with count_compilations() as count:
        warm_engine.generate(prompts, params, progress=False)
        for prompt, prompt_params in requests[::4]:  # alone
            warm_engine.generate([prompt], [prompt_params], progress=False)
        warm_engine.chat([{"role": "user", "content": "What?"}], progress=False)
        list(warm_engine.stream(PROMPT, SamplingParams(n=2, logprobs=5, min_tokens=3)))
        for i in range(5):
            warm_engine.add_request(f"r{i}", PROMPT * (i + 1), SamplingParams(min_p=0.1))
        for i in range(5):
            warm_engine.step()
            warm_engine.abort(f"r{i}")
        with pytest.raises(ValueError, match="empty"):
            warm_engine.generate(["x", ""], progress=False)
    assert count.programs == 0
    assert warm_engine.core.scheduler.counters.num_preemptions > 0


def test_sharing_compiles_nothing_after_warm_up(warm_engine):
    """Hits, forks, copies, beams, pinned prefixes, and the log-probabilities of a prompt."""
    before = warm_engine.sharing_stats
    groups = [
        SamplingParams(n=3, seed=1),
        SamplingParams(n=2, best_of=5, seed=2, repetition_penalty=1.1),
        SamplingParams(beam_width=3, n=2),
        SamplingParams(prompt_logprobs=4, n=2, logprobs=2),
        SamplingParams(temperature=0, prompt_logprobs=0),
    ]
    with count_compilations() as count:
        warm_engine.pin_prefix(PROMPT)
        for params in groups:
            warm_engine.generate([PROMPT, PROMPT * 2], params, progress=False)
        warm_engine.generate([PROMPT * 4] * len(groups), groups, progress=False)
        warm_engine.unpin_prefix(PROMPT)
    assert count.programs == 0
    stats = warm_engine.sharing_stats
    for name in ("hit_tokens", "forks", "copies", "evictions"):
        assert getattr(stats, name) > getattr(before, name), name


def test_every_batch_size_and_prompt_length_is_warm(warm_engine):
    with count_compilations() as count:
        for length in range(1, 30):
            params = SamplingParams(temperature=0, max_tokens=1)
            warm_engine.generate([[65] * length] * 2, params, progress=False)
        for num_seqs in range(1, 6):
            params = SamplingParams(n=num_seqs, max_tokens=3)
            warm_engine.generate(PROMPT, params, progress=False)
    assert count.programs == 0
