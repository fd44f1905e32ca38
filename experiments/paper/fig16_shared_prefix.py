"""What a shared prefix is worth: few-shot translation prompts over a prefix cache (Figure 16).

    python -m experiments.paper.fig16_shared_prefix --quick
    python -m experiments.paper.fig16_shared_prefix
    python -m experiments.paper.fig16_shared_prefix --prefix_tokens=80,341,1000 --num_requests=32

Requests ask for German translations. All begin with the same instruction and one worked example
(80 tokens) or five (341 tokens), followed by sentences of their own (24 to 33 tokens). One engine
has the prefix computed once and pinned, and finds it in the cache of each request; the other has
prefix caching off. Both answer the same requests, all there at the start, in turn, round by round,
so that a noisy machine slows both; ratios are medians over the rounds. Outputs have a fixed length.

Then single prompts of 400 tokens, of which the first 341 are in the cache or not: the time from a
request's arrival to its first token. The paper compares with Orca on another model and on a GPU;
here only the cache is different.

Expect minutes with --quick and a quarter of an hour without on two CPU cores.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.lib import figures
from experiments.lib.claims import Claim, Results, Rule, above, claim, figure, in_order
from experiments.lib.driver import with_and_without_cache
from experiments.lib.experiment import grid, run
from experiments.lib.options import Options, engine_option, engine_options, option
from experiments.lib.paired import in_turn, ratio_spread
from experiments.lib.reporting import print_rows, report
from paged_jax import Engine, RequestOutput, SamplingParams

PAPER_RATIO = {80: 1.67, 341: 3.58}  # over Orca (Oracle)
PREFILL_GOAL = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    prefix_tokens: tuple[int, ...] = option(
        tuple(PAPER_RATIO), "Numbers of tokens that all prompts begin with.", least=1
    )
    num_requests: int = option(64, "Number of requests in a round.", quick=16, least=1)
    rounds: int = option(4, "Each engine answers the requests so many times.", quick=3, least=1)
    output_tokens: int = option(32, "Tokens of an output, about as many as it translates.", least=1)
    prefill_prefix_tokens: int = option(341, "Cached tokens of the single prompts.", least=1)
    prefill_tokens: int = option(400, "All tokens of the single prompts.", least=2)
    prefill_rounds: int = option(50, "Number of single prompts of each kind.", quick=10, least=1)
    model: str = option("smollm2", "Name or path of the model.")
    block_size: int = engine_option("block_size")
    max_num_seqs: int | None = engine_option("max_num_seqs")
    max_num_batched_tokens: int | None = engine_option("max_num_batched_tokens")
    max_model_len: int = engine_option("max_model_len", 1024)


Row = dict[str, Any]
Encode = Callable[[str], Sequence[int]]

# An instruction, worked examples (English, German), and sentences to be translated.
PROMPTS = json.loads((Path(__file__).parent / "fig16_prompts.json").read_text())


def prefix_tokens(encode: Encode, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of the instruction and the examples, as often as needed.

    With SmolLM2's tokenizer, 80 tokens are the instruction and one example, 341 are all five.
    """
    examples = "".join(f"English: {one}\nGerman: {other}\n\n" for one, other in PROMPTS["examples"])
    text = PROMPTS["instruction"] + examples
    while len(tokens := list(encode(text))) < num_tokens:
        text += examples
    return tokens[:num_tokens]


def questions(encode: Encode, count: int, *, seed: int) -> list[list[int]]:
    """Prompts to append to the prefix: two sentences to be translated, chosen at random."""
    rng, sentences = np.random.default_rng(seed), PROMPTS["sentences"]
    chosen = [rng.choice(len(sentences), size=2, replace=False) for _ in range(count)]
    return [list(encode(f"English: {sentences[a]} {sentences[b]}\nGerman:")) for a, b in chosen]


