"""Log-probabilities as the host sees them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one token, sampled or given, of the raw logits."""

    sampled: float  # of the token itself
    top: tuple[tuple[int, float], ...]  # (token, log-probability), most likely first
