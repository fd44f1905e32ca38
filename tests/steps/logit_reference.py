"""What changes logits, in plain float64, for one row; and logits processors to test with."""

import jax.numpy as jnp
import numpy as np

from paged_jax import SamplingParams


def not_again(logits, token_ids, num_tokens, num_prompt_tokens):
    """Leaves out the newest token."""
    return logits.at[token_ids[num_tokens - 1]].set(-jnp.inf)


def by_turns(logits, token_ids, num_tokens, num_prompt_tokens):
    """Even tokens are likelier as the first output token, odd ones as the second, and so on."""
    number = num_tokens - num_prompt_tokens
    return jnp.where(jnp.arange(len(logits)) % 2 == number % 2, logits + 2, logits)


def unlike_the_past(logits, token_ids, num_tokens, num_prompt_tokens):
    """Each time that a token has come takes away a little; V, beyond the tokens, falls out."""
    return logits.at[token_ids].add(-0.25)


PROCESSORS = {"not_again": not_again, "by_turns": by_turns, "unlike_the_past": unlike_the_past}


def changed_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    *,
    end_token_ids: set[int] = frozenset(),  # type: ignore[assignment]
    allowed: set[int] | None = None,
) -> np.ndarray:
    """`f64[V]`: masks, then biases and min_tokens, then processors, then penalties."""
    x = np.asarray(logits, np.float64).copy()
    V = len(x)
    if allowed is not None:
        x[[token for token in range(V) if token not in allowed]] = -np.inf
    for token, bias in params.logit_biases:
        x[token] += bias
    if len(output) < params.min_tokens:
        x[list(end_token_ids)] = -np.inf
    tokens = prompt + output
    for name in PROCESSORS:
        if name in params.processor_names:
            if name == "not_again":
                x[tokens[-1]] = -np.inf
            elif name == "by_turns":
                x[np.arange(V) % 2 == len(output) % 2] += 2
            else:
                x -= 0.25 * np.bincount(tokens, minlength=V)
    for token in set(tokens):
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x
