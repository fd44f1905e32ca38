"""Paged attention in Pallas Mosaic GPU: one kernel body, several ways to copy and multiply.

The modules import one another by relative names: a copy of the folder is a kernel of its own.
"""

from .api import attend, cache_head_size, default_tuning, refusal

__all__ = ["attend", "cache_head_size", "default_tuning", "refusal"]
