"""The engine with Pallas kernels, interpreted: the tokens of XLA's attention."""

import re

import pytest

from paged_jax import Engine, SamplingParams
from tests.engine.mixed_requests import BOS, TEXT

# One bucket of prefill tokens; of decode rows the prompts need one: interpreters compile slowly.
LIMITS = {
    "block_size": 16,
    "num_blocks": 12,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "max_prefill_seqs": 2,
    "warm_up": False,
}
# The first is prefilled in two chunks, the second of them next to the other prompt, and grows into
# a third block; both start to decode and end together.
PROMPTS = [[BOS, *TEXT[: n - 1].encode()] for n in (29, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)


def completions(engine: Engine) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens of each prompt, and all their log-probabilities."""
    outputs = [out.outputs[0] for out in engine.generate(PROMPTS, GREEDY, progress=False)]
    tokens = [list(out.token_ids) for out in outputs]
    return tokens, [logprobs.sampled for out in outputs for logprobs in out.logprobs]


@pytest.mark.parametrize(
    ("impl", "dtype", "kv_write", "cache_head_size"),
    [
        # A product takes 64 rows: the cache is twice as wide as the model's heads of 32.
        pytest.param(
            *("mosaic_gpu", "float16", "mosaic_gpu", 64),
            marks=pytest.mark.slow,  # the interpreter takes most of a minute
        ),
        ("triton", "float32", "xla", 32),
    ],
)
def test_the_tokens_are_those_of_xla(tiny_model, impl, dtype, kv_write, cache_head_size):
    wanted, wanted_logprobs = completions(Engine(tiny_model, dtype=dtype, **LIMITS))
    engine = Engine(
        tiny_model,
        dtype=dtype,
        attention=impl,
        prefill_attention=impl,
        kv_write=kv_write,
        interpret_kernels=True,
        **LIMITS,
    )
    assert {leaf.shape for leaf in engine.executor.cache.k} == {(13, 2, 16, cache_head_size)}
    tokens, logprobs = completions(engine)
    assert tokens == wanted
    assert logprobs == pytest.approx(wanted_logprobs, abs=1e-2 if dtype == "float16" else 1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention": "mosaic_gpu"}, "attention 'mosaic_gpu' .* needs an NVIDIA GPU"),
        ({"prefill_attention": "triton"}, "attention 'triton' .* needs an NVIDIA GPU"),
        ({"kv_write": "mosaic_gpu"}, "kv_write 'mosaic_gpu' .* needs an NVIDIA GPU"),
        ({"kv_write": "fast"}, "unknown kv_write 'fast'"),
        (
            {"attention": "mosaic_gpu", "interpret_kernels": True},
            "attention 'mosaic_gpu' .* bfloat16 and float16, not float32",
        ),
    ],
    ids=str,
)
def test_what_a_kernel_cannot_do_is_refused_when_the_engine_is_built(
    tiny_model, arguments, message
):
    with pytest.raises(ValueError, match=message) as refusal:
        Engine(tiny_model, **LIMITS | arguments)
    assert "\n" not in str(refusal.value)


def test_the_pool_counts_what_the_cache_is_padded_with(tiny_model):
    """A block takes twice the bytes when its heads are twice as wide."""

    def bytes_per_block(**arguments) -> int:
        with pytest.raises(ValueError, match="num_blocks") as refusal:
            Engine(tiny_model, dtype="float16", **LIMITS | {"num_blocks": 10**12} | arguments)
        return int(re.search(r"blocks of (\d+) bytes", str(refusal.value))[1])

    padded = bytes_per_block(attention="mosaic_gpu", interpret_kernels=True)
    assert padded == 2 * bytes_per_block() == 2 * 5 * 2 * 16 * 64 * 2
