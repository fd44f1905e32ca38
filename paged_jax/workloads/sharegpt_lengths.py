"""The lengths of ShareGPT's first exchanges in a tokenizer's tokens, counted once and kept on disk.

Simulations need no text, and tokenising all of ShareGPT takes the better part of a minute.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paged_jax.workloads.request import VocabRange, WorkloadRequest, random_token_ids
from paged_jax.workloads.sharegpt import find_packaged_sharegpt, read_sharegpt

LengthTable = NDArray[np.int32]  # [exchanges, 2]: tokens of the prompt, tokens of the reply


def default_cache_dir() -> Path:
    """The folder in the user's cache for tables of lengths."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return cache_home / "paged_jax" / "lengths"


def sharegpt_lengths(
    trace: str | Path | None,
    *,
    count_tokens: Callable[[Sequence[str]], Sequence[int]],
    tokenizer_id: str,
    cache_dir: str | Path | None = None,
) -> LengthTable:
    """Tokens of each exchange's prompt and reply, in the order of the file.

    trace: a ShareGPT file; None: the installed package.
    count_tokens: counts the tokens of many texts at once.
    tokenizer_id: equal only for tokenizers that count alike. With a digest of the file it names the
        table that is kept in `cache_dir`.
    """
    path = Path(trace or find_packaged_sharegpt())
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    key = hashlib.sha256(f"{tokenizer_id}\n{digest}".encode()).hexdigest()
    kept = Path(cache_dir or default_cache_dir()) / f"sharegpt-{key[:32]}.npy"
    if kept.exists():
        table: LengthTable = np.load(kept)
        return table
    exchanges, _ = read_sharegpt(path)
    prompts, replies = zip(*exchanges, strict=True)
    table = np.array([count_tokens(prompts), count_tokens(replies)], np.int32).T
    kept.parent.mkdir(parents=True, exist_ok=True)
    # Another process may write the same table: the file of that name is whole at any time.
    partial = kept.with_suffix(f".{os.getpid()}.npy")
    np.save(partial, table)
    partial.replace(kept)
    return table


def sharegpt_length_requests(
    table: LengthTable, *, vocab: VocabRange, seed: int, ignore_eos: bool = True
) -> Iterator[WorkloadRequest]:
    """Requests of these lengths with random prompts, in an order shuffled by `seed`.

    `sharegpt_requests` draws from the same file in the same order.
    """
    token_rng = np.random.default_rng([seed, 0x6C656E])
    for index in np.random.default_rng(seed).permutation(len(table)):
        num_prompt_tokens, num_output_tokens = table[index].tolist()
        prompt = tuple(random_token_ids(token_rng, num_prompt_tokens, vocab))
        yield WorkloadRequest(prompt, num_output_tokens, ignore_eos)
