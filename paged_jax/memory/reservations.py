"""How many slots a contiguous sequence reserves when it is admitted (section 6.1).

A reservation is a function of the tokens of the prompt, of the most slots that the sequence can
come to need, and of the longest sequence there is. It answers with slots, no fewer than needed.
"""

from collections.abc import Callable

from paged_jax.memory.buddy import order_of

Reservation = Callable[[int, int, int], int]


def reserve_max(num_prompt_tokens: int, max_num_tokens: int, max_model_len: int) -> int:
    """Orca (Max): as many as the longest sequence has tokens."""
    return max_model_len


def reserve_pow2(num_prompt_tokens: int, max_num_tokens: int, max_model_len: int) -> int:
    """Orca (Pow2): the output rounded up to a power of two, so at most twice what it needs."""
    num_output_tokens = max_num_tokens + 1 - num_prompt_tokens  # the last one needs no slot
    return min(num_prompt_tokens + (1 << order_of(num_output_tokens)), max_model_len)


def reserve_oracle(num_prompt_tokens: int, max_num_tokens: int, max_model_len: int) -> int:
    """Orca (Oracle): what is needed. The length of the output is known if nothing ends it early."""
    return max_num_tokens


RESERVATIONS: dict[str, Reservation] = {
    "orca_max": reserve_max,
    "orca_pow2": reserve_pow2,
    "orca_oracle": reserve_oracle,
}
