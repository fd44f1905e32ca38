"""Readers can type what the READMEs show: all of it is run, or read as the experiments read it."""

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from pallas_kernels.lab import aot
from pallas_kernels.paged_attention import IMPLEMENTATIONS, reference
from tests.compiler import needs_compiler
from tests.readmes import LANGUAGES, ROOT, WORDS, blocks, commands_in_text, readmes

BLOCKS = blocks()


@pytest.fixture
def folder(tmp_path):
    """As the root of the repository, in which commands leave nothing."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in {path.split("/")[0] for path in tracked.stdout.splitlines()}:
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(folder: Path, *command: str, codes: tuple[int, ...] = (0,)) -> str:
    """What the command prints; it must end with one of the exit codes."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": tools},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode in codes, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def case(name: str, value: object, words: set[str]):
    marks = [pytest.mark.slow] * ("slow" in words) + [needs_compiler] * ("aot" in words)
    return pytest.param(value, id=name, marks=marks)


def programs() -> list:
    """The Python of each README, which goes on from block to block."""
    found = []
    for readme in readmes():
        own = [block for block in BLOCKS if (block.readme, block.language) == (readme, "python")]
        if own:
            words = {word for block in own for word in block.words}
            found.append(case(readme, "\n".join(block.text for block in own), words))
    return found


def scripts() -> list:
    return [
        case(str(block), block, set(block.words))
        for block in BLOCKS
        if block.language in ("sh", "console") and "ci" not in block.words
    ]


def test_every_block_says_what_it_is_and_what_it_needs():
    for block in BLOCKS:
        assert block.language in LANGUAGES, block
        assert set(block.words) <= set(WORDS), block
        if "aot" in block.words:
            assert ".[aot]" in block.before, block
        if block.language in ("sh", "console"):
            assert block.commands, block


@pytest.mark.parametrize("program", programs())
def test_the_python_of_a_readme_runs(folder, program):
    (folder / "program.py").write_text(program)
    run(folder, sys.executable, "program.py")


@pytest.mark.parametrize("block", scripts())
def test_the_commands_of_a_block_run(folder, block):
    # What compare finds depends on how quiet the machine is.
    codes = (0, 1, 3) if "experiments.compare" in block.script else (0,)
    stdout = run(folder, "bash", "-euo", "pipefail", "-c", block.script, codes=codes)
    for text, check in CHECKS.items():
        if text in block.script:
            check(stdout, folder)


def check_of_the_large_tiles(stdout: str, folder: Path) -> None:
    assert "scratch.large_tiles: 1 pass" in stdout
    assert not list(ROOT.glob("scratch"))
    # What the last command left: the copy beside the original.
    rows = json.loads((folder / "out/kernel_check/results.json").read_text())["cases"]
    original, copy = rows
    assert (original["implementation"], copy["implementation"]) == (
        "mosaic_gpu",
        "scratch.large_tiles",
    )
    if aot.is_available():
        assert copy["registers"] > original["registers"]
        assert copy["mma.sync"] == 2 * original["mma.sync"]


def check_of_kernel_check(stdout: str, folder: Path) -> None:
    rows = json.loads((folder / "out/kernel_check/results.json").read_text())["cases"]
    passed = [row for row in rows if row["verdict"] == "pass"]
    assert {row["check"] for row in passed} == {"values", "lowering"}
    assert {row["where"] for row in passed} == {"CPU", "A100", "L4", "H200", "B200"}
    for row in passed:
        compiled = row["check"] == "lowering" and aot.is_available()
        assert (row["registers"] is not None) == compiled
    assert ('pip install -e ".[aot]"' in stdout) == (not aot.is_available())


def check_of_compare(stdout: str, folder: Path) -> None:
    assert "Outputs are equal for 100.0% of 8 requests." in stdout
    assert re.search("^(PASSES|FAILS|UNCLEAR): ", stdout, flags=re.MULTILINE)


# By a text in a block's commands: what must come out.
CHECKS: dict[str, Callable[[str, Path], None]] = {
    "scratch.large_tiles": check_of_the_large_tiles,
    "kernels.check --impl=mosaic_gpu\n": check_of_kernel_check,
    "experiments.compare": check_of_compare,
}


def test_every_check_has_its_block():
    for text in CHECKS:
        assert [block for block in BLOCKS if text in block.script], text


def test_what_sets_up_an_environment_is_run_by_ci():
    lines = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    commands = [command for block in BLOCKS if "ci" in block.words for command in block.commands]
    assert {"scripts/run.sh", "scripts/test.sh"} <= set(commands) <= set(lines)


def test_commands_in_the_text_are_there():
    for module, *_ in commands_in_text():
        assert find_spec(module), module


@pytest.mark.parametrize(
    "command", sorted({shlex.join(command) for command in commands_in_text() if command[1:]})
)
def test_commands_in_the_text_have_flags_that_their_experiment_knows(command):
    run(ROOT, sys.executable, "-m", *shlex.split(command), "--only_check_args")


def test_the_contract_of_attention_is_that_of_the_reference():
    [block] = [block for block in BLOCKS if "def attend(" in block.text]
    [function] = ast.parse(block.text).body
    parameters = [arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)]
    assert parameters == list(inspect.signature(reference.attend).parameters)


def test_files_that_the_kernels_readme_names_are_there():
    readme = (ROOT / "pallas_kernels/README.md").read_text()
    for name in re.findall(r"^\| `([\w./]+)` \|", readme, flags=re.MULTILINE):
        assert (ROOT / "pallas_kernels" / name).exists(), name
    assert "mosaic_gpu" in IMPLEMENTATIONS
