"""Implementations of an op, by name: what a researcher extends with a line."""

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
        """The module of an implementation; ValueError for an unknown name."""
        path = self._modules.get(name, name)
        if "." not in path:
            raise ValueError(
                f"unknown {self.op} {name!r}; choose one of auto, {', '.join(self)}, or name a "
                "module"
            )
        return importlib.import_module(path)
