"""Limits of a scheduler, checked."""


def check_limits(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    max_prefill_seqs: int,
    max_num_waiting: int | None,
    watermark: float,
    enable_chunked_prefill: bool,
) -> None:
    """ValueError, with the value, for limits with which some request might never end."""
    limits = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "max_prefill_seqs": max_prefill_seqs,
        "max_num_waiting": max_num_waiting,
    }
    for name, value in limits.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {max_num_batched_tokens} is less than max_num_seqs "
            f"{max_num_seqs}: a token for each running sequence must fit in an iteration"
        )
    if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens {max_num_batched_tokens} is less than max_model_len "
            f"{max_model_len}: without chunked prefill any prompt must fit in an iteration; raise "
            "it, or lower max_model_len"
        )
    if not 0 <= watermark < 1:
        raise ValueError(f"watermark must be at least 0 and below 1, got {watermark}")
