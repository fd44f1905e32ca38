"""What a block size does to a workload, simulated at the paper's scale."""

from dataclasses import dataclass
from typing import NamedTuple

from experiments.paper.simulations import Load, Point, first_rate, serve_at

OVERLOAD = 20  # times as many requests as a first guess says are served
TABLE_ENTRY_BYTES = 4


class Row(NamedTuple):
    """One block size; throughput, waste and hits are those of a pool that is full."""

    run: str
    workload: str
    block_size: int
    tokens_per_s: float  # output tokens of finished requests
    latency_ms: float | None  # per output token, at one rate for all block sizes
    waste_percent: float  # of the slots held, those without a token
    table_percent: float  # block tables, of the memory of the slots held
    hit_percent: float | None  # of prompt tokens; None: no prefix caching
    preemptions: int


def held_figures(
    *,
    block_size: int,
    internal: float,
    held: float,
    num_seqs: float,
    max_model_len: int,
    token_bytes: int,
) -> tuple[float, float]:
    """(waste, tables) in percent of what is held; all counts in slots, averaged over time.

    Waste is internal fragmentation alone: slots of a prompt that is still to be computed will be
    used. A table has an entry for each block that the longest sequence can come to need.
    """
    entries = num_seqs * -(-max_model_len // block_size)
    return 100 * internal / held, 100 * entries * TABLE_ENTRY_BYTES / (held * token_bytes)


@dataclass(frozen=True)
class SimulatedCase:
    """A load, and the rate of its latency: a fraction of what a block size of 16 serves."""

    load: Load
    rate: float


def overloaded(load: Load) -> Point:
    """A full pool: many more requests come than can be served."""
    return serve_at(load, OVERLOAD * first_rate(load), cut=True)


def served_rate(load: Load) -> float:
    """Requests/s that are finished when many more come; ValueError if none is."""
    point = overloaded(load)
    num_finished = point.num_requests - point.num_unfinished - point.num_refused
    if not num_finished:
        raise ValueError(f"{load}: no request ends within {load.duration_s:g} s; simulate longer")
    return num_finished / load.duration_s


def simulated_row(case: SimulatedCase) -> Row:
    """In a process of its own."""
    load = case.load
    full, loaded = overloaded(load), serve_at(load, case.rate)
    model, num_slots = load.deployment.model, load.deployment.num_slots
    waste, tables = held_figures(
        block_size=load.block_size,
        internal=num_slots * full.internal,
        held=num_slots * (full.token_states + full.reserved + full.internal),
        num_seqs=full.mean_batch_size,
        max_model_len=model.max_model_len,
        token_bytes=model.kv_bytes_per_token,
    )
    return Row(
        "simulated",
        load.lengths,
        load.block_size,
        full.output_tokens_per_s,
        None if loaded.normalised_latency_s is None else 1e3 * loaded.normalised_latency_s,
        waste,
        tables,
        100 * full.hit_rate if load.enable_prefix_caching else None,
        full.num_preemptions,
    )


def best_block_sizes(rows: list[Row], tolerance: float = 0.05) -> list[int]:
    """Of one workload and run: those whose latency is within `tolerance` of the lowest."""
    latencies = {row.block_size: row.latency_ms for row in rows if row.latency_ms is not None}
    lowest = min(latencies.values(), default=0.0)
    return [size for size, latency in latencies.items() if latency <= (1 + tolerance) * lowest]
