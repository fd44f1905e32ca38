"""Figure 19 as a user runs it, on the tiny model; and its models, by hand."""

import csv

import pytest

from experiments.paper import fig19_micro as modelled
from tests.experiments.experiment_runs import SMALL_ENGINE, results_of, run_experiment

SMALL = [
    *SMALL_ENGINE,
    "--quick",
    "--num_tokens=32",
    "--block_sizes=16,1",
    "--rounds=2",
    "--num_requests=6",
    "--max_tokens=24",
    "--max_num_seqs=2",
    "--max_model_len=64",
    "--served_block_sizes=4",
    "--served_rounds=1",
]


@pytest.mark.slow  # a whole experiment
def test_both_ways_are_measured_and_change_no_output(tmp_path):
    results, stdout = results_of("paper.fig19_preemption", tmp_path, *SMALL)

    small, large = results["cases"]
    assert (small["block_size"], small["blocks"]) == (1, 32)
    assert (large["block_size"], large["blocks"]) == (16, 2)
    assert small["swap_ms"] == pytest.approx(small["out_ms"] + small["in_ms"])
    assert small["each_ms"] > large["each_ms"], "32 steps each way, or 2"
    assert all(case["recompute_ms"] > 0 for case in results["cases"])

    none, recompute, swap, auto = results["end_to_end"]
    assert [run["mode"] for run in results["end_to_end"]] == ["none", "recompute", "swap", "auto"]
    assert none["preemptions"] == 0
    assert all(run["preemptions"] > 0 for run in (recompute, swap, auto))
    assert recompute["recomputed_tokens"] > 0 == recompute["swapped_blocks"]
    assert swap["by_swap"] == swap["preemptions"]
    assert swap["swapped_blocks"] > 0 < swap["swap_percent"]
    assert all(run["same_percent"] == 100 for run in results["end_to_end"])
    with (tmp_path / "end_to_end.csv").open() as file:
        assert [row["mode"] for row in csv.DictReader(file)] == [
            "none",
            "recompute",
            "swap",
            "auto",
        ]

    claims = results["claims"]
    assert claims[0]["measured"] == pytest.approx(small["each_ms"] / large["each_ms"])
    assert claims[-1]["measured"] == pytest.approx(recompute["latency_ms"] / swap["latency_ms"])
    assert claims[-1]["a100"] is None, "nothing is modelled end to end"
    assert "Modelled: OPT-13B on an A100" in stdout


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--runs=dreamt", "error: --runs takes micro, end_to_end; got 'dreamt'"),
        ("--block_sizes=0", "error: --block_sizes takes integers of at least 1, got '0'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, argument, message):
    result = run_experiment("paper.fig19_preemption", tmp_path, argument)
    assert (result.returncode, result.stderr) == (2, f"{message}\n")


def test_a_sequence_moves_in_80_copies_a_block():
    assert modelled.num_copies(512, 16) == 32 * 80
    assert modelled.num_copies(513, 16) == 33 * 80


def test_small_blocks_pay_for_copies_and_large_ones_for_bytes():
    bytes_s = 2 * 512 * 800 * 1024 / (modelled.COST.gpu.host_bandwidth * 0.78)
    for block_size in (1, 16, 256):
        copies_s = 2 * modelled.num_copies(512, block_size) * modelled.COST.swap_copy_s
        assert modelled.swap_s(512, block_size) == pytest.approx(bytes_s + copies_s)
    assert modelled.swap_s(512, 1) > 10 * bytes_s
    assert modelled.swap_s(512, 256) < 1.1 * bytes_s


def test_gathered_blocks_cost_their_bytes_whatever_their_size():
    times = [modelled.gathered_swap_s(512, 2**i) for i in range(9)]
    assert max(times) < 1.1 * min(times) < 1.1 * modelled.swap_s(512, 16)


def test_recomputing_reads_the_weights_at_least_and_then_grows_with_the_tokens():
    read_s = 25e9 / (modelled.COST.gpu.memory_bandwidth * 0.9)
    assert read_s < modelled.recompute_s(1, 16) < 1.3 * read_s
    assert 1.8 < modelled.recompute_s(1024, 16) / modelled.recompute_s(512, 16) < 2.2
