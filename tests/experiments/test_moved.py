"""The names that scripts had before say in one line where they went."""

import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize("old", MOVED)
def test_an_old_command_says_where_it_went(old):
    result = subprocess.run(
        [sys.executable, "-m", f"experiments.{old}", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: experiments.{old} is now experiments.{MOVED[old]}\n"
    assert find_spec(f"experiments.{MOVED[old]}").has_location


def test_an_import_of_an_old_name_fails_with_the_same_line():
    with pytest.raises(
        ModuleNotFoundError, match=r"experiments\.reporting is now experiments\.lib"
    ):
        importlib.import_module("experiments.reporting")


def test_other_names_are_unknown_as_ever():
    assert find_spec("experiments.no_such_script") is None
