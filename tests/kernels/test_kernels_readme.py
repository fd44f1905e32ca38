"""The worked example of pallas_kernels/README.md does what it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from pallas_kernels.lab import aot
from pallas_kernels.paged_attention import IMPLEMENTATIONS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "pallas_kernels" / "README.md").read_text()


def test_a_modified_copy_of_a_kernel_is_checked_by_the_commands_of_the_worked_example(tmp_path):
    for package in ("pallas_kernels", "experiments"):
        (tmp_path / package).symlink_to(ROOT / package)
    [commands] = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scratch.large_tiles: 1 pass" in done.stdout
    assert not list(ROOT.glob("scratch"))
    # What the last command left: the copy beside the original.
    rows = json.loads((tmp_path / "out/kernel_check/results.json").read_text())["cases"]
    original, copy = rows
    assert (original["implementation"], copy["implementation"]) == (
        "mosaic_gpu",
        "scratch.large_tiles",
    )
    if aot.is_available():
        assert copy["registers"] > original["registers"]
        assert copy["mma.sync"] == 2 * original["mma.sync"]


def test_files_that_the_readme_names_are_there():
    folder = ROOT / "pallas_kernels"
    rows = re.findall(r"^\| (`[\w./`, ]+`) \|", README, flags=re.MULTILINE)
    for name in re.findall(r"`([\w./]+)`", " ".join(rows)):
        assert (folder / name).exists() or (folder / "paged_attention" / name).exists(), name
    assert "mosaic_gpu" in IMPLEMENTATIONS
