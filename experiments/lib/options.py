"""An experiment's options: the fields of a frozen dataclass, each of which is an absl flag.

    rates: tuple[float, ...] = option((1.0, 2.0), "Requests arrive at these rates (1/s).")

A field's type is bool, int, float, str, a Literal of strings, any of these or None, or a tuple of
them. Nothing is defined before `define` is called, so a module can be imported beside any other.
"""

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from absl import flags

from paged_jax.config import EngineConfig

type Field = dataclasses.Field[Any]

_SAME = object()  # what --quick makes of an option that it leaves alone


def option(
    default: Any,
    text: str,
    *,
    quick: Any = _SAME,
    least: float | None = None,
    most: float | None = None,
    choices: Collection[str] = (),
    repeats: bool = False,
) -> Any:
    """A field of an experiment's options.

    text: what the option does, in sentences; it is the flag's help.
    quick: the default with --quick.
    least, most: bounds of a number, or of each number of a tuple.
    choices: the strings to choose from; of a tuple, for each.
    repeats: the flag is given once for each string of a tuple, not once with commas.
    """
    meta = {"text": text, "quick": quick, "least": least, "most": most, "repeats": repeats}
    return dataclasses.field(default=default, metadata=meta | {"choices": tuple(choices)})


def engine_option(name: str, default: Any = _SAME) -> Any:
    """The engine's option of that name, with another default where the experiment needs one."""
    field = EngineConfig.__dataclass_fields__[name]
    text, least = field.metadata["text"], field.metadata["least"]
    if default is _SAME:
        return option(field.default, text, least=least)
    return option(default, text.partition(" The default is ")[0], least=least)


def engine_options(config: Any) -> dict[str, Any]:
    """The options that are an engine's, by name, to be passed to `paged_jax.Engine`."""
    known = EngineConfig.__dataclass_fields__
    return {name: value for name, value in as_dict(config).items() if name in known}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that every experiment has."""

    quick: bool = option(False, "Run a smaller experiment, in minutes.")
    seed: int = option(0, "Seed of everything that is drawn at random.", least=0)
    out_dir: str = option(None, "Folder for the results. By default out/<name of the experiment>.")


@dataclass(frozen=True, kw_only=True)
class SimulationOptions(Options):
    """The options of an experiment whose points are simulated, each by itself."""

    processes: int | None = option(
        None, "So many processes simulate at a time. By default one for each core.", least=1
    )


def define(config: type[Any], values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Define a flag for each field of `config` that has none yet; returns the fields' names.

    A class may have `CHOICES`: strings to choose from, by the names of fields that it inherits from
    a class that cannot know them.
    """
    fields = _options(config)
    for field in fields:
        if field.name not in values:
            _define(config, field, values)
    return [field.name for field in fields]


def _define(config: type[Any], field: Field, values: flags.FlagValues) -> None:
    meta, (kind, is_tuple, choices) = field.metadata, _kind(config, field)
    name, default, text = field.name, cast(Any, field.default), meta["text"]
    if (quick := meta.get("quick", _SAME)) is not _SAME:
        text += (
            f" With --quick: {','.join(map(str, quick)) if isinstance(quick, tuple) else quick}."
        )
    common: dict[str, Any] = {"help": text, "flag_values": values}
    if is_tuple and meta["repeats"]:
        flags.DEFINE_multi_string(name, default, **common)
    elif is_tuple:
        if choices:
            common["help"] = f"<{'|'.join(choices)}>: {text}"  # as absl shows an enum
        flags.DEFINE_list(name, default and [str(each) for each in default], **common)
    elif choices:
        flags.DEFINE_enum(name, default, choices, **common)
    elif kind in (int, float):
        make = flags.DEFINE_integer if kind is int else flags.DEFINE_float
        make(name, default, lower_bound=meta["least"], upper_bound=meta.get("most"), **common)
    else:
        (flags.DEFINE_bool if kind is bool else flags.DEFINE_string)(name, default, **common)


def from_flags[Config](config: type[Config], values: flags.FlagValues = flags.FLAGS) -> Config:
    """The options as the flags have them; ValueError for a list with a wrong element, or none."""
    is_quick = "quick" in values and values["quick"].value
    given: dict[str, Any] = {}
    for field in _options(config):
        flag, quick = values[field.name], field.metadata.get("quick", _SAME)
        if is_quick and not flag.present and quick is not _SAME:
            given[field.name] = quick
        elif isinstance(flag.value, list):
            if flag.present and not flag.value:
                raise ValueError(f"--{field.name} takes one value at least, got none")
            given[field.name] = tuple(_element(config, field, text) for text in flag.value)
        else:
            given[field.name] = flag.value
    return config(**given)


def as_dict(*configs: Any) -> dict[str, Any]:
    """All options with their values, as results.json has them."""
    return {
        field.name: getattr(config, field.name) for config in configs for field in _options(config)
    }


def _options(config: Any) -> list[Field]:
    """The fields that are options; a class may have others."""
    return [field for field in dataclasses.fields(config) if "text" in field.metadata]


def _kind(config: type[Any], field: Field) -> tuple[type, bool, list[str]]:
    """The type of an option or of a tuple's elements, whether it is a tuple, and its choices."""
    kind: Any = field.type
    if get_origin(kind) in (Union, UnionType):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    is_tuple = get_origin(kind) is tuple
    if is_tuple:
        kind = get_args(kind)[0]
    choices = getattr(config, "CHOICES", {}).get(field.name) or field.metadata.get("choices", ())
    if get_origin(kind) is Literal:
        kind, choices = str, get_args(kind)
    if kind not in (bool, int, float, str):
        raise TypeError(f"the option {field.name} has a type without flags: {field.type}")
    return kind, is_tuple, list(choices)


def _element(config: type[Any], field: Field, text: str) -> Any:
    """An element of a list flag; ValueError for one that it cannot have."""
    kind, _, choices = _kind(config, field)
    if choices and text not in choices:
        raise ValueError(f"--{field.name} takes {', '.join(choices)}; got {text!r}")
    bounds = {"at least": field.metadata["least"], "at most": field.metadata["most"]}
    given = {word: bound for word, bound in bounds.items() if bound is not None}
    try:
        value = kind(text)
        low, high = given.get("at least", -math.inf), given.get("at most", math.inf)
        if kind is not str and not low <= value <= high:
            raise ValueError
    except ValueError:
        of = f" of {' and '.join(f'{word} {bound}' for word, bound in given.items())}"
        kinds = {int: "integers", float: "numbers"}[kind] + of * bool(given)
        raise ValueError(f"--{field.name} takes {kinds}, got {text!r}") from None
    return value
