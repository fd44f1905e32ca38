"""Requests longer than the model's limit: dropped or clipped, as chosen, and counted."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from paged_jax.workloads.request import WorkloadRequest

Overflow = Literal["drop", "clip"]


@dataclass
class LimitReport:
    """How many requests `limit_lengths` dropped or clipped."""

    max_model_len: int
    dropped: int = 0
    clipped_prompts: int = 0
    clipped_outputs: int = 0

    def notes(self) -> list[str]:
        """The counts in words; none for counts of 0."""
        over = f"longer than {self.max_model_len} tokens"
        notes = []
        if self.dropped:
            notes.append(f"dropped {self.dropped} requests {over}")
        if self.clipped_prompts or self.clipped_outputs:
            notes.append(
                f"clipped {self.clipped_prompts} prompts and {self.clipped_outputs} outputs of "
                f"requests {over}"
            )
        return notes


def clip(request: WorkloadRequest, max_model_len: int) -> WorkloadRequest:
    """Cut the output to what the prompt leaves, yet no shorter than half the limit; then cut the
    prompt to what the output leaves, keeping its beginning (a shared prefix stays shared)."""
    room = max(max_model_len - request.num_prompt_tokens, max_model_len // 2)
    max_tokens = min(request.max_tokens, room)
    prompt = request.prompt_token_ids[: max_model_len - max_tokens]
    return replace(request, prompt_token_ids=prompt, max_tokens=max_tokens)


def limit_lengths(
    requests: Iterable[WorkloadRequest],
    max_model_len: int,
    *,
    overflow: Overflow,
    num_requests: int | None = None,
) -> tuple[list[WorkloadRequest], LimitReport]:
    """The first `num_requests` (None: all) whose prompt and output fit in `max_model_len`."""
    if max_model_len < 2:
        raise ValueError(f"max_model_len must leave room for 2 tokens, got {max_model_len}")
    if num_requests is not None and num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, got {num_requests}")
    report = LimitReport(max_model_len)
    kept: list[WorkloadRequest] = []
    for request in requests:
        if request.num_prompt_tokens + request.max_tokens <= max_model_len:
            kept.append(request)
        elif overflow == "drop":
            report.dropped += 1
        else:
            clipped = clip(request, max_model_len)
            report.clipped_prompts += clipped.num_prompt_tokens < request.num_prompt_tokens
            report.clipped_outputs += clipped.max_tokens < request.max_tokens
            kept.append(clipped)
        if len(kept) == num_requests:
            break
    return kept, report
