"""Plain prompts: a list, or a text file with one prompt a line."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paged_jax.workloads.files import read_lines
from paged_jax.workloads.records import Skipped
from paged_jax.workloads.request import WorkloadRequest


def read_prompts(path: str | Path) -> tuple[list[str], list[str]]:
    """The prompts of a file, and a note on the lines that were skipped, blank ones included."""

    def prompt(line: str) -> str:
        if not line.strip():
            raise ValueError("a blank line")
        return line

    skipped = Skipped(path)
    return skipped.finish(skipped.usable(read_lines(path, skipped), prompt))


def prompt_requests(
    prompts: Sequence[str],
    *,
    encode: Callable[[str], Sequence[int]],
    max_tokens: int,
    ignore_eos: bool = False,
) -> Iterator[WorkloadRequest]:
    """A request for each prompt. ValueError for a blank one."""
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {index} is empty")
        yield WorkloadRequest(tuple(encode(prompt)), max_tokens, ignore_eos, prompt=prompt)
