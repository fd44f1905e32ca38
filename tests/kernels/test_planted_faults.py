"""Faults planted into a copy of the Mosaic GPU kernel, each of which kernel_check must find.

They are edits of the source: where it changes so that one no longer applies, the test says so.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNEL = ROOT / "pallas_kernels" / "paged_attention" / "mosaic_gpu"

# Fault -> (replacements by file, verdict, words of the reason).
FAULTS = {
    "slot_reused_without_waiting": (
        {"copies.py": [("        plgpu.commit_smem()  # all warps", "        # all warps")]},
        "race",
        "a write at",
    ),
    "tail_of_v_not_masked": (
        {"kernel.py": [("        self.clear_values(v_smem, first_token)\n", "")]},
        "wrong",
        "is nan, must be",
    ),
    "table_entry_not_clamped": (
        {
            "copies.py": [
                ("jnp.clip(first + j, self.first_column, self.last_column)", "(first + j)"),
                ("jnp.clip(entry, 0, self.num_blocks - 1)", "entry"),
            ]
        },
        "out of bounds",
        "Out-of-bounds access of [",
    ),
}


def plant(folder: Path, name: str, edits: dict[str, list[tuple[str, str]]]) -> str:
    """Copy the kernel's folder to `folder`/planted and edit it; the copy's name as a kernel."""
    copy = folder / "planted" / name
    shutil.copytree(KERNEL, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, replacements in edits.items():
        path = copy / file
        text = path.read_text()
        for old, new in replacements:
            assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
            text = text.replace(old, new)
        path.write_text(text)
    return f"planted.{name}"


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[int, dict[str, dict]]:
    """(exit code, row by fault) of one run over all faults and a copy without any."""
    folder = tmp_path_factory.mktemp("planted")
    faults = {"no_fault": {}} | {name: edits for name, (edits, _, _) in FAULTS.items()}
    copies = [plant(folder, name, edits) for name, edits in faults.items()]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.kernels.check"),
            *(f"--impl={','.join(copies)}", "--case=long context", f"--out_dir={folder}/out"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (folder / "out/results.json").exists(), done.stderr
    rows = json.loads((folder / "out/results.json").read_text())["cases"]
    return done.returncode, {row["implementation"].split(".")[-1]: row for row in rows}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(results, fault):
    _, verdict, reason = FAULTS[fault]
    row = results[1][fault]
    assert row["verdict"] == verdict, row["reason"]
    assert reason in row["reason"]


def test_the_copy_without_a_fault_passes(results):
    assert results[1]["no_fault"]["verdict"] == "pass"
    assert results[1]["no_fault"]["races"] is False


def test_faults_make_the_command_fail(results):
    assert results[0] == 1
