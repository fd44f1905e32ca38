"""Implementations of an op, by name: what a researcher extends with a line."""

import difflib
import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType


class Unsupported(ValueError):
    """An implementation cannot do what it is asked for; says what, why, and what can."""


class Registry(Mapping[str, str]):
    """Names of an op's implementations and the modules that hold them.

    A module is imported when its implementation is first used, so that one that this JAX no longer
    carries is in nobody's way. A dotted name of no registered implementation stands for a module of
    that name: a kernel under work needs no registration.
    """

    def __init__(self, op: str, modules: dict[str, str], functions: tuple[str, ...]):
        self.op = op
        self._modules = modules
        self._functions = functions  # that every module has

    def __getitem__(self, name: str) -> str:
        return self._modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def module(self, name: str) -> ModuleType:
        """The module of an implementation; ValueError for an unknown name."""
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
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if not f"{path}.".startswith(f"{error.name}."):
                raise  # the module is there, what it imports is not
            raise ValueError(f"unknown {self.op} {name!r}: there is no such module") from error
        if missing := [function for function in self._functions if not hasattr(module, function)]:
            raise ValueError(f"{self.op} {name!r} has no function {', '.join(missing)}")
        return module
