"""Writing new keys and values into their blocks (paper section 5.1): one entry, several ways."""

from pallas_kernels.kv_write.api import IMPLEMENTATIONS, write_kv

__all__ = ["IMPLEMENTATIONS", "write_kv"]
