"""Checks that refuse what can never be served, with the numbers."""

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


def check_fits(request: Request, memory: MemoryManager, config: EngineConfig) -> None:
    """ValueError unless the request can finish when it is alone."""
    name, params = f"request {request.request_id!r}", request.params
    num_prompt, max_tokens = len(request.prompt_token_ids), params.max_tokens
    max_model_len, max_num_seqs = config.max_model_len, config.max_num_seqs
    if num_prompt >= max_model_len:
        raise ValueError(
            f"{name}: a prompt of {num_prompt} tokens leaves no room to generate one within "
            f"max_model_len {max_model_len}; shorten the prompt"
        )
    if num_prompt + max_tokens > max_model_len:
        raise ValueError(
            f"{name}: a prompt of {num_prompt} tokens and max_tokens {max_tokens} make "
            f"{num_prompt + max_tokens}, beyond max_model_len {max_model_len}; shorten the prompt "
            f"or set max_tokens to at most {max_model_len - num_prompt}"
        )
    if params.beam_width and params.beam_width > max_num_seqs:
        raise ValueError(
            f"{name}: beam_width {params.beam_width} is more than max_num_seqs {max_num_seqs}, and "
            "beams run together"
        )
    num_blocks = num_blocks_needed(request, memory)
    if num_blocks > memory.num_total_blocks - memory.num_pinned_blocks:
        beams = f" in {params.beam_width} beams" if params.beam_width else ""
        raise ValueError(
            f"{name}: a prompt of {num_prompt} tokens and max_tokens {max_tokens}{beams} can need "
            f"{num_blocks} blocks of {memory.block_size} slots, the pool has "
            f"{memory.num_total_blocks} and {memory.num_pinned_blocks} of them are pinned; give it "
            "more blocks or lower max_tokens"
        )


def num_blocks_needed(request: Request, memory: MemoryManager) -> int:
    """The most blocks that the request needs beside the pinned blocks that it is sure to find.

    The sequences of a sample run one after the other if need be; the beams of a search run
    together.
    """
    num_found = 0
    if not request.lacks_prompt_logprobs:
        num_found = memory.num_pinned_tokens(request.prompt_token_ids, request.params.cache_salt)
    needed = memory.num_blocks_needed(
        len(request.prompt_token_ids),
        request.sequences[0].max_num_slots,
        request.params.beam_width or 1,
    )
    return needed - num_found // memory.block_size
