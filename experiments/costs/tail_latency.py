"""What continuous batching costs the tail, and what chunked prefill and admission control save.

    python -m experiments.costs.tail_latency --quick
    python -m experiments.costs.tail_latency
    python -m experiments.costs.tail_latency --rates=0.2,0.4,0.8 --gap_s=2 --ttft_s=30

Short requests decode while prompts of 4096 tokens arrive among them, at rising rates. Four systems
serve the same arrivals, on the same model and with the same memory:

    static              a batch is formed when nothing runs, and nobody joins until all have ended
    continuous          requests join and leave in every iteration; each prompt is prefilled whole
    chunked             prompts are prefilled in chunks of at most --max_num_batched_tokens
    admission           likewise; chunks are held back to keep the time between two tokens within
                        the objective, and who would wait too long for the first one is refused

A whole prompt holds up everybody's next token: watch the p99 of the gaps between tokens, and the
longest gap where fewer than one in a hundred meets a long prompt, as at low rates. Chunks bound
both, and make long prompts wait longer for their first token. Beyond what the machine can
serve, queues grow without end and all requests are late, unless some are refused at once: watch
the goodput, the requests a second whose first token and whose gaps keep the objective.

Rates are multiples (--loads) of what the chunked system serves when all requests are there at the
start, unless --rates gives them. Where no objective is given it comes from the same run: a gap may
take three iterations with a full chunk, the first token three times a long prompt's prefill.

Expect about ten minutes with --quick and three quarters of an hour without, on two CPU cores;
--out_dir gets results.json, results.csv and tail_latency.png.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from absl import flags

from experiments.costs.goodput import Case, Mix, Objective, case_of
from experiments.lib import reporting
from experiments.lib.driver import ServedRun, require_fitting, serve
from experiments.lib.reporting import preset
from paged_jax import Engine, SamplingParams
from paged_jax.loading import LoadedModel, load_config, load_model
from paged_jax.workloads import WorkloadRequest, arrive_at_once, arrive_poisson
from paged_jax.workloads.request import VocabRange

_QUICK = flags.DEFINE_bool("quick", False, "Fewer requests, and two rates.")
_LOADS = flags.DEFINE_list(
    "loads", None, "Request rates, as multiples of what the chunked system serves; default: "
    "0.4,0.8,1.6, or 0.5,1.5 with --quick.",
)  # fmt: skip
_RATES = flags.DEFINE_list("rates", None, "Request rates (requests/s), instead of --loads.")
_NUM_REQUESTS = flags.DEFINE_integer(
    "num_requests", None, "Requests of a run; default: 48, or 18 with --quick.", lower_bound=2
)
_LONG_EVERY = flags.DEFINE_integer(
    "long_every", 9, "One in so many requests has a long prompt.", lower_bound=2
)
_LONG_PROMPT = flags.DEFINE_integer("long_prompt", 4096, "Its tokens.", lower_bound=2)
_LONG_OUTPUT = flags.DEFINE_integer("long_output", 8, "Output tokens for it.", lower_bound=1)
_SHORT_PROMPT = flags.DEFINE_integer(
    "short_prompt", 32, "Mean tokens of all other prompts.", lower_bound=2
)
_SHORT_OUTPUT = flags.DEFINE_integer(
    "short_output", 48, "Mean output tokens for them.", lower_bound=2
)
_GAP_S = flags.DEFINE_float(
    "gap_s", None, "Objective: seconds between two tokens of a request, at most.", lower_bound=0
)
_TTFT_S = flags.DEFINE_float(
    "ttft_s", None, "Objective: seconds from arrival to first token, at most.", lower_bound=0
)
_MODEL = flags.DEFINE_string("model", "smollm2", "The model's name or path.")
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Slots (tokens) of a KV block.")
_NUM_BLOCKS = flags.DEFINE_integer(
    "num_blocks", None, "Blocks of the pool; default: for four long prompts."
)
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 16, "Sequences that run at a time.")
_MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", 256, "Tokens of an iteration, where prompts are cut into chunks."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths, prompts and arrivals.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/tail_latency", "Where the results go.")

GOAL = 0.5  # p99 of the gaps with chunks, of that without, at most
SYSTEMS: dict[str, dict[str, Any]] = {
    "static": {"scheduling_policy": "static", "enable_chunked_prefill": False},
    "continuous": {"enable_chunked_prefill": False},
    "chunked": {},
    "admission": {},
}
COLUMNS = (
    *("system", "rate", "requests", "refused", "ttft p50", "ttft p99", "gap p50", "gap p99"),
    *("gap max", "tokens/s", "goodput", "batch", "prefill"),
)


def make_engine(
    model: LoadedModel, mix: Mix, requests: Sequence[WorkloadRequest], **options: Any
) -> Engine:
    """Warmed up: all is compiled, and some of the requests have been served.

    Nothing is shared between requests, so that systems differ in scheduling alone.
    """
    is_chunked = options.get("enable_chunked_prefill", True)
    blocks_for_long = -(-mix.max_len // _BLOCK_SIZE.value)
    engine = Engine(
        model,
        block_size=_BLOCK_SIZE.value,
        num_blocks=_NUM_BLOCKS.value or 4 * blocks_for_long,
        max_num_seqs=_MAX_NUM_SEQS.value,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS.value if is_chunked else mix.max_len,
        max_model_len=mix.max_len,
        enable_prefix_caching=False,
        seed=_SEED.value,
        **options,
    )
    try:
        require_fitting(engine, requests)
        engine.warm_up()
        for request in requests[: mix.long_every]:
            params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
            engine.generate(list(request.prompt_token_ids), params, progress=False)
    except BaseException:
        engine.close()
        raise
    return engine


def numbers(flag: flags.FlagHolder[Any]) -> list[float] | None:
    """A list flag's values, above 0; None where it was not given."""
    if flag.value is None:
        return None
    try:
        values = [float(value) for value in flag.value]
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        raise ValueError(f"--{flag.name} takes numbers above 0, got {','.join(flag.value)}")
    return sorted(values)


