"""The experiments on the paper's figures as a user runs them, on short traces."""

import ast
import csv
from pathlib import Path

import pytest

from tests.conftest import TINY_LM
from tests.experiments.experiment_runs import results_of, run_experiment

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "fig01_capacity", "fig12_throughput", "fig13_batched_requests", "fig14_parallel_and_beam",
    "fig18_block_size", "reproduce",
)  # fmt: skip
ONE_PROCESS = "--processes=1"


def test_capacity_prints_the_papers_slots_and_plans_for_a_model_of_ones_own(tmp_path):
    results, stdout = results_of(
        "paper.fig01_capacity", tmp_path, f"--model={TINY_LM}", "--gpu=H100", "--memory_gib=0.004",
        "--lengths=alpaca", "--simulate=false",
    )  # fmt: skip
    assert [row["slots_k"] for row in results["cases"]] == ["15.7K", "9.7K", "60.1K"]
    assert all(slots in stdout for slots in ("15.7K", "9.7K", "60.1K"))
    figures = results["figures"]
    assert figures["share of the memory for weights and KV"] == 0.9
    assert figures["KV slots (tokens)"] == 16 * figures["blocks of 16 slots"] > 0
    assert sum(results["memory_shares"].values()) == pytest.approx(100)


@pytest.mark.slow  # a whole experiment
def test_throughput_finds_rates_and_gains(tmp_path):
    results, _ = results_of(
        "paper.fig12_throughput", tmp_path, "--quick", ONE_PROCESS, "--lengths=sharegpt",
        "--systems=orca_max,paged", "--duration_s=20", "--objective_s=0.04",
    )  # fmt: skip
    orca, paged = results["cases"]
    assert paged["rate"] > orca["rate"] > 0
    assert orca["gain"] == pytest.approx(paged["rate"] / orca["rate"])
    assert orca["paper"] == "2.7 to 8"
    with (tmp_path / "curves.csv").open() as file:
        curve = list(csv.DictReader(file))
    assert {row["system"] for row in curve} == {"orca_max", "paged"}
    assert len(curve) > 6


@pytest.mark.slow  # a whole experiment
def test_batched_requests_are_put_beside_the_papers(tmp_path):
    results, _ = results_of(
        "paper.fig13_batched_requests", tmp_path, "--quick", "--processes=2", "--duration_s=10",
        "--loads=sharegpt:2,alpaca:30",
        "--systems=orca_max,orca_oracle",
    )  # fmt: skip
    assert [(case["lengths"], case["paper"]) for case in results["cases"]] == [
        ("sharegpt", 7.0), ("sharegpt", 13.62), ("alpaca", 7.0), ("alpaca", 72.75),
    ]  # fmt: skip
    alpaca_max = results["cases"][2]
    assert alpaca_max["batch_size"] == pytest.approx(7, abs=0.2)
    assert alpaca_max["unfinished_percent"] > 50


@pytest.mark.slow  # a whole experiment
def test_beams_and_samples_are_served_by_paging_and_by_reservations(tmp_path):
    results, _ = results_of(
        "paper.fig14_parallel_and_beam", tmp_path, ONE_PROCESS, "--widths=2", "--duration_s=2",
        "--objective_s=0.04", "--systems=orca_oracle,paged",
    )  # fmt: skip
    cases = {(case["method"], case["system"]): case for case in results["cases"]}
    assert len(cases) == 6
    assert all(case["rate"] > 0 for case in cases.values())
    for system in ("orca_oracle", "paged"):
        assert cases["basic", system]["rate"] > cases["beam", system]["rate"]
    assert cases["basic", "orca_oracle"]["paper"] == 1.3


@pytest.mark.slow  # a whole experiment
def test_block_sizes_are_compared_simulated_and_on_a_model(tmp_path):
    results, stdout = results_of(
        "paper.fig18_block_size", tmp_path, "--quick", ONE_PROCESS, "--duration_s=4",
        "--block_size=16,256", "--workloads=shared_prefixes", f"--model={TINY_LM}",
        "--real_block_size=8,64", "--num_requests=4", "--max_tokens=8", "--max_num_seqs=2",
        "--max_model_len=512", "--pool_tokens=1024",
    )  # fmt: skip
    rows = {(row["run"], row["block_size"]): row for row in results["cases"]}
    assert len(rows) == 4
    for run, small, large in (("simulated", 16, 256), ("real", 8, 64)):
        assert rows[run, small]["waste_percent"] < rows[run, large]["waste_percent"]
        assert rows[run, small]["hit_percent"] > rows[run, large]["hit_percent"]
        assert rows[run, small]["table_percent"] > rows[run, large]["table_percent"]
    assert [row["run"] for row in results["best"]] == ["simulated", "real"]
    assert "Within 5 % of the lowest latency" in stdout


@pytest.mark.parametrize("name", NAMES)
def test_help_opens_with_the_question_and_has_an_example(name):
    documentation = ast.get_docstring(
        ast.parse((ROOT / f"experiments/paper/{name}.py").read_text())
    )
    assert documentation.split("\n")[0].startswith(("What ", "How ", "Which "))
    assert f"\n    python -m experiments.paper.{name} " in documentation
    assert "--quick" in documentation


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("paper.fig12_throughput", ["--lengths=opt"], "error: --lengths takes sharegpt, alpaca"),
        ("paper.fig13_batched_requests", ["--loads=alpaca"], "error: --loads takes lengths:rate"),
        (
            "paper.fig01_capacity",
            ["--model=OPT-175B"],
            "error: OPT-175B takes 325.2 GiB in float16",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, name, arguments, message):
    result = run_experiment(name, tmp_path, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
