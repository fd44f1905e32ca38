"""Fails where tests were skipped in each of several runs of pytest, and names them.

    python .ci/never_run.py REPORT.xml...

The reports are those of `pytest --junitxml`. A test that a run does not list was deselected there.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

# What stands in the names of tests that need what continuous integration does not have.
EXPECTED = {
    "test_live_parity": "torch, which may not exist for the project's Python",
    "::test_the_published_": "traces that are not in the repository",
}


def never_run(reports: Iterable[Path]) -> dict[str, str]:
    """Tests that all reports which list them call skipped, with the reason that one gives."""
    skipped: dict[str, str] = {}
    ran = set()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
            if (skip := case.find("skipped")) is None:
                ran.add(name)
            else:
                skipped[name] = skip.get("message", "")
    return {name: reason for name, reason in skipped.items() if name not in ran}


def main() -> None:
    found = never_run(map(Path, sys.argv[1:]))
    unexpected = [name for name in found if not any(text in name for text in EXPECTED)]
    if unexpected:
        print("skipped in every environment:", file=sys.stderr)
        for name in unexpected:
            print(f"  {name}: {found[name]}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
