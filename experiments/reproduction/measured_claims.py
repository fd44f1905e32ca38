"""Claims that runs of the real model decide, as far as this device can decide them."""

from experiments.reproduction.claims import Claim, Results, figure

BEAMS = "next tokens are drawn from a distribution fitted to SmolLM2's; OPT-13B's beams stay apart"


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
                f"{BEAMS} for longer" if row["method"] == "beam" else "lengths alone decide",
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
