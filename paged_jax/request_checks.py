"""Refusal of sampling parameters that do not go with the model, or with a step's static shapes."""

from paged_jax.decode import NUM_LOGPROBS
from paged_jax.executor.sampling_rows import check_end_tokens
from paged_jax.models.config import ModelConfig
from paged_jax.scheduling.sampling_params import SamplingParams


def check_request(params: SamplingParams, config: ModelConfig, *, stream: bool) -> None:
    """ValueError, with the value, for what no step can do."""
    if outside := [t for t in params.stop_token_ids if t >= config.vocab_size]:
        raise ValueError(
            f"stop token {outside[0]} is outside the vocabulary of {config.vocab_size}"
        )
    if stream and (params.beam_width or params.num_sequences > params.n):
        raise ValueError(
            "beam_width and best_of do not stream: which sequences are best is known at the end"
        )
    eos = () if params.ignore_eos else config.eos_token_ids
    num_end_tokens = len({*params.stop_token_ids, *eos})
    if params.min_tokens:
        check_end_tokens(num_end_tokens)
    if params.beam_width and params.beam_width + num_end_tokens > NUM_LOGPROBS:
        raise ValueError(
            f"beam_width {params.beam_width} and {num_end_tokens} end tokens (EOS and "
            f"stop_token_ids together) are more than the {NUM_LOGPROBS} candidates of a step"
        )
