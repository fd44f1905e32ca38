"""The names that scripts had before say in one line where they went."""

import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from experiments import MOVED

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("old", MOVED)
def test_an_old_command_says_where_it_went(old):
    result = subprocess.run(
        [sys.executable, "-m", f"experiments.{old}", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: experiments.{old} is now experiments.{MOVED[old]}\n"
    assert find_spec(f"experiments.{MOVED[old]}").has_location


def test_an_import_of_an_old_name_fails_with_the_same_line():
    with pytest.raises(
        ModuleNotFoundError, match=r"experiments\.reporting is now experiments\.lib"
    ):
        importlib.import_module("experiments.reporting")


def test_other_names_are_unknown_as_ever():
    assert find_spec("experiments.no_such_script") is None
