"""Plain prompts: a list, or a text file with one prompt a line."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paged_jax.workloads.files import read_lines
from paged_jax.workloads.request import WorkloadRequest


def read_prompts(path: str | Path) -> tuple[list[str], int]:
    """The prompts of a file, and how many blank lines were skipped between them."""
    lines = [line for _, line in read_lines(path)]
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{path}: no prompt in it (one a line expected)")
    return prompts, len(lines) - len(prompts)


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
