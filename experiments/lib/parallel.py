"""Independent cases on all cores."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from absl import flags
from tqdm import tqdm

PROCESSES = flags.DEFINE_integer(
    "processes", None, "Processes that simulate; default: a core each.", lower_bound=1
)


def run_all[Item, Result](
    function: Callable[[Item], Result], items: Sequence[Item], *, description: str, unit: str
) -> list[Result]:
    """`function` of each item, in their order. What it does must not depend on other items.

    Function, items and results travel between processes, so they must be plain data and a function
    of a module. Items that take longest should come first.
    """
    num_processes = min(PROCESSES.value or len(os.sched_getaffinity(0)), len(items))
    with tqdm(total=len(items), desc=description, unit=unit) as bar:
        if num_processes <= 1:
            results = []
            for item in items:
                results.append(function(item))
                bar.update()
            return results
        # Not forked: a process that runs JAX's threads must not be.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
            futures = [pool.submit(function, item) for item in items]
            try:
                for future in as_completed(futures):
                    future.result()  # a fault ends the run at once
                    bar.update()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in futures]
