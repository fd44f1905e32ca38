import dataclasses
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from experiments.lib import reporting
from experiments.lib.options import Options, option


@dataclasses.dataclass
class Figures:
    shares: np.ndarray
    path: Path


def test_json_holds_dataclasses_arrays_and_paths(tmp_path):
    figures = Figures(np.array([0.5, 0.25]), Path("a/b"))
    path = reporting.write_json(tmp_path, "x.json", {"n": np.int64(3), "figures": figures})
    assert json.loads(path.read_text()) == {
        "n": 3,
        "figures": {"shares": [0.5, 0.25], "path": "a/b"},
    }


def test_json_lines_hold_one_row_each(tmp_path):
    path = reporting.write_jsonl(tmp_path, "x.jsonl", ({"n": n} for n in range(2)))
    assert path.read_text() == '{"n": 0}\n{"n": 1}\n'


def test_json_refuses_what_it_cannot_say(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        reporting.write_json(tmp_path, "x.json", [float("nan")])
    with pytest.raises(TypeError, match="no JSON for a set"):
        reporting.write_json(tmp_path, "x.json", [{1}])


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot make the folder .*file"):
        reporting.make_out_dir(tmp_path / "file" / "out")
    assert reporting.make_out_dir(tmp_path / "a" / "b").is_dir()


def test_the_environment_names_versions_and_the_device():
    facts = reporting.environment()
    assert facts["jax"]
    assert facts["device_kind"]
    assert facts["cpu_count"] >= 1
    json.dumps(facts)


def test_the_environment_says_none_of_a_missing_package(monkeypatch):
    monkeypatch.setattr(reporting, "PACKAGES", ("numpy", "no-such-package"))
    facts = reporting.environment()
    assert facts["numpy"] == np.__version__
    assert facts["no-such-package"] is None


def test_the_commit_says_when_files_differ_from_it(tmp_path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    commit = reporting.git_commit(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "file").write_text("two")
    assert reporting.git_commit(tmp_path) == f"{commit}+changes"


def test_no_commit_outside_a_repository(tmp_path):
    assert reporting.git_commit(tmp_path) is None


def test_spread_gives_mean_and_percentiles_or_nothing():
    assert reporting.spread(range(101)) == {"mean": 50.0, "p50": 50.0, "p99": 99.0}
    assert reporting.spread([2.0], percents=[99.9]) == {"mean": 2.0, "p99.9": 2.0}
    assert reporting.spread([]) == {"mean": None, "p50": None, "p99": None}


ROWS = [("output [b]tokens[/b]", 1234567), ("a|b", 0.001234), ("none", None)]


def test_tables_print_figures_to_the_right(capsys):
    reporting.print_table("Results", ("what", "value"), ROWS)
    printed = capsys.readouterr().out
    assert printed.startswith("Results")
    assert "output [b]tokens[/b] " in printed
    assert " 1,234,567 " in printed


def test_markdown_tables_hold_the_same_cells():
    assert reporting.markdown_table(("what", "value"), ROWS) == (
        "| what | value |\n"
        "| --- | ---: |\n"
        "| output [b]tokens[/b] | 1,234,567 |\n"
        "| a\\|b | 0.00123 |\n"
        "| none | - |\n"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(999.4, "999"), (999.6, "1,000"), (12.345, "12.3"), (True, "True"), (np.float32(2), "2")],
)
def test_cells_are_figures_as_people_read_them(value, text):
    assert reporting.cell(value) == text


class Row(NamedTuple):
    system: str
    rate: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Options):
    size: int = option(7, "Each has this size.")


ROW_KINDS = [
    [Row("paged", 1.5), Row("orca", None)],
    [{"system": "paged", "rate": 1.5}, {"system": "orca", "rate": None}],
]


@pytest.mark.parametrize("rows", ROW_KINDS)
def test_a_report_prints_some_columns_and_writes_all(tmp_path, capsys, rows):
    config = Config(out_dir=str(tmp_path))
    reporting.report("Rates", rows, config, columns=("system",), duration_s=60)
    printed = capsys.readouterr().out
    assert "paged" in printed
    assert "1.5" not in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["flags"] == {"quick": False, "seed": 0, "out_dir": str(tmp_path), "size": 7}
    assert results["environment"]["jax"]
    assert results["duration_s"] == 60
    assert results["cases"] == ROW_KINDS[1]
    assert (tmp_path / "results.csv").read_text() == "system,rate\npaged,1.5\norca,\n"


@pytest.mark.parametrize("rows", ROW_KINDS)
def test_csv_holds_a_header_and_a_line_for_each_row(tmp_path, rows):
    path = reporting.write_csv(tmp_path, "rates.csv", rows)
    assert path.read_text() == "system,rate\npaged,1.5\norca,\n"
