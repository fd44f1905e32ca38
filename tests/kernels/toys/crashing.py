"""Attention that takes its process down."""

import os
from typing import Any

from jax import Array

from pallas_kernels.paged_attention import AttentionResult


def attend(*_: Array, **__: Any) -> AttentionResult:
    os.write(2, b"a failed assertion\n")
    os.abort()
