"""A mark for tests that compile for a GPU: they are skipped without what that needs."""

import pytest

from pallas_kernels.lab import aot

needs_compiler = pytest.mark.skipif(not aot.is_available(), reason=aot.missing() or "")
