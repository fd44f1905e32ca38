"""The experiments on sharing as a user runs them, on the tiny model."""

import ast
import json
from pathlib import Path

import pytest

from tests.experiments.experiment_runs import ROOT, SMALL_ENGINE, results_of, run_experiment


@pytest.fixture(scope="module")
def sharegpt(tmp_path_factory) -> Path:
    """Six conversations of three turns; the first has no answer to its last question."""
    path = tmp_path_factory.mktemp("sharegpt") / "sharegpt.json"
    conversations = [
        [
            {"from": role, "value": f"{word} {number}. " * (4 + turn)}
            for turn in range(3)
            for role, word in (("human", "Tell me about"), ("gpt", "This is"))
        ]
        for number in range(6)
    ]
    del conversations[0][-1]
    records = [{"id": str(i), "conversations": turns} for i, turns in enumerate(conversations)]
    path.write_text(json.dumps(records))
    return path


@pytest.mark.slow  # a whole experiment
def test_memory_sharing_puts_real_and_simulated_runs_beside_the_paper(tmp_path, sharegpt):
    results, stdout = results_of(
        "paper.fig15_memory_sharing",
        tmp_path,
        *SMALL_ENGINE,
        "--quick",
        "--lengths=alpaca",
        "--widths=2",
        f"--trace={sharegpt}",
        "--num_real_requests=2",
        "--max_real_tokens=24",
        "--num_requests=20",
        "--max_num_seqs=4",
        "--max_model_len=256",
    )
    parallel, beam = results["cases"]
    # Which blocks samples share is decided by lengths alone.
    assert 0 < parallel["real"] == pytest.approx(parallel["likewise"])
    assert beam["real"] > parallel["real"]
    assert beam["opt_13b"] > parallel["opt_13b"] > 0
    assert (parallel["paper"], beam["paper"]) == ("6.1", "37.6")
    assert [row["run"] for row in results["tokens_apart"]] == ["real", "likewise"]
    assert results["real_requests"]["alpaca"]["requests"] == 2
    assert "37.6" in stdout


def test_a_shared_prefix_is_found_and_changes_no_output(tmp_path):
    results, _ = results_of(
        "paper.fig16_shared_prefix",
        tmp_path,
        *SMALL_ENGINE,
        "--quick",
        "--prefix_tokens=80",
        "--num_requests=3",
        "--rounds=2",
        "--output_tokens=8",
        "--prefill_prefix_tokens=100",
        "--prefill_tokens=120",
        "--prefill_rounds=2",
        "--max_num_seqs=2",
        "--max_model_len=256",
    )
    [case] = results["cases"]
    assert case["paper"] == 1.67
    assert case["same_percent"] == 100
    assert case["hit_percent"] > 30
    assert case["low"] <= case["ratio"] <= case["high"]
    assert results["prefill"]["cached_tokens"] == 96


@pytest.mark.slow  # a whole experiment
def test_a_chat_reuses_its_earlier_turns_until_its_beginning_is_cut_off(tmp_path, sharegpt):
    results, _ = results_of(
        "paper.fig17_chatbot",
        tmp_path,
        *SMALL_ENGINE,
        "--quick",
        f"--trace={sharegpt}",
        "--num_conversations=2",
        "--num_users=2",
        "--max_prompt_tokens=240",
        "--max_output_tokens=16",
    )
    without, with_reuse = results["cases"]
    assert without["turns"] == with_reuse["turns"]
    assert without["hit_percent"] == 0
    assert results["same_conversations"] == results["conversations"] == 4
    first, whole, cut = results["parts"]
    assert first["number"] == 4
    assert first["hit_percent"] < 10 < whole["hit_percent"]
    assert cut["prompt_tokens"] == 240
    assert cut["hit_percent"] < whole["hit_percent"]
    rows = (tmp_path / "turns.jsonl").read_text().splitlines()
    assert len(rows) == without["turns"] + with_reuse["turns"]


def test_hit_rate_of_a_trace_falls_with_the_block_size(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1500, "output_length": 9, "hash_ids": [1, 2, 3]},
        {"timestamp": 5, "input_length": 1030, "output_length": 9, "hash_ids": [1, 2, 4]},
        {"timestamp": 9, "input_length": 700, "output_length": 9, "hash_ids": [1, 5]},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [f"--trace={trace}", "--block_size=16,512,1024", "--pool_tokens=0"]
    results, stdout = results_of("costs.prefix_hit_rate", tmp_path / "out", *arguments)
    assert [case["hit_tokens"] for case in results["cases"]] == [1536, 1536, 1024]
    assert results["prompt_tokens"] == 3230
    assert "Two prompts that share their first 15 tokens" in stdout


@pytest.mark.parametrize(
    "name",
    [
        "paper.fig15_memory_sharing",
        "paper.fig16_shared_prefix",
        "paper.fig17_chatbot",
        "costs.prefix_hit_rate",
    ],
)
def test_help_opens_with_the_question_and_has_an_example(name):
    source = (ROOT / f"experiments/{name.replace('.', '/')}.py").read_text()
    documentation = ast.get_docstring(ast.parse(source))
    assert documentation.startswith(("What ", "How much "))
    assert f"\n    python -m experiments.{name} " in documentation
    assert "--quick" in documentation


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "paper.fig15_memory_sharing",
            ["--runs=dreamt"],
            "error: --runs takes real, simulated; got 'dreamt'",
        ),
        ("paper.fig15_memory_sharing", ["--runs="], "error: --runs takes one value"),
        (
            "costs.prefix_hit_rate",
            [],
            "error: --trace: the path of a Mooncake trace (JSONL) is needed",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, name, arguments, message):
    result = run_experiment(name, tmp_path, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
