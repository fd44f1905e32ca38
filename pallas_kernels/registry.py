"""Implementations of an op, by name: what a researcher extends with a line."""

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any


class Unsupported(ValueError):
    """An implementation cannot do what it is asked for; says what, why, and what can."""


class Registry(Mapping[str, str]):
    """Names of an op's implementations and the modules that hold them.

    A module is imported when its implementation is first used, so that one that this JAX no longer
    carries is in nobody's way. A dotted name of no registered implementation stands for a module of
    that name: a kernel under work needs no registration.
    """

    def __init__(self, op: str, modules: dict[str, str]):
        self.op = op
        self._modules = modules

    def __getitem__(self, name: str) -> str:
        return self._modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def module(self, name: str) -> ModuleType:
        """The module of an implementation; ValueError for an unknown name, or ImportError."""
        if not isinstance(name, str):
            raise ValueError(f"{self.op} must be an implementation's name, got {name!r}")
        if name == "auto":
            raise ValueError(f"{self.op} 'auto' is no implementation; resolve it for a call first")
        path = self._modules.get(name, name)
        if not all(part.isidentifier() for part in path.split(".")) or "." not in path:
            nearest = difflib.get_close_matches(name.lower(), self, n=1)
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            raise ValueError(
                f"unknown {self.op} {name!r}{hint}; choose one of auto, {', '.join(self)}, or "
                "name a module"
            )
        return importlib.import_module(path)

    def function(self, name: str, function: str) -> Callable[..., Any]:
        """A function of an implementation; ValueError where its module has none of that name."""
        found: Callable[..., Any] | None = getattr(self.module(name), function, None)
        if found is None:
            raise ValueError(f"{self.op} {name!r} has no function {function!r}")
        return found
