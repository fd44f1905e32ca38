"""The config of a Llama-family decoder: sizes, rotary embedding, special tokens.

`ModelConfig.from_hf` reads a Hugging Face `config.json` (already parsed), written by transformers
4 or 5. `paged_jax.models.params.expected_shapes` lists the weights of a config.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

RopeKind = Literal["linear", "dynamic", "llama3", "yarn", "longrope", "factors"]

# Hugging Face's class names -> model types.
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
}
# (bos, eos) where config.json is silent.
_DEFAULT_SPECIAL_IDS = {"llama": (1, 2), "mistral": (1, 2), "qwen2": (None, None)}
# The rest of config.json may be left out; Hugging Face's defaults stand in.
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_NEED_ORIGINAL = ("llama3", "yarn", "longrope")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched; the maths is in `paged_jax.models.rope`.

    kind "linear", "llama3" and "yarn" are Hugging Face's. "dynamic" (NTK) leaves every position
    below `max_position_embeddings` as it is and only that range is served: beyond it Hugging
    Face's frequencies change with the sequence's length, so cached keys would be wrong.
    "factors" divides frequency i by `factors[i]`: GGUF's `rope_freqs` tensor. "longrope" divides
    by `long_factors` where sequences may be longer than the original length, otherwise by
    `factors`. Hugging Face chooses by the length that each sequence has by now, which would leave
    cached keys wrong as well; the choice here is made once (`ModelConfig.served_up_to`).

    Raises ValueError for a value its kind cannot use.
    """

    kind: RopeKind
    factor: float = 1.0
    original_max_position_embeddings: int | None = None  # tokens; needed by llama3, yarn, longrope
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    attention_factor: float | None = None  # yarn, longrope; None: derived from the factor
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    factors: tuple[float, ...] = ()  # [head_dim / 2]; factors, longrope
    long_factors: tuple[float, ...] = ()  # [head_dim / 2]; longrope

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise ValueError(
                f"RoPE scaling {self.kind!r} is not supported; supported: "
                f"{', '.join(get_args(RopeKind))}"
            )
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"RoPE scaling factor must be a positive number, got {self.factor}")
        original = self.original_max_position_embeddings
        if self.kind in _NEED_ORIGINAL and (original is None or original < 1):
            raise ValueError(
                f"RoPE scaling {self.kind!r} needs original_max_position_embeddings >= 1, "
                f"got {original}"
            )
        if self.kind == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            if low is None or high is None or not 0 < low < high:
                raise ValueError(
                    "RoPE scaling 'llama3' needs 0 < low_freq_factor < high_freq_factor, "
                    f"got low_freq_factor={low}, high_freq_factor={high}"
                )
        for factors in self.frequency_factors:
            if not (factors and all(f > 0 for f in factors)):
                raise ValueError(
                    f"RoPE scaling {self.kind!r} needs positive frequency factors, got {factors}"
                )

    @property
    def frequency_factors(self) -> tuple[tuple[float, ...], ...]:
        """The tuples of factors that this kind has."""
        kinds = {"factors": (self.factors,), "longrope": (self.factors, self.long_factors)}
        return kinds.get(self.kind, ())

    def usable_length(self, max_position_embeddings: int) -> int:
        """The tokens that a model can be served for, whose file states `max_position_embeddings`.

        A file states the original length or the stretched one. It is never stretched twice: what
        `original_max_position_embeddings` names is the length before the scaling.
        """
        if self.kind not in ("linear", "yarn", "longrope"):
            return max_position_embeddings
        original = self.original_max_position_embeddings or max_position_embeddings
        return max(max_position_embeddings, int(original * self.factor))


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a Llama-family decoder. Hashable, so it may be a static jit argument.

    Raises ValueError, with the value, for sizes that no model can have.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens that can be served, where RoPE is scaled with its scaling
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of the query, key and value projections
    attention_out_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None  # a token sees itself and sliding_window - 1 before it
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        for field in _SIZES:
            _check_size(field, getattr(self, field))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model config: num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model config: RoPE needs an even head_dim, got {self.head_dim}")
        for field in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, field)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"model config: {field} must be a positive number, got {value!r}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"model config: sliding_window must be None or >= 1, got {self.sliding_window}"
            )
        for factors in self.rope_scaling.frequency_factors if self.rope_scaling else ():
            if len(factors) != self.head_dim // 2:
                raise ValueError(
                    f"model config: head_dim={self.head_dim} needs {self.head_dim // 2} RoPE "
                    f"frequency factors, got {len(factors)}"
                )
        for token_id in (self.bos_token_id, *self.eos_token_ids):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"model config: special token id {token_id} is outside the vocabulary of "
                    f"{self.vocab_size}"
                )

    def served_up_to(self, num_tokens: int) -> "ModelConfig":
        """The config for an engine whose sequences have at most `num_tokens` tokens.

        It is another one only where the rotary frequencies depend on that: for LongRoPE.
        """
        if self.rope_scaling is None or self.rope_scaling.kind != "longrope":
            return self
        return dataclasses.replace(self, max_position_embeddings=num_tokens)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], name: str = "") -> "ModelConfig":
        """The config that a parsed `config.json` describes.

        Raises ValueError for another architecture, a missing size, or a feature that the model
        here does not compute (another activation, partial rotary, windows in some layers only).
        """
        arch = _architecture(hf)
        missing = [key for key in _REQUIRED if hf.get(key) is None]
        if missing:
            raise ValueError(f"model config: missing {', '.join(missing)}")
        for key in _REQUIRED:
            _check_size(key, hf[key])
        activation = hf.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(
                f"model config: hidden_act {activation!r} is not supported (only silu)"
            )
        num_heads = hf["num_attention_heads"]
        num_kv_heads = hf.get("num_key_value_heads", 8 if arch == "mistral" else None)
        head_dim = hf.get("head_dim")
        bias = arch == "qwen2" or bool(hf.get("attention_bias", False))
        bos_default, eos_default = _DEFAULT_SPECIAL_IDS[arch]
        scaling, length = _rope_scaling(hf), hf["max_position_embeddings"]
        return cls(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=hf["hidden_size"] // num_heads if head_dim is None else head_dim,
            max_position_embeddings=length if scaling is None else scaling.usable_length(length),
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(hf),
            rope_scaling=scaling,
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            attention_bias=bias,
            attention_out_bias=bias and arch != "qwen2",
            mlp_bias=arch == "llama" and bool(hf.get("mlp_bias", False)),
            sliding_window=_sliding_window(hf, arch),
            bos_token_id=hf.get("bos_token_id", bos_default),
            eos_token_ids=token_ids(hf.get("eos_token_id", eos_default)),
            name=name,
        )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Hugging Face's `eos_token_id`, which may be absent, one id or a list, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"model config: {name} must be an integer >= 1, got {value!r}")


