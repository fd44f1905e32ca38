"""From the tensors of a file to the model's parameters: checked, fused, transposed, in one dtype.

Files keep one [out, in] matrix per projection; the model keeps [in, out] kernels with query, key
and value fused, gate and up fused (`paged_jax.models.params`). A format has a `Naming` and a
`TensorSource`; `assemble` does the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from paged_jax.models.config import ModelConfig
from paged_jax.models.params import expected_shapes

FloatArray = np.ndarray[Any, np.dtype[np.floating[Any]]]

_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_MAX_LISTED = 8  # names in an error; a wrong config misses every layer's


def weight_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype for a name. Raises ValueError for one that weights cannot have."""
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


@dataclass(frozen=True)
class Naming:
    """The tensor names of a file format, without their `.weight` and `.bias`."""

    layer: str  # prefix of layer {i}
    modules: Mapping[str, tuple[str, ...]]  # canonical module -> the file's, in fused order


class TensorSource(Protocol):
    """Tensors by the names that their file gives them."""

    where: str  # the path, for errors
    naming: Naming
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> FloatArray: ...


class Part(NamedTuple):
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]  # as the file keeps it: [out, in] for a matrix


def file_parts(config: ModelConfig, naming: Naming) -> dict[str, list[Part]]:
    """Canonical parameter -> the tensors of the file that it is made of, in fused order."""
    return {
        name: _parts(name, shape, config, naming) for name, shape in expected_shapes(config).items()
    }


def _parts(
    canonical: str, shape: tuple[int, ...], config: ModelConfig, naming: Naming
) -> list[Part]:
    module, kind = canonical.rsplit(".", 1)
    prefix = ""
    if module.startswith("layers."):
        _, index, module = module.split(".", 2)
        prefix = naming.layer.format(i=index)
    suffix = ".bias" if kind == "bias" else ".weight"
    qkv_heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    widths = {
        "attention.qkv": [num_heads * config.head_dim for num_heads in qkv_heads],
        "mlp.gate_up": [config.intermediate_size] * 2,
    }.get(module, [shape[-1]])
    names = [prefix + name + suffix for name in naming.modules[module]]
    if kind == "kernel":
        shapes: list[tuple[int, ...]] = [(width, shape[0]) for width in widths]
    elif kind == "embedding":
        shapes = [shape]
    else:
        shapes = [(width,) for width in widths]
    return [Part(name, part_shape) for name, part_shape in zip(names, shapes, strict=True)]


def assemble(source: TensorSource, config: ModelConfig, dtype: str) -> dict[str, FloatArray]:
    """All parameters of `expected_shapes(config)`, contiguous, in `dtype`.

    Raises one ValueError naming every tensor that is missing, unexpected or of a wrong shape.
    """
    target = weight_dtype(dtype)
    parts = file_parts(config, source.naming)
    _check(source, [part for group in parts.values() for part in group])

    return {
        name: _build(source, parts[name], shape, target, transpose=name.endswith(".kernel"))
        for name, shape in expected_shapes(config).items()
    }


def _build(
    source: TensorSource,
    parts: list[Part],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    transpose: bool,
) -> FloatArray:
    """One parameter, its parts side by side along the last axis."""
    parameter: FloatArray = np.empty(shape, dtype)
    start = 0
    for part in parts:
        tensor = source.read(part.name)
        end = start + part.shape[0] if len(parts) > 1 else shape[-1]
        parameter[..., start:end] = tensor.T if transpose else tensor
        start = end
    return parameter


def _check(source: TensorSource, parts: list[Part]) -> None:
    found, expected = source.shapes, dict(parts)
    problems = {
        "missing": [f"{n} {s}" for n, s in expected.items() if n not in found],
        "unexpected": [f"{n} {s}" for n, s in found.items() if n not in expected],
        "of a wrong shape": [
            f"{n}: expected {s}, found {found[n]}"
            for n, s in expected.items()
            if found.get(n, s) != s
        ],
    }
    if any(problems.values()):
        raise ValueError(
            f"{source.where}: the tensors do not fit the config: "
            + "; ".join(_listed(what, items) for what, items in problems.items() if items)
        )


def _listed(what: str, items: list[str]) -> str:
    more = f", and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return f"{len(items)} {what} ({', '.join(items[:_MAX_LISTED])}{more})"
