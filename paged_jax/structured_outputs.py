"""Structured outputs: the form that a request asks of its text; names follow vLLM's."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paged_jax.values import check_fields, checked, flag, one_line, string, strings


def _schema(name: str, value: Any) -> str:
    """A JSON schema, given as a dict or a text, as a text."""
    try:
        if isinstance(value, Mapping):
            return json.dumps(dict(value))
        schema = json.loads(string(name, value))
    except (TypeError, ValueError, RecursionError) as error:
        form = "a JSON schema, as a dict or a text"
        raise ValueError(f"{name} must be {form}: {one_line(error)}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{name} must be a JSON schema, which is an object; got {value!r:.80}")
    return str(value)


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What a text must match: one of these. ValueError for none and for several.

    A sequence ends where its text matches and the model, or the grammar, says that nothing follows.
    It is cut short, as any other, by `max_tokens`, stop strings and stop tokens.
    """

    json: str | Mapping[str, Any] | None = checked(_schema, None)  # a JSON schema
    regex: str | None = checked(string, None)  # as Rust's crate `regex` reads it; all of the text
    choice: Sequence[str] | None = checked(strings, None)  # one of these texts
    grammar: str | None = checked(string, None)  # Lark's syntax, as llguidance reads it, or GBNF
    json_object: bool | None = checked(flag, False, optional=True)  # any JSON object

    def __post_init__(self) -> None:
        check_fields(self)
        names = [each.name for each in fields(self)]
        given = [name for name in names if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"structured_outputs takes one of {', '.join(names)}; got {got}")
