"""Scripts that each answer one question: `python -m experiments.<name> --help`; see README.md."""

import sys
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from typing import Any

# Scripts that have moved. Until version 0.2 their old names say where they are.
MOVED = {
    "autotune": "kernels.autotune",
    "batched_requests": "paper.fig13_batched_requests",
    "block_size": "paper.fig18_block_size",
    "calibrate": "simulator.calibrate",
    "capacity": "paper.fig01_capacity",
    "chatbot": "paper.fig17_chatbot",
    "decode_step": "costs.decode_step",
    "gpu_check": "kernels.gpu_check",
    "host_overhead": "costs.host_overhead",
    "kernel_check": "kernels.check",
    "kernel_latency": "kernels.latency",
    "length_shapes": "costs.length_shapes",
    "memory_sharing": "paper.fig15_memory_sharing",
    "memory_waste": "paper.fig02_memory_waste",
    "observer_cost": "costs.observer_cost",
    "parallel_and_beam": "paper.fig14_parallel_and_beam",
    "pipelining": "costs.pipelining",
    "preemption": "paper.fig19_preemption",
    "prefix_hit_rate": "costs.prefix_hit_rate",
    "reporting": "lib.reporting",
    "reproduce": "paper.reproduce",
    "shared_prefix": "paper.fig16_shared_prefix",
    "tail_latency": "costs.tail_latency",
    "throughput": "paper.fig12_throughput",
    "validate_simulator": "simulator.validate",
}


class _Moved(MetaPathFinder, InspectLoader):
    """Finds the old names: run with `python -m` they print one line and exit with code 2."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __name__ or name not in MOVED or PathFinder.find_spec(fullname, path):
            return None
        return spec_from_loader(fullname, self)

    def get_source(self, fullname: str) -> str:
        line = f"{fullname} is now {__name__}.{MOVED[fullname.rpartition('.')[2]]}"
        return (
            "import sys\n"
            f"if __name__ != '__main__': raise ModuleNotFoundError({line!r})\n"
            f"print('error:', {line!r}, file=sys.stderr)\n"
            "sys.exit(2)\n"
        )


sys.meta_path.insert(0, _Moved())