def _architecture(hf: Mapping[str, Any]) -> str:
    named = list(hf.get("architectures") or []) or [hf.get("model_type")]
    for arch in named:
        if arch in _ARCHITECTURES:
            return _ARCHITECTURES[arch]
        if arch in _ARCHITECTURES.values():
            return str(arch)
    raise ValueError(
        f"model architecture {', '.join(map(str, named))} is not supported; supported: "
        f"{', '.join(_ARCHITECTURES)}"
    )


def _rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 4 writes `rope_scaling` beside `rope_theta`, 5 both in `rope_parameters`."""
    return dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})


def _rope_theta(hf: Mapping[str, Any]) -> float:
    theta = _rope_parameters(hf).get("rope_theta")
    return float(theta if theta is not None else hf.get("rope_theta") or 10000.0)


def _rope_scaling(hf: Mapping[str, Any]) -> RopeScaling | None:
    rope = _rope_parameters(hf)
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"model config: partial_rotary_factor={partial} is not supported (only 1)")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"model config: RoPE parameters that differ by layer ({', '.join(rope)}) "
            "are not supported"
        )
    if kind == "default":
        return None
    if kind == "su":  # the name in Phi-3's first configs
        kind = "longrope"
    max_positions = hf["max_position_embeddings"]
    # A top-level value wins, as in transformers' standardize_rope_params.
    original = hf.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings"
    )
    if kind in _NEED_ORIGINAL:
        original = original or max_positions
    factor = rope.get("factor")
    if factor is None and kind in ("yarn", "longrope"):
        factor = max_positions / original
    if factor is None:
        raise ValueError(f"model config: RoPE scaling {kind!r} has no factor")
    return RopeScaling(
        kind=kind,
        factor=float(factor),
        original_max_position_embeddings=original,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        low_freq_factor=rope.get("low_freq_factor"),
        high_freq_factor=rope.get("high_freq_factor"),
        attention_factor=rope.get("attention_factor"),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        truncate=rope.get("truncate", True),
        factors=tuple(rope.get("short_factor") or ()),
        long_factors=tuple(rope.get("long_factor") or ()),
    )


def _sliding_window(hf: Mapping[str, Any], arch: str) -> int | None:
    """The window that all layers share, in tokens; None: no window.

    Mistral's is on when given, Qwen2's has a switch and a first layer.
    """
    window: int | None = hf.get("sliding_window", 4096)
    if arch == "llama" or window is None or (arch == "qwen2" and not hf.get("use_sliding_window")):
        return None
    if arch == "mistral":
        return window
    num_layers = hf["num_hidden_layers"]
    first = hf.get("max_window_layers", 28)
    layer_types = hf.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
    ]
    num_sliding = layer_types.count("sliding_attention")
    if num_sliding not in (0, num_layers):
        raise ValueError(
            f"model config: a sliding window in {num_sliding} of {num_layers} layers is not "
            "supported (only in all or in none)"
        )
    return window if num_sliding else None
