"""From a file's tensors to the model's parameters: checked, fused, transposed, in one dtype."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from paged_jax.loading.arrays import FloatArray, weight_dtype
from paged_jax.loading.naming import Naming, Part, file_parts
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import expected_shapes

_MAX_LISTED = 8  # names in an error; a wrong config misses every layer's


class TensorSource(Protocol):
    """Tensors by the names their file gives them."""

    @property
    def where(self) -> str:
        """The path, for errors."""

    @property
    def naming(self) -> Naming: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> FloatArray: ...


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
    found = source.shapes
    expected = {part.name: part.shape for part in parts}
    problems = [
        *_listed("missing", [f"{n} {s}" for n, s in expected.items() if n not in found]),
        *_listed("unexpected", [f"{n} {s}" for n, s in found.items() if n not in expected]),
        *_listed(
            "of a wrong shape",
            [
                f"{n}: expected {s}, found {found[n]}"
                for n, s in expected.items()
                if n in found and found[n] != s
            ],
        ),
    ]
    if problems:
        raise ValueError(
            f"{source.where}: the tensors do not fit the config: {'; '.join(problems)}"
        )


def _listed(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = f", and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return [f"{len(items)} {what} ({', '.join(items[:_MAX_LISTED])}{more})"]