def objective_of(engine: Engine, mix: Mix) -> Objective:
    """As given, or by what the engine has measured of its steps."""
    estimates = engine.core.scheduler.estimates
    full_chunk_s = estimates.prefill_s(_MAX_NUM_BATCHED_TOKENS.value)
    token_s = estimates.prefill_token_s
    assert full_chunk_s is not None
    assert token_s is not None
    iteration_s = full_chunk_s + (estimates.decode_s or 0.0)
    num_chunks = -(-mix.long_prompt // _MAX_NUM_BATCHED_TOKENS.value)
    return Objective(
        ttft_s=_TTFT_S.value or 3 * num_chunks * iteration_s,
        gap_s=_GAP_S.value or 3 * iteration_s,
    )


def run_system(
    engine: Engine, requests: Sequence[WorkloadRequest], rate: float | None
) -> ServedRun:
    """Serve the requests at a rate; None: all are there at the start."""
    if rate is None:
        arriving = arrive_at_once(requests)
    else:
        arriving = arrive_poisson(requests, rate=rate, seed=_SEED.value)
    return serve(engine, arriving, SamplingParams(temperature=0))


def plot(cases: Sequence[Case], objective: Objective, path: str) -> None:
    """Four panels over the request rate: first token, gaps, goodput, output tokens/s."""
    panels = [
        ("ttft", "time to first token (s)", objective.ttft_s),
        ("gap", "time between two tokens (s)", objective.gap_s),
        ("goodput", "goodput (requests/s)", None),
        ("tokens_per_s", "output tokens/s", None),
    ]
    figure, grid = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axes, (name, label, limit) in zip(grid.flat, panels, strict=True):
        for system in SYSTEMS:
            rows = [case._asdict() for case in cases if case.system == system]
            rates = [row["rate"] for row in rows]
            if limit is None:
                axes.plot(rates, [row[name] for row in rows], "o-", label=system)
                continue
            tails = [row[f"{name}_p99_s"] for row in rows]
            (line,) = axes.plot(rates, tails, "o-", label=f"{system}, p99")
            axes.plot(rates, [row[f"{name}_p50_s"] for row in rows], "o:", color=line.get_color())
        if limit is not None:
            axes.axhline(limit, color="0.6", linewidth=1, label="objective")
            axes.set_yscale("log")
        axes.set(xlabel="requests/s", ylabel=label + (" (dotted: p50)" if limit else ""))
    grid[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def tail_ratios(cases: Sequence[Case]) -> list[dict[str, float | None]]:
    """At each rate, the p99 gap with chunks over that without."""
    gaps = {(case.system, case.rate): case.gap_p99_s for case in cases}
    found: list[dict[str, float | None]] = []
    for rate in sorted({case.rate for case in cases}):
        chunked, whole = gaps["chunked", rate], gaps["continuous", rate]
        ratio = chunked / whole if chunked is not None and whole else None
        row = {"rate": rate, "chunked_p99_s": chunked, "continuous_p99_s": whole}
        found.append(row | {"ratio": ratio, "goal": GOAL})
    return found


def main() -> None:
    loads, rates = numbers(_LOADS), numbers(_RATES)
    is_quick = _QUICK.value
    mix = Mix(
        preset(_NUM_REQUESTS, is_quick, quick=18, full=48),
        _LONG_EVERY.value,
        _LONG_PROMPT.value,
        _LONG_OUTPUT.value,
        _SHORT_PROMPT.value,
        _SHORT_OUTPUT.value,
    )
    config = load_config(_MODEL.value)
    if mix.max_len > config.max_position_embeddings:
        raise ValueError(
            f"prompts and outputs of up to {mix.max_len} tokens are beyond the "
            f"{config.max_position_embeddings} that {config.name} was made for; lower --long_prompt"
        )
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    requests = mix.requests(VocabRange(0, config.vocab_size), _SEED.value)
    model = load_model(_MODEL.value)
    engine = make_engine(model, mix, requests, **SYSTEMS["chunked"])
    try:
        capacity = len(requests) / run_system(engine, requests, None).wall_s
        objective = objective_of(engine, mix)
    finally:
        engine.close()
    if rates is None:
        multiples = loads or ([0.5, 1.5] if is_quick else [0.4, 0.8, 1.6])
        rates = [multiple * capacity for multiple in multiples]
    admission = {
        "target_inter_token_s": objective.gap_s,
        # As many as have their first token in time (Little's law).
        "max_num_waiting": max(1, round(capacity * objective.ttft_s)),
    }
    cases: list[Case] = []
    for system, options in (SYSTEMS | {"admission": admission}).items():
        engine = make_engine(model, mix, requests, **options)
        try:
            for rate in rates:
                cases.append(case_of(system, rate, run_system(engine, requests, rate), objective))
        finally:
            engine.close()

    rows = [case._asdict() for case in cases]
    ratios = tail_ratios(cases)
    reporting.print_table(
        f"{config.name}: {len(requests)} requests, {mix.num_long(requests)} of them with "
        f"{mix.long_prompt} tokens of prompt",
        COLUMNS,
        cases,
    )
    reporting.print_table(
        "p99 between two tokens: chunked over whole prompts",
        list(ratios[0]),
        [list(row.values()) for row in ratios],
    )
    print(
        f"objective: first token within {objective.ttft_s:.3g} s, gaps within "
        f"{objective.gap_s:.3g} s; {capacity:.3g} requests/s when all are there at the start"
    )
    reporting.write_cases(
        rows,
        out_dir,
        _QUICK,
        objective=objective._asdict(),
        capacity=capacity,
        long_requests=mix.num_long(requests),
        gap_p99_ratios=ratios,
    )
    plot(cases, objective, str(out_dir / "tail_latency.png"))
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
