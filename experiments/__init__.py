"""Scripts that each answer one question: `python -m experiments.<name> --help`; see README.md."""

import re
import sys
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from typing import Any

# Until version 0.2 the names that scripts had before they got folders say where the scripts are.
RENAMED = {"kernel_check": "check", "kernel_latency": "latency", "validate_simulator": "validate"}


def moved_to(name: str) -> str | None:
    """The module of a folder that had this name; figures of the paper had no number."""
    paths = Path(__file__).parent.glob("*/*.py")
    stems = {
        re.sub(r"^fig\d+_", "", path.stem): f"{path.parent.name}.{path.stem}" for path in paths
    }
    return stems.get(RENAMED.get(name, name))


class _Moved(MetaPathFinder, InspectLoader):
    """Finds the old names: run with `python -m` they print one line and exit with code 2."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __name__ or PathFinder.find_spec(fullname, path) or not moved_to(name):
            return None
        return spec_from_loader(fullname, self)

    def get_source(self, fullname: str) -> str:
        line = f"{fullname} is now {__name__}.{moved_to(fullname.rpartition('.')[2])}"
        return (
            "import sys\n"
            f"if __name__ != '__main__': raise ModuleNotFoundError({line!r})\n"
            f"print('error:', {line!r}, file=sys.stderr)\n"
            "sys.exit(2)\n"
        )


sys.meta_path.insert(0, _Moved())
