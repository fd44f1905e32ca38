"""What fits: checks that refuse what can never be served, with the numbers."""

from bisect import bisect_right

from paged_jax.config import EngineConfig
from paged_jax.memory.interface import MemoryManager
from paged_jax.scheduling.request import Request


class QueueFull(ValueError):
    """As many requests wait as may wait."""


def check_queue(request: Request, num_waiting: int, limit: int | None) -> None:
    """QueueFull if one more request may not wait; any number may if `limit` is None."""
    if limit is not None and num_waiting >= limit:
        raise QueueFull(
            f"request {request.request_id!r}: {num_waiting} requests wait, and max_num_waiting is "
            f"{limit}; send it again later"
        )


def fitting_max_tokens(request: Request, memory: MemoryManager, config: EngineConfig) -> int:
    """How many tokens each sequence may generate so that the request can finish when it is alone.

    That is `max_tokens`, clipped to `max_model_len`; None is clipped to the pool as well. A number
    that the pool can never hold is refused: it would depend on the pool what comes out. ValueError
    if no token fits, or fewer than `min_tokens`.
    """
    name, params = f"request {request.request_id!r}", request.params
    num_prompt, max_num_seqs = len(request.prompt_token_ids), config.max_num_seqs
    room = config.max_model_len - num_prompt
    if room < 1:
        raise ValueError(
            f"{name}: a prompt of {num_prompt} tokens leaves no room to generate one within "
            f"max_model_len {config.max_model_len}; shorten the prompt"
        )
    if params.beam_width and params.beam_width > max_num_seqs:
        raise ValueError(
            f"{name}: beam_width {params.beam_width} is more than max_num_seqs {max_num_seqs}, and "
            "beams run together"
        )
    num_blocks = memory.num_total_blocks - memory.num_pinned_blocks
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    needed = num_blocks_needed(request, memory, max_tokens)
    if needed > num_blocks:
        most = bisect_right(
            range(1, max_tokens), num_blocks, key=lambda n: num_blocks_needed(request, memory, n)
        )
        if params.max_tokens is not None or not most:
            beams = f" in {params.beam_width} beams" if params.beam_width else ""
            remedy = f"lower max_tokens to at most {most}" if most else "shorten the prompt"
            raise ValueError(
                f"{name}: a prompt of {num_prompt} tokens and max_tokens {max_tokens}{beams} can "
                f"need {needed} blocks of {memory.block_size} slots, the pool has "
                f"{memory.num_total_blocks} and {memory.num_pinned_blocks} of them are pinned; "
                f"give it more blocks or {remedy}"
            )
        max_tokens = most
    if params.min_tokens > max_tokens:
        raise ValueError(
            f"{name}: min_tokens {params.min_tokens} is more than the {max_tokens} tokens that fit "
            f"after a prompt of {num_prompt}; lower it or shorten the prompt"
        )
    return max_tokens


def num_blocks_needed(
    request: Request, memory: MemoryManager, max_tokens: int | None = None
) -> int:
    """The most blocks that the request needs beside the pinned blocks that it is sure to find.

    The sequences of a sample run one after the other if need be; the beams of a search run
    together. `max_tokens` may take the place of the request's own.
    """
    num_found, num_prompt = 0, len(request.prompt_token_ids)
    if not request.lacks_prompt_logprobs:
        num_found = memory.num_pinned_tokens(request.prompt_token_ids, request.params.cache_salt)
    needed = memory.num_blocks_needed(
        num_prompt,
        num_prompt + (max_tokens or request.max_tokens) - 1,
        request.params.beam_width or 1,
    )
    return needed - num_found // memory.block_size
