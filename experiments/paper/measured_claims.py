"""Claims that runs of the real model decide, as far as this device can decide them."""

from experiments.paper.claims import Claim, Results, figure

BEAMS = (
    "next tokens are drawn from a distribution fitted to SmolLM2's; to save less, OPT-13B's beams "
    "would have to stay apart for longer"
)


def memory_sharing(results: Results) -> list[Claim]:
    claims = []
    for row in results["cases"]:
        ours, paper = row["opt_13b"], row["paper"]
        if ours is None or paper is None:
            continue
        low, _, high = paper.partition(" to ")
        least, most = float(low), float(high or low)
        claims.append(
            Claim(
                f"blocks saved: {row['lengths']}, {row['method']} {row['width']}",
                f"{paper} %",
                f"{ours:.1f} %",
                "within 5 points",
                least - 5 <= ours <= most + 5,
                BEAMS if row["method"] == "beam" else "lengths alone decide",
            )
        )
    return claims


def shared_prefix(results: Results) -> list[Claim]:
    rows = results["cases"]
    claims = [
        Claim(
            f"throughput with a shared prefix of {row['prefix']} tokens",
            f"{row['paper']:g} times Orca (Oracle)",
            f"{figure(row['ratio'])} times the same engine without",
            "above 1; the paper's comparison is with Orca on a GPU",
            row["ratio"] > 1,
            "a few short requests on a noisy machine",
        )
        for row in rows
        if row["paper"] is not None
    ]
    if len(rows) > 1:
        ratios = [row["ratio"] for row in sorted(rows, key=lambda row: row["prefix"])]
        claims.append(
            Claim(
                "a longer prefix gains more",
                "1.67, then 3.58",
                ", then ".join(figure(ratio) for ratio in ratios),
                "the same order",
                ratios[-1] > ratios[0],
            )
        )
    prefill = results["prefill"]
    claims.append(
        Claim(
            "time to first token with the prefix in the cache, over without",
            "not given",
            figure(prefill["ratio"]),
            f"at most {prefill['goal']:.2f}, the goal of this project",
            prefill["ratio"] <= prefill["goal"],
        )
    )
    return claims


def chatbot(results: Results) -> list[Claim]:
    ratio = results["throughput_ratio"]["median"]
    return [
        Claim(
            "conversations: throughput",
            "2 times the Orca baselines",
            f"{figure(ratio)} times the same engine without reuse between turns",
            "",
            None,
            "the paper's gain is memory for larger batches and reuses nothing; here only the "
            "prefix cache differs",
        )
    ]


def kernel_latency(results: Results) -> list[Claim]:
    device = results["environment"]["device_kind"]
    is_gpu = results["environment"]["device_platform"] == "gpu"
    ratios = [
        row["ratio"]
        for row in results["cases"]
        if row["ratio"] is not None
        and row["block_size"] == 16
        and row["batch"] in (8, 32)
        and row["context"] <= 256
    ]
    if not ratios:
        return []
    low, high = results["paper_ratio"]
    return [
        Claim(
            "time of the paged attention kernel over a contiguous one, batch 8 and 32",
            f"{low:.2f} to {high:.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f} on {device}",
            "at most the paper's",
            max(ratios) <= high if is_gpu else None,
            "" if is_gpu else "XLA's gather on a CPU is another kernel on another device",
        )
    ]


def decode_step(results: Results) -> list[Claim]:
    ratios = [case["ratio"] for case in results["cases"]]
    return [
        Claim(
            "a whole decode step, paged over contiguous",
            "not given",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            "",
            None,
            "on this device",
        )
    ]


def validate_simulator(results: Results) -> list[Claim]:
    claims = [
        Claim(
            f"simulator, {row['workload']}: {row['figure']}",
            "-",
            f"{figure(row['simulated'])} simulated, {figure(row['real'])} measured",
            f"within {results['goal_percent']} %",
            row["in_goal"],
            "timings on a machine that does other things, too, differ between two real runs",
        )
        for row in results["cases"]
        if row["in_goal"] is not None
    ]
    claims.append(
        Claim(
            "simulator: batches and memory in each iteration",
            "-",
            "the same" if all(results["curves_equal"]) else "differ",
            "the same",
            all(results["curves_equal"]),
        )
    )
    return claims


def prefix_hit_rate(results: Results) -> list[Claim]:
    rates = [100 * case["hit_tokens"] / results["prompt_tokens"] for case in results["cases"]]
    return [
        Claim(
            "prompt tokens found in the cache, by block size and pool",
            "-",
            f"{min(rates):.1f} to {max(rates):.1f} %",
            "",
            None,
            "of the trace that was given",
        )
    ]


def preemption(results: Results) -> list[Claim]:
    """The A100 is modelled by the experiment; on a CPU, host memory is as near as the cache."""
    cases = sorted(results["cases"], key=lambda case: case["block_size"])
    if len(cases) < 2:
        return []
    first, last = cases[0], cases[-1]
    small = first["a100_each_ms"] / last["a100_each_ms"]
    recomputes = [case["recompute_ms"] for case in cases]
    ratios = {c["block_size"]: c["a100_recompute_ms"] / c["a100_each_ms"] for c in cases}
    middle = {size: ratio for size, ratio in ratios.items() if 16 <= size <= 64}
    claims = [
        Claim(
            "swapping is slow at small blocks",
            "many small copies",
            f"{small:.3g} times as long at {first['block_size']} as at {last['block_size']} "
            "(A100, modelled)",
            "above 2 times",
            small > 2,
        ),
        Claim(
            "recomputing takes the same at any block size",
            "flat",
            f"longest over shortest: {max(recomputes) / min(recomputes):.2f} (measured)",
            "at most 1.2",
            max(recomputes) / min(recomputes) <= 1.2,
            "small blocks cost this device's attention more, and its timings vary",
        ),
        Claim(
            "recomputing takes never more than 20 % longer than swapping",
            "at most 1.2",
            f"{max(ratios.values()):.2f} at most (A100, modelled)",
            "at most 1.2",
            max(ratios.values()) <= 1.2,
            "the model's PCIe and FLOP/s decide the largest blocks, where copies are few",
        ),
    ]
    if middle:
        claims.append(
            Claim(
                "from 16 to 64 slots a block both take about as long",
                "about even",
                ", ".join(f"{ratio:.2f} at {size}" for size, ratio in middle.items())
                + " (recompute over swap, A100, modelled)",
                "between 1/2 and 2",
                all(0.5 <= ratio <= 2 for ratio in middle.values()),
                "a copy's fixed cost is assumed",
            )
        )
    return claims


def tail_latency(results: Results) -> list[Claim]:
    ratios = [row["ratio"] for row in results["gap_p99_ratios"] if row["ratio"] is not None]
    if not ratios:
        return []
    return [
        Claim(
            "p99 of the time between two tokens, chunked over whole prompts",
            "-",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            "below 1 at every rate",
            max(ratios) < 1,
            "few requests",
        )
    ]
