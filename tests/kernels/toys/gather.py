"""A small kernel that copies through shared memory, with faults to choose from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, LANES = 8, 128


def gather_rows(
    table: Array,  # f32[rows, ROWS, LANES]
    entries: Array,  # i32[N]
    *,
    wait: bool = True,
    arrivals: int = 1,
) -> Array:
    """Entries of a table, copied one by one through one slot of shared memory, in the interpreter.

    Without `wait`, the slot is read before its copy is known to have ended. With more `arrivals`
    than copies, the kernel waits forever.
    """

    def body(table_ref: Any, entries_ref: Any, out_ref: Any, slot: Any, barrier: Any) -> None:
        for n in range(len(entries)):
            plgpu.copy_gmem_to_smem(table_ref.at[entries_ref[n]], slot, barrier)
            if wait:
                plgpu.barrier_wait(barrier)
            out_ref[n] = slot[...]
            plgpu.commit_smem()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(entries), ROWS, LANES), jnp.float32),
        scratch_types=[
            plgpu.SMEM((ROWS, LANES), jnp.float32),
            plgpu.Barrier(num_arrivals=arrivals),
        ],
        grid=(1,),
        grid_names=("x",),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )(table, entries)


def gathered(entries: list[int], **faults: Any) -> np.ndarray:
    """`gather_rows` of a table of three entries, each full of its own number."""
    table = np.broadcast_to(np.arange(3, dtype=np.float32)[:, None, None], (3, ROWS, LANES))
    call = jax.jit(lambda *args: gather_rows(*args, **faults))
    return np.asarray(call(table, np.array(entries, np.int32)))