class Pair:
    """Two engines that differ in their prefix cache alone."""

    def __init__(self, config: Config, with_cache: Engine, without: Engine):
        self._config, self._with_cache, self._without = config, with_cache, without
        self._encode = partial(with_cache.tokenizer.encode, add_special_tokens=False)

    def measure(self, num_prefix: int) -> Row:
        """Let both engines answer the same requests, round by round.

        The salt of a round hides what the rounds before have left in the cache.
        """
        config, with_cache, without = self._config, self._with_cache, self._without
        prefix = prefix_tokens(self._encode, num_prefix)
        own = questions(self._encode, config.num_requests, seed=config.seed)
        prompts = [prefix + question for question in own]
        seconds: dict[Engine, list[float]] = {with_cache: [], without: []}
        outputs: dict[Engine, list[RequestOutput]] = {with_cache: [], without: []}
        turns = in_turn((without, with_cache), config.rounds)
        name, total = f"prefix of {num_prefix}", 2 * config.rounds
        for number, engine in tqdm(turns, name, total, leave=False, unit="run"):
            salt = f"{num_prefix} tokens, round {number}"
            if engine is with_cache:
                engine.pin_prefix(prefix, cache_salt=salt)
            start = time.perf_counter()
            outputs[engine] += generate(engine, prompts, config.output_tokens, salt)
            seconds[engine].append(time.perf_counter() - start)
            if engine is with_cache:
                engine.unpin_prefix(prefix, cache_salt=salt)
        num_tokens = config.num_requests * config.output_tokens
        low, ratio, high = ratio_spread(seconds[without], seconds[with_cache])
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs[with_cache])
        num_cached = sum(output.num_cached_tokens for output in outputs[with_cache])
        pairs = zip(outputs[with_cache], outputs[without], strict=True)
        same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs]
        return {
            "prefix": num_prefix,  # tokens
            "requests": config.num_requests,
            "without": num_tokens / float(np.median(seconds[without])),  # output tokens/s
            "with_cache": num_tokens / float(np.median(seconds[with_cache])),
            "ratio": ratio,  # median over the rounds of with_cache / without
            "low": low,  # quartiles of the same
            "high": high,
            "hit_percent": 100 * num_cached / num_prompt,  # of all prompt tokens
            "same_percent": 100 * sum(same) / len(same),  # outputs, token for token
            "paper": PAPER_RATIO.get(num_prefix),
        }

    def measure_prefill(self) -> Row:
        """Time the first token of a prompt with its beginning in the cache, and without."""
        config, engine, cached_tokens = self._config, self._with_cache, 0
        prompt = prefix_tokens(self._encode, config.prefill_tokens)
        seconds: dict[str, list[float]] = {"cached": [], "uncached": []}
        turns = in_turn(("uncached", "cached"), config.prefill_rounds)
        total = 2 * config.prefill_rounds
        for number, kind in tqdm(turns, "single prompts", total, leave=False, unit="prompt"):
            salt = f"{kind}, round {number}"
            if kind == "cached":
                generate(engine, [prompt[: config.prefill_prefix_tokens]], 1, salt)
            [output] = generate(engine, [prompt], 1, salt)
            assert output.metrics.first_token_s is not None
            seconds[kind].append(output.metrics.first_token_s - output.metrics.arrival_s)
            cached_tokens = max(cached_tokens, output.num_cached_tokens)
        low, ratio, high = ratio_spread(seconds["cached"], seconds["uncached"])
        return {
            "prompt_tokens": config.prefill_tokens,
            "cached_tokens": cached_tokens,
            "uncached_ms": 1e3 * float(np.median(seconds["uncached"])),
            "cached_ms": 1e3 * float(np.median(seconds["cached"])),
            "ratio": ratio,  # median over the rounds of cached / uncached
            "low": low,  # quartiles of the same
            "high": high,
            "goal": PREFILL_GOAL,  # of the ratio, at most
        }


def generate(
    engine: Engine, prompts: Sequence[list[int]], num_tokens: int, salt: str
) -> list[RequestOutput]:
    """Answers of `num_tokens` to prompts that are all there at the start."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, cache_salt=salt)
    return engine.generate(prompts, params, progress=False)


def plot(rows: Sequence[Row], out_dir: str) -> None:
    """Output tokens/s of both engines, and the ratio above."""
    figure, [[panel]] = figures.panels(size=(6, 4))
    engines = {"without prefix cache": "without", "with": "with_cache"}
    speeds = {label: [row[name] for row in rows] for label, name in engines.items()}
    figures.bars(panel, [str(row["prefix"]) for row in rows], speeds)
    for i, row in enumerate(rows):
        text, place = f"{row['ratio']:.2f} times", (i + 0.2, row["with_cache"])
        panel.annotate(text, place, ha="center", va="bottom")
    panel.legend(ncols=2, loc="upper left")
    panel.margins(y=0.2)
    panel.set(xlabel="tokens of the shared prefix", ylabel="output tokens/s")
    figures.save(figure, out_dir, "shared_prefix.png")


def main(config: Config) -> None:
    if not config.prefill_prefix_tokens < config.prefill_tokens:
        raise ValueError(
            f"--prefill_prefix_tokens={config.prefill_prefix_tokens} must be less than "
            f"--prefill_tokens={config.prefill_tokens}"
        )
    options = engine_options(config)
    with with_and_without_cache(config.model, **options) as (with_cache, without):
        pair = Pair(config, with_cache, without)
        rows = grid(pair.measure, config.prefix_tokens, config, unit="prefix")
        prefill = pair.measure_prefill()
    title = f"Few-shot prompts to {with_cache.config.name}: output tokens/s"
    facts: Row = {"rounds": config.rounds, "output_tokens": config.output_tokens}
    report(title, rows, config, **facts, prefill=prefill)
    print_rows("Single prompts, time to first token", [prefill])
    plot(rows, config.out_dir)
    print("paper: over Orca (Oracle), LLaMA-13B on an A100")


def claims(results: Results) -> Iterator[Claim]:
    """What a shared prefix gains, and what its cache saves of the time to the first token."""
    rows = results["cases"]
    for row in [row for row in rows if row["paper"] is not None]:
        yield claim(
            f"throughput with a shared prefix of {row['prefix']} tokens",
            paper=f"{row['paper']:g} times Orca (Oracle)",
            found=row["ratio"],
            ours=f"{figure(row['ratio'])} times the same engine without",
            rule=above(1, "; the paper's comparison is with Orca on a GPU"),
            note="a few short requests on a noisy machine",
        )
    if len(rows) > 1:
        ratios = [row["ratio"] for row in sorted(rows, key=itemgetter("prefix"))]
        yield claim(
            "a longer prefix gains more",
            paper=", then ".join(map(figure, PAPER_RATIO.values())),
            found=(ratios[0], ratios[-1]),
            ours=", then ".join(map(figure, ratios)),
            rule=in_order(),
        )
    ratio, goal = results["prefill"]["ratio"], results["prefill"]["goal"]
    yield claim(
        "time to first token with the prefix in the cache, over without",
        paper="not given",
        found=ratio,
        rule=Rule(f"at most {goal:.2f}, the goal of this project", lambda found: found <= goal),
    )


if __name__ == "__main__":
    run(main, Config)
