"""Array types of the loaders, and the dtypes weights may be asked for."""

from typing import Any

import ml_dtypes
import numpy as np

FloatArray = np.ndarray[Any, np.dtype[np.floating[Any]]]

_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def weight_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype for a name. Raises ValueError for one that weights cannot have."""
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]
