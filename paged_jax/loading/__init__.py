"""Models from files: configs, weights as numpy arrays, tokenizers, incremental detokenization."""

from paged_jax.loading.byte_tokenizer import build_byte_tokenizer
from paged_jax.loading.detokenizer import IncrementalDetokenizer
from paged_jax.loading.model_files import (
    LoadedModel,
    load_config,
    load_model,
    load_tokenizer,
    resolve_model,
)

__all__ = [
    "IncrementalDetokenizer",
    "LoadedModel",
    "build_byte_tokenizer",
    "load_config",
    "load_model",
    "load_tokenizer",
    "resolve_model",
]
