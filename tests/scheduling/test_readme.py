"""What the scheduler's README promises is tested: the tests that it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tests_that_the_readme_names_exist():
    readme = (ROOT / "paged_jax/scheduling/README.md").read_text()
    folders = ("tests/scheduling", "tests/engine")
    sources = [path.read_text() for folder in folders for path in (ROOT / folder).glob("test_*.py")]
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(sources), flags=re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", readme))
    assert len(named) > 20
    assert named <= defined


def test_the_readme_names_every_file():
    folder = ROOT / "paged_jax/scheduling"
    named = re.findall(r"^\| `(\w+\.py)`", (folder / "README.md").read_text(), flags=re.MULTILINE)
    assert {*named, "__init__.py", "scheduler.py"} == {path.name for path in folder.glob("*.py")}
