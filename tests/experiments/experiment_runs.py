"""Experiments as their users run them: in a process of their own, with what they leave behind."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import TINY_LM

ROOT = Path(__file__).resolve().parents[2]
SMALL_ENGINE = [f"--model={TINY_LM}", "--max_num_batched_tokens=16"]


def run_experiment(name: str, out_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`name` is that of a module in `experiments`, such as costs.pipelining."""
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{name}", f"--out_dir={out_dir}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def results_of(
    name: str, out_dir: Path, *arguments: str, figure: str | None = None
) -> tuple[dict, str]:
    """(results.json, stdout), once it has been seen that all files are there.

    The figure's name is by default that of the module, without the number of the paper's figure.
    """
    figure = figure or re.sub(r"^fig\d+_", "", name.rpartition(".")[2])
    result = run_experiment(name, out_dir, *arguments)
    assert result.returncode == 0, result.stderr
    results = json.loads((out_dir / "results.json").read_text())
    assert results["environment"]["jax"]
    with (out_dir / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(results["cases"])
    assert (out_dir / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
    return results, result.stdout
