"""Files that are written while the engine runs."""

from pathlib import Path
from typing import TextIO


def open_output(path: str | Path, *, by_line: bool = False) -> TextIO:
    """A new file; each line is in it at once if `by_line`. ValueError if it cannot be written."""
    try:
        return Path(path).open("w", buffering=1 if by_line else -1)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
