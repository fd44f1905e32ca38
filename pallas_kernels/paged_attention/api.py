"""The public entry: choose an implementation by name and call it.

To add a kernel, write a file with an ``attend`` of `spec`'s contract and name it in
`IMPLEMENTATIONS`; tests, checks and benchmarks then run on it by that name.
"""

from collections.abc import Callable

from jax import Array

from pallas_kernels.paged_attention import reference, xla
from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult, check_call

Attend = Callable[..., AttentionResult]

IMPLEMENTATIONS: dict[str, Attend] = {
    "reference": reference.attend,
    "xla": xla.attend,
}


def resolve(impl: str) -> str:
    """The implementation that ``impl`` stands for; "auto" is "xla" on every device.

    ValueError for an unknown name.
    """
    name = "xla" if impl == "auto" else impl
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown attention {impl!r}; choose one of auto, {', '.join(IMPLEMENTATIONS)}"
        )
    return name


def paged_prefill_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    query_starts: Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    impl: str = "auto",
) -> AttentionResult:
    """Causal attention of rows of T queries to what their block tables hold.

    q ``[B, T, Hq, D]``; caches ``[P, Hk, S, D]``, into which the queries' own keys and values have
    been written; block_tables ``i32[B, M]``; context_lens ``i32[B]``, the row's tokens in the
    cache, its own queries included; query_starts ``i32[B]``, the position of its first query.
    Query t of row b sees positions up to ``query_starts[b] + t``, and below ``context_lens[b]``.

    Table entries beyond the context may hold anything and are never followed; unused slots may
    hold NaN. Softmax statistics are float32. ValueError for shapes that do not fit.
    """
    check_call(q, k_cache, v_cache, block_tables, context_lens, query_starts)
    options = AttentionOptions(scale, soft_cap, sliding_window)
    return IMPLEMENTATIONS[resolve(impl)](
        q, k_cache, v_cache, block_tables, context_lens, query_starts, options=options
    )


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    impl: str = "auto",
    return_residuals: bool = False,
) -> Array | tuple[Array, Array, Array]:
    """PagedAttention for decoding (paper section 4.1, equation 4): one query per sequence.

    q ``[B, Hq, D]``, at position ``context_lens - 1``; the rest as in `paged_prefill_attention`.
    A context of length 0 gives zeros.

    Returns ``[B, Hq, D]``; with ``return_residuals`` also the largest score and the log-sum-exp of
    the scores, both ``f32[B, Hq]``.
    """
    if q.ndim != 3:
        raise ValueError(f"q must have 3 axes [B, Hq, D], got shape {q.shape}")
    result = paged_prefill_attention(
        q[:, None],
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        context_lens - 1,
        scale=scale,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
        impl=impl,
    )
    out, top, lse = (x[:, 0] for x in result)
    return (out, top, lse) if return_residuals else out
