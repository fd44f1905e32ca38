"""experiments/README.md: its example is an ablation that runs, its table names every script."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import TINY_LM

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "experiments" / "README.md").read_text()
[EXAMPLE] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
NAME = "block_size_ablation"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder with the experiments, and the example saved among them."""
    folder = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "experiments", folder / "experiments", ignore=ignored)
    (folder / "experiments" / f"{NAME}.py").write_text(EXAMPLE)
    return folder


def test_the_example_runs_as_its_docstring_says(checkout):
    [command] = re.findall(rf"^    python (-m experiments\.{NAME} --quick)$", EXAMPLE, re.MULTILINE)
    result = subprocess.run(
        [sys.executable, *command.split(), f"--model={TINY_LM}"],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    out_dir = Path("out") / NAME
    assert result.stdout.endswith(f"Results are in {out_dir}\n")
    results = json.loads((checkout / out_dir / "results.json").read_text())
    small, large = results["cases"]
    assert (small["block_size"], large["block_size"]) == (4, 64)
    assert small["tokens_per_s"] > 0
    assert 0 < small["empty_percent"] < large["empty_percent"]
    assert results["flags"]["num_requests"] == 8
    assert (checkout / out_dir / "results.csv").read_text().startswith("block_size,tokens_per_s")
    assert (checkout / out_dir / "ablation.png").read_bytes().startswith(b"\x89PNG")


def test_the_example_is_short_and_formatted(tmp_path):
    assert len(EXAMPLE.splitlines()) <= 60
    script = tmp_path / f"{NAME}.py"
    script.write_text(EXAMPLE)
    for check in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        command = [sys.executable, "-m", "ruff", *check, f"--config={ROOT / 'pyproject.toml'}"]
        result = subprocess.run(
            [*command, str(script)], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_the_table_names_every_script():
    named = re.findall(r"^\| `([\w.]+)` \|", README, flags=re.MULTILINE)
    scripts = [
        ".".join(path.relative_to(ROOT / "experiments").with_suffix("").parts)
        for path in (ROOT / "experiments").rglob("*.py")
        if re.search(r"^    (reporting\.)?run\(main", path.read_text(), re.MULTILINE)
        and path.parent.name != "lib"
    ]
    assert sorted(named) == sorted(scripts)
    assert all(find_spec(f"experiments.{name}") for name in named)
