"""Where the KV slots go: the averages, and the two experiments as a user runs them."""

import ast
from types import SimpleNamespace

import pytest

from experiments.paper.waste import CATEGORIES, waste_of
from paged_jax.memory.usage import MemoryUsage
from tests.conftest import TINY_LM
from tests.experiments.experiment_runs import ROOT, results_of, run_experiment


def iteration(wall_s: float, num_waiting: int, num_running: int, *usage: int) -> SimpleNamespace:
    return SimpleNamespace(
        wall_s=wall_s,
        num_waiting=num_waiting,
        num_decodes=num_running,
        num_prefill_seqs=0,
        usage=MemoryUsage(*usage),
    )


def test_waste_is_averaged_over_time_not_iterations_and_only_while_requests_wait():
    waste = waste_of(
        [
            iteration(1.0, 1, 2, 10, 20, 30, 40, 0),
            iteration(3.0, 5, 6, 50, 10, 0, 20, 20),
            iteration(100.0, 0, 1, 0, 0, 0, 0, 100),
        ]
    )
    shares = [getattr(waste, name) for name in CATEGORIES]
    assert shares == pytest.approx([40, 12.5, 7.5, 25, 15])
    assert sum(shares) == pytest.approx(100)
    assert waste.used_as_tokens == pytest.approx(100 * 40 / 85)
    assert waste.batch_size == pytest.approx(5)
    assert waste.tokens_to_come == pytest.approx(52.5 / 5)
    assert waste.waited_percent == pytest.approx(100 * 4 / 104)


def test_waste_without_load_is_not_known():
    with pytest.raises(ValueError, match="no request ever waited"):
        waste_of([iteration(1.0, 0, 2, 10, 20, 30, 40, 0)])


@pytest.mark.slow  # a whole experiment
def test_memory_waste_has_the_papers_order_simulated_and_real(tmp_path):
    results, stdout = results_of(
        "paper.fig02_memory_waste",
        tmp_path,
        "--quick",
        "--lengths=sharegpt_served",
        "--systems=orca_max,orca_oracle,paged",
        "--duration_s=60",
        f"--model={TINY_LM}",
        "--num_real_requests=24",
        "--real_max_model_len=128",
        "--max_num_seqs=8",
        "--max_num_batched_tokens=16",
        "--processes=1",
    )
    cases = results["cases"]
    systems = ["orca_max", "orca_oracle", "paged"]
    assert [case["system"] for case in cases] == 2 * systems
    for case in cases:
        assert sum(case[name] for name in CATEGORIES) == pytest.approx(100)
        assert case["system"] != "orca_oracle" or case["internal"] == 0
        assert case["system"] != "paged" or case["external"] == 0
    simulated = [case["token_states"] for case in cases[:3]]
    assert simulated == sorted(simulated)
    assert cases[3]["token_states"] < cases[5]["token_states"], "real"
    assert [case["same_outputs"] for case in cases[3:]] == [True] * 3
    assert cases[0]["external"] == pytest.approx(8.85, abs=0.01)
    assert cases[0]["batch_size"] == pytest.approx(7, abs=0.1)
    assert cases[2]["used_as_tokens"] > 95
    assert results["paper_percent"]["orca_max"] == [20.4, 13.3, 57.3, 8.9]
    assert "outputs that differ from those with blocks: none" in stdout


@pytest.mark.slow  # a whole experiment
def test_constant_lengths_hide_what_log_normal_ones_waste(tmp_path):
    results, stdout = results_of(
        "costs.length_shapes",
        tmp_path,
        "--quick",
        "--systems=orca_oracle,paged",
        "--rates=orca_oracle:1,paged:1.5",
        "--duration_s=60",
        "--processes=1",
    )
    cases = {(case["system"], case["shape"]): case for case in results["cases"]}
    assert len(cases) == 6
    wasted = {key: case["internal"] + case["external"] for key, case in cases.items()}
    assert wasted["orca_oracle", "constant"] < 6  # 498 slots in chunks of 512
    assert wasted["orca_oracle", "lognormal"] > 25
    assert wasted["paged", "lognormal"] < 4
    means = {shape: cases["paged", shape]["mean_output_tokens"] for _, shape in cases}
    assert means["constant"] == 338
    assert "Orca (Oracle): fragmentation" in stdout


@pytest.mark.parametrize("name", ["paper.fig02_memory_waste", "costs.length_shapes"])
def test_help_opens_with_the_question_and_has_an_example(name):
    documentation = ast.get_docstring(
        ast.parse((ROOT / f"experiments/{name.replace('.', '/')}.py").read_text())
    )
    assert documentation.startswith("What ")
    assert f"\n    python -m experiments.{name} --quick" in documentation


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "paper.fig02_memory_waste",
            ["--runs=dreamt"],
            "error: --runs takes simulated, real; got 'dreamt'",
        ),
        ("paper.fig02_memory_waste", ["--lengths=short"], "error: --lengths takes sharegpt"),
        ("costs.length_shapes", ["--rates=paged"], "error: --rates takes system:rate"),
        ("costs.length_shapes", ["--rates=paged:1"], "error: --rates has no rate for orca_max"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, name, arguments, message):
    result = run_experiment(name, tmp_path, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
