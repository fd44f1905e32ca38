"""Real text for requests of given lengths."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from paged_jax.workloads import WorkloadRequest, find_packaged_sharegpt, read_sharegpt


def with_sharegpt_text(
    requests: Sequence[WorkloadRequest],
    encode: Callable[[str], Sequence[int]],
    *,
    trace: str | Path | None,
    seed: int,
) -> list[WorkloadRequest]:
    """The requests with prompts that are the beginnings of ShareGPT conversations.

    trace: a ShareGPT file; None: the installed package. ValueError where it has no text as long
    as a prompt that no other request took.
    """
    exchanges, _ = read_sharegpt(trace or find_packaged_sharegpt())
    order = np.random.default_rng(seed).permutation(len(exchanges))
    texts: Iterator[list[int]] = (
        list(encode(f"{exchanges[i].prompt}\n{exchanges[i].reply}")) for i in order
    )
    too_short: list[list[int]] = []  # for a prompt before: they may do for one to come
    filled = []
    for request in requests:
        length = request.num_prompt_tokens
        tokens = next((text for text in too_short if len(text) >= length), None)
        if tokens is not None:
            too_short.remove(tokens)
        while tokens is None:
            text = next(texts, None)
            if text is None:
                raise ValueError(f"no ShareGPT conversation is left with {length} tokens or more")
            if len(text) >= length:
                tokens = text
            else:
                too_short.append(text)
        filled.append(replace(request, prompt_token_ids=tuple(tokens[:length])))
    return filled
