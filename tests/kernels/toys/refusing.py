"""Attention that does nothing."""

from pallas_kernels.paged_attention import Call


def refusal(call: Call) -> str | None:
    return f"heads of {call.head_size} are out of fashion"
