"""Comparing with Hugging Face: recorded goldens, dense logits, greedy continuations."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import Engine, RequestOutput, SamplingParams
from paged_jax.loading import LoadedModel, build_byte_tokenizer
from paged_jax.loading.hf_directory import HfTensors, read_hf_config
from paged_jax.loading.weights import assemble
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import Params, bind, nest

GOLDENS = Path(__file__).parents[1] / "goldens"
RANDOM_MODELS = sorted(path.parent for path in GOLDENS.glob("random_models/*/config.json"))

# Float32 sums in another order. The largest errors seen: 1.1e-4 (SmolLM2), 1.8e-5 (the others).
LOGIT_TOLERANCE = 2e-3
SMALL_MODEL_TOLERANCE = 1e-4
# Hugging Face's own choice between two tokens is an accident within this.
TIE = 1e-3


# Accelerators multiply float32 matrices in less than float32, unless told otherwise.
full_precision = partial(jax.default_matmul_precision, "highest")


def read_goldens(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def recorded_prompts(goldens: dict[str, np.ndarray]) -> list[list[int]]:
    ends = np.cumsum(goldens["prompt_lengths"])[:-1]
    return [ids.tolist() for ids in np.split(goldens["prompt_ids"], ends)]


def load_random_model(folder: Path) -> LoadedModel:
    """The model in float32. The directory has no tokenizer: its tokens are the first bytes."""
    config = read_hf_config(folder)
    weights = assemble(HfTensors(folder, config), config, "float32")
    return LoadedModel(config, weights, build_byte_tokenizer())


def device_params(model: LoadedModel) -> Params:
    return nest({name: jnp.asarray(x) for name, x in model.weights.items()})


@partial(jax.jit, static_argnums=0)
def dense_hidden(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """f32[B, T, E] of i32[B, T], by attention over the whole sequence without a cache."""
    window = None if config.sliding_window is None else (config.sliding_window - 1, 0)

    def attend(state, scale, q, k, v):
        out = jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, local_window_size=window
        )
        return out, state

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    none = [None] * config.num_layers
    with full_precision():
        hidden, _ = bind(config, params)(tokens, positions, attend, none, config.head_dim**-0.5)
    return hidden


@partial(jax.jit, static_argnums=0)
def dense_logits(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """f32[B, T, V] of i32[B, T]."""
    hidden = dense_hidden(config, params, tokens)
    with full_precision():
        return bind(config, params).logits(hidden)


@partial(jax.jit, static_argnums=0)
def _logits_at(config: ModelConfig, params: Params, tokens: jax.Array, at: jax.Array) -> jax.Array:
    hidden = dense_hidden(config, params, tokens)
    with full_precision():
        return bind(config, params).logits(hidden[jnp.arange(len(at)), at])


def last_logits(config: ModelConfig, params: Params, prompts: list[list[int]]) -> np.ndarray:
    """f32[len(prompts), V] of the prompts' last tokens. The short ones share one batch."""
    logits = np.empty((len(prompts), config.vocab_size), np.float32)
    limit = 96
    short = [i for i, prompt in enumerate(prompts) if len(prompt) <= limit]
    long = [i for i, prompt in enumerate(prompts) if len(prompt) > limit]
    for rows in filter(None, (short, long)):
        lengths = np.array([len(prompts[i]) for i in rows])
        tokens = np.zeros((len(rows), lengths.max()), np.int32)
        for row, i in enumerate(rows):
            tokens[row, : lengths[row]] = prompts[i]
        logits[rows] = _logits_at(config, params, tokens, lengths - 1)
    return logits


def assert_last_logits_agree(logits: np.ndarray, goldens: dict[str, np.ndarray]) -> None:
    """Everywhere that was recorded; the rest is held by the sum of all exponentials."""
    recorded_ids, recorded = goldens["logit_ids"], goldens["logits"]
    ours = np.take_along_axis(logits, recorded_ids, axis=1)
    np.testing.assert_allclose(ours, recorded, rtol=0, atol=LOGIT_TOLERANCE)
    logsumexp = jax.nn.logsumexp(logits, axis=1)
    np.testing.assert_allclose(logsumexp, goldens["logsumexp"], rtol=0, atol=LOGIT_TOLERANCE)
    clear = recorded[:, 0] - recorded[:, 1] > TIE
    np.testing.assert_array_equal(logits.argmax(axis=1)[clear], recorded_ids[clear, 0])


def greedy(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
    with full_precision():
        return engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, progress=False
        )


def assert_same_continuation(
    output: RequestOutput, tokens: np.ndarray, top_two_logits: np.ndarray
) -> None:
    """Token by token, and the margin between the first two; a first difference is excused where
    Hugging Face's own margin is a tie, and ends the comparison."""
    [completion] = output.outputs
    assert len(completion.token_ids) == len(tokens)
    for step, token in enumerate(tokens):
        margin = top_two_logits[step, 0] - top_two_logits[step, 1]
        if completion.token_ids[step] != token:
            assert margin <= TIE, (
                f"step {step}: {completion.token_ids[step]} instead of {token}, which leads by "
                f"{margin:.4f}; prompt {output.prompt_token_ids}"
            )
            return
        first, second = (logprob for _, logprob in completion.logprobs[step].top)
        assert first - second == pytest.approx(margin, abs=LOGIT_TOLERANCE)
