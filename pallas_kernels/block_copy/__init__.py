"""Moving whole blocks of all layers at once (paper section 5.1): copy-on-write and swapping."""

from pallas_kernels.block_copy.api import IMPLEMENTATIONS, copy_blocks, read_blocks, write_blocks

__all__ = ["IMPLEMENTATIONS", "copy_blocks", "read_blocks", "write_blocks"]
