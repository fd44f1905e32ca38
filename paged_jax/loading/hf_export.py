"""The model's parameters as the tensors of a Hugging Face directory: the inverse of loading."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from paged_jax.loading.arrays import FloatArray, weight_dtype
from paged_jax.loading.naming import HUGGING_FACE, file_parts
from paged_jax.models.config import ModelConfig


def write_hf_weights(
    directory: Path, config: ModelConfig, weights: Mapping[str, FloatArray], dtype: str
) -> None:
    """Write canonical parameters to `directory/model.safetensors`: apart, [out, in], in `dtype`."""
    target = weight_dtype(dtype)
    tensors = {
        name: np.ascontiguousarray(tensor, target)
        for name, tensor in to_hf_tensors(config, weights).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def to_hf_tensors(config: ModelConfig, weights: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Hugging Face name -> tensor, for all parameters of `expected_shapes(config)`."""
    tensors: dict[str, FloatArray] = {}
    for canonical, parts in file_parts(config, HUGGING_FACE).items():
        parameter = weights[canonical]
        rows = parameter.T if canonical.endswith(".kernel") else parameter
        start = 0
        for part in parts:
            end = start + part.shape[0]
            tensors[part.name] = rows[start:end]
            start = end
    return tensors
