"""Paged attention in Pallas Mosaic GPU with wgmma, for sm_90 alone; all else is as in `api`.

Operands stay in shared memory, which leaves registers to larger tiles. Whether that pays where
copies are the bottleneck, as in decoding, is for measurements to say.
"""

import functools

from pallas_kernels.paged_attention.spec import Call

from . import api
from .products import WgmmaProducts

attend = functools.partial(api.attend, products=WgmmaProducts)
cache_head_size = api.cache_head_size
default_tuning = api.default_tuning


def refusal(call: Call) -> str | None:
    """Why the kernel cannot do the call; None if it can. ValueError for a foreign tuning."""
    if reason := api.refused(call):
        return reason
    if call.target is not None and call.target.compute_capability != (9, 0):
        return f"wgmma is of compute capability 9.0 alone, which a {call.target.name} has not"
    return api.kernel_of(call, WgmmaProducts).misfit(call)
