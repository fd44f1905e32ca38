"""Rotary frequencies with their scaling variants, in numpy.

The maths is that of transformers' `modeling_rope_utils` (float32, in the same order of
operations), so that logits agree with Hugging Face at long positions too.
"""

import math

import numpy as np

from paged_jax.models.config import ModelConfig, RopeScaling

Frequencies = np.ndarray[tuple[int], np.dtype[np.float32]]


def inv_freq(config: ModelConfig) -> tuple[Frequencies, float]:
    """(frequencies float32 [head_dim / 2] in radians per token, factor on cos and sin)."""
    dim = config.head_dim
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    wavelengths = np.power(np.float32(config.rope_theta), exponents)  # in tokens, over 2 pi
    plain = np.float32(1.0) / wavelengths
    scaling = config.rope_scaling
    match scaling:
        case None | RopeScaling(kind="dynamic"):
            return plain, 1.0
        case RopeScaling(kind="linear"):
            return plain / np.float32(scaling.factor), 1.0
        case RopeScaling(kind="factors"):
            return plain / np.asarray(scaling.factors, np.float32), 1.0
        case RopeScaling(kind="llama3"):
            return _llama3(plain, scaling), 1.0
        case RopeScaling(kind="longrope"):
            return _longrope(wavelengths, scaling, config), _longrope_attention_factor(scaling)
        case _:
            return _yarn(wavelengths, scaling, config), _yarn_attention_factor(scaling)


def _llama3(plain: Frequencies, scaling: RopeScaling) -> Frequencies:
    """Long waves are stretched, short ones kept, those between are interpolated."""
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # RopeScaling has checked these for its kind.
    assert original is not None
    assert low is not None
    assert high is not None
    factor = np.float32(scaling.factor)
    wavelengths = np.float32(2 * math.pi) / plain
    is_long = wavelengths > original / low
    is_short = wavelengths < original / high
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    return np.where(is_long, plain / factor, np.where(is_short, plain, between))


def _yarn(wavelengths: Frequencies, scaling: RopeScaling, config: ModelConfig) -> Frequencies:
    """Interpolates slow dimensions and extrapolates fast ones, with a linear ramp between."""
    original = scaling.original_max_position_embeddings
    assert original is not None  # RopeScaling has checked it for its kind
    dim, base = config.head_dim, config.rope_theta

    def dimension_of(rotations: float) -> float:
        """The (fractional) dimension that turns this often within the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as in transformers: no division by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept: Frequencies = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    interpolation = np.float32(1) / (np.float32(scaling.factor) * wavelengths)
    extrapolation = np.float32(1) / wavelengths
    blended: Frequencies = interpolation * (np.float32(1) - kept) + extrapolation * kept
    return blended


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)

    def magnitude(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def _longrope(wavelengths: Frequencies, scaling: RopeScaling, config: ModelConfig) -> Frequencies:
    original = scaling.original_max_position_embeddings
    assert original is not None  # RopeScaling has checked it for its kind
    is_long = config.max_position_embeddings > original
    factors = np.asarray(scaling.long_factors if is_long else scaling.factors, np.float32)
    frequencies: Frequencies = np.float32(1.0) / (factors * wavelengths)
    return frequencies


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    """The same for short sequences and long ones, as in transformers."""
    original = scaling.original_max_position_embeddings
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)
    if scaling.factor <= 1 or original is None:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(original))
