"""A run over its iterations: what lengths alone decide, where requests are there at the start."""

from paged_jax.simulation.results import SimulatedRun

CURVES = (
    "batch size",
    "prefill tokens",
    "preempted",
    "finished",
    "running",
    "waiting",
    "token states",
    "reserved",
    "internal",
    "free",
)


def curves(run: SimulatedRun) -> list[tuple[int, ...]]:
    """For each iteration the values of `CURVES`."""
    return [
        (
            stats.num_decodes + stats.num_prefill_seqs,
            stats.num_prefill_tokens,
            stats.num_preempted,
            stats.num_finished,
            stats.num_running,
            stats.num_waiting,
            stats.usage.token_states,
            stats.usage.reserved,
            stats.usage.internal,
            stats.usage.free,
        )
        for stats in run.iterations
    ]


def first_difference(real: list[tuple[int, ...]], simulated: list[tuple[int, ...]]) -> str | None:
    """Where two runs part; None if they are the same in every iteration."""
    for number, (one, other) in enumerate(zip(real, simulated, strict=False)):
        for name, measured, predicted in zip(CURVES, one, other, strict=True):
            if measured != predicted:
                return f"iteration {number}: {name} {measured}, simulated {predicted}"
    if len(real) != len(simulated):
        return f"{len(real)} iterations, simulated {len(simulated)}"
    return None
