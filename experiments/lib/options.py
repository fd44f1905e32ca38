"""An experiment's options: the fields of a frozen dataclass, each of which is an absl flag.

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        rates: tuple[float, ...] = option((1.0, 2.0), "Requests arrive at these rates (1/s).")
        duration_s: float = option(600.0, "Requests arrive for so long (s).", quick=60.0, least=1)

A field's type is bool, int, float, str, a Literal of strings, any of these or None, or a tuple of
them. Nothing is defined before `define` is called, so a module can be imported beside any other.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from absl import flags

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
    meta = {"text": text, "quick": quick, "least": least, "most": most}
    return dataclasses.field(
        default=default, metadata=meta | {"choices": tuple(choices), "repeats": repeats}
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that every experiment has."""

    quick: bool = option(False, "Run a smaller experiment, in minutes.")
    seed: int = option(0, "Seed of everything that is drawn at random.", least=0)
    out_dir: str = option(None, "Folder for the results. By default out/<name of the experiment>.")


@dataclass(frozen=True, kw_only=True)
class SimulationOptions(Options):
    """Those of an experiment with independent simulated points."""

    processes: int | None = option(
        None, "So many processes simulate at a time. By default one for each core.", least=1
    )


def define(
    config: type[Any],
    values: flags.FlagValues = flags.FLAGS,
    *,
    choices: Mapping[str, Collection[str]] | None = None,
) -> list[str]:
    """Define a flag for each field of `config` that has none yet; returns the fields' names.

    `choices` adds strings to choose from, by name of the field.
    """
    fields = [field for field in dataclasses.fields(config) if "text" in field.metadata]
    for field in fields:
        if field.name not in values:
            _define(field, values, (choices or {}).get(field.name))
    return [field.name for field in fields]


def _define(
    field: dataclasses.Field[Any], values: flags.FlagValues, named: Collection[str] | None
) -> None:
    kind, is_tuple, literals = _type_of(field)
    meta = field.metadata
    names = tuple(named or meta.get("choices") or literals)
    text, default = meta["text"], cast(Any, field.default)
    if (quick := meta.get("quick", _SAME)) is not _SAME:
        text += f" With --quick: {_shown(quick)}."
    common: dict[str, Any] = {"help": text, "flag_values": values}
    if is_tuple and meta["repeats"]:
        flags.DEFINE_multi_string(field.name, default, **common)
    elif is_tuple:
        flags.DEFINE_list(field.name, default and [str(each) for each in default], **common)
    elif kind is bool:
        flags.DEFINE_bool(field.name, default, **common)
    elif kind in (int, float):
        make = flags.DEFINE_integer if kind is int else flags.DEFINE_float
        bounds = {"lower_bound": meta.get("least"), "upper_bound": meta.get("most")}
        make(field.name, default, **common, **bounds)
    elif names:
        flags.DEFINE_enum(field.name, default, list(names), **common)
    else:
        flags.DEFINE_string(field.name, default, **common)


def from_flags[Config](config: type[Config], values: flags.FlagValues = flags.FLAGS) -> Config:
    """The options as the flags have them; ValueError for a list with an element that is wrong."""
    is_quick = "quick" in values and values["quick"].value
    given: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        if "text" not in field.metadata:
            continue
        flag = values[field.name]
        quick = field.metadata.get("quick", _SAME)
        if is_quick and not flag.present and quick is not _SAME:
            given[field.name] = quick
        elif _type_of(field)[1] and flag.value is not None:
            given[field.name] = tuple(_element(field, each) for each in flag.value)
        else:
            given[field.name] = flag.value
    return config(**given)


def _element(field: dataclasses.Field[Any], text: str) -> Any:
    """An element of a list flag; ValueError if it is none."""
    kind, _, literals = _type_of(field)
    name, least = field.name, field.metadata["least"]
    names = field.metadata["choices"] or literals
    if kind is str:
        if names and text not in names:
            raise ValueError(f"--{name} takes {', '.join(names)}; got {text!r}")
        return text
    try:
        value = kind(text)
        if least is not None and value < least:
            raise ValueError
    except ValueError:
        kinds = "integers" if kind is int else "numbers"
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"--{name} takes {kinds}{bound}, got {text!r}") from None
    return value


def _type_of(field: dataclasses.Field[Any]) -> tuple[type, bool, tuple[str, ...]]:
    """(type of the value or of a tuple's elements, whether it is a tuple, a Literal's strings)."""
    kind: Any = field.type
    if get_origin(kind) in (Union, UnionType):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    is_tuple = get_origin(kind) is tuple
    if is_tuple:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return str, is_tuple, get_args(kind)
    return kind, is_tuple, ()


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def as_dict(*configs: Any) -> dict[str, Any]:
    """All options with their values, as results.json has them."""
    return {
        field.name: getattr(config, field.name)
        for config in configs
        for field in dataclasses.fields(config)
        if "text" in field.metadata
    }
