import ast
import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_cost_of_each_observer_is_measured(tmp_path):
    result = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.costs.observer_cost", "--quick", "--num_seqs=3"),
            *("--output_tokens=8", f"--out_dir={tmp_path}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["of"] for row in rows] == ["the loop", "metrics", "timeline", "iteration log"]
    assert all(float(row["median_us"]) > 0 for row in rows)
    assert (tmp_path / "observer_cost.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "iterations.jsonl").read_text().splitlines()) == 200


def test_help_opens_with_the_question_and_has_an_example():
    source = (ROOT / "experiments/costs/observer_cost.py").read_text()
    documentation = ast.get_docstring(ast.parse(source))
    assert documentation.startswith("What observing costs")
    assert "\n    python -m experiments.costs.observer_cost " in documentation
