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
request's arrival to its first token.

The paper compares with Orca on another model and on a GPU; here only the cache is different. Expect
minutes with --quick and a quarter of an hour without on two CPU cores. --out_dir gets results.json,
results.csv and shared_prefix.png.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from absl import flags
from tqdm import tqdm

from experiments.lib import reporting
from experiments.lib.paired import in_turn, ratio_spread
from experiments.lib.reporting import preset
from paged_jax import Engine, RequestOutput, SamplingParams

Encode = Callable[[str], Sequence[int]]

INSTRUCTION = "Translate the following English sentences into German.\n\n"
EXAMPLES = (
    (
        "She said that the results were encouraging, but that it was far too early to speak of a "
        "breakthrough.",
        "Sie sagte, die Ergebnisse seien ermutigend, doch sei es viel zu früh, um von einem "
        "Durchbruch zu sprechen.",
    ),
    (
        "The new committee will present its report on the future of the railways in the north "
        "before the summer break.",
        "Der neue Ausschuss wird seinen Bericht über die Zukunft der Eisenbahn im Norden noch vor "
        "der Sommerpause vorlegen.",
    ),
    (
        "In the old town, where the market is held every Saturday, most of the houses date back to "
        "the seventeenth century.",
        "In der Altstadt, wo jeden Samstag der Markt stattfindet, stammen die meisten Häuser aus "
        "dem siebzehnten Jahrhundert.",
    ),
    (
        "If the weather stays dry, the harvest will begin two weeks earlier than it did last year.",
        "Wenn das Wetter trocken bleibt, beginnt die Ernte zwei Wochen früher als im vergangenen "
        "Jahr.",
    ),
    (
        "The museum has closed two of its halls, because the roof has to be repaired before the "
        "winter.",
        "Das Museum hat zwei seiner Säle geschlossen, weil das Dach vor dem Winter ausgebessert "
        "werden muss.",
    ),
)
SENTENCES = (
    "The new bridge will be opened to traffic in the spring.",
    "Nobody in the village could remember a colder winter.",
    "The minister declined to answer questions about the budget.",
    "Prices for bread and milk have risen again this month.",
    "Two hikers were rescued from the mountain on Sunday evening.",
    "The orchestra will play three concerts in the city hall.",
    "Scientists have found traces of the plant in very old ice.",
    "The train to the coast was delayed by more than an hour.",
    "Many young families are moving back to the countryside.",
    "The court will announce its decision at the end of the week.",
    "He learned to repair clocks from his grandmother.",
    "The factory employs more people today than it did in the past.",
    "A heavy storm damaged several roofs near the harbour.",
    "The library stays open until ten o'clock in the evening.",
    "Farmers hope for rain before the beginning of the harvest.",
    "The team won its third match in a row without conceding a goal.",
)


def prefix_tokens(encode: Encode, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of an instruction and worked examples, as often as needed.

    With SmolLM2's tokenizer, 80 tokens are the instruction and one example, 341 are all five.
    """
    examples = "".join(f"English: {english}\nGerman: {german}\n\n" for english, german in EXAMPLES)
    text = INSTRUCTION + examples
    while len(tokens := list(encode(text))) < num_tokens:
        text += examples
    return tokens[:num_tokens]


def questions(encode: Encode, count: int, *, seed: int) -> list[list[int]]:
    """Prompts to append to the prefix: two sentences to be translated, of random choice."""
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(len(SENTENCES), size=2, replace=False) for _ in range(count)]
    return [list(encode(f"English: {SENTENCES[a]} {SENTENCES[b]}\nGerman:")) for a, b in chosen]


_QUICK = flags.DEFINE_bool("quick", False, "Fewer requests and rounds.")
_PREFIX_TOKENS = flags.DEFINE_list(
    "prefix_tokens", ["80", "341"], "Lengths of the shared prefix, in tokens."
)
_NUM_REQUESTS = flags.DEFINE_integer(
    "num_requests", None, "Requests of a round; default: 64, or 16 with --quick.", lower_bound=1
)
_ROUNDS = flags.DEFINE_integer("rounds", None, "Default: 4, or 3 with --quick.", lower_bound=1)
_OUTPUT_TOKENS = flags.DEFINE_integer(
    "output_tokens", 32, "Output of each request; about as long as what it translates.",
    lower_bound=1,
)  # fmt: skip
_PREFILL_PREFIX_TOKENS = flags.DEFINE_integer(
    "prefill_prefix_tokens", 341, "Tokens in the cache of the single prompts.", lower_bound=1
)
_PREFILL_TOKENS = flags.DEFINE_integer(
    "prefill_tokens", 400, "Tokens of the single prompts.", lower_bound=2
)
_PREFILL_ROUNDS = flags.DEFINE_integer(
    "prefill_rounds", None, "Single prompts of each kind; default: 50, or 10 with --quick.",
    lower_bound=1,
)  # fmt: skip
_MODEL = flags.DEFINE_string("model", "smollm2", "The model's name or path.")
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Slots (tokens) of a KV block.")
_MAX_NUM_SEQS = flags.DEFINE_integer(
    "max_num_seqs", None, "Sequences that run at a time; default: 32 on a CPU, 256 on a GPU."
)
_MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", None, "Tokens of an iteration; default: 256 on a CPU, 4096 on a GPU."
)
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", 1024, "Longest prompt and output together.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the choice of sentences.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/shared_prefix", "Where the results go.")

PAPER_RATIO = {80: 1.67, 341: 3.58}  # over Orca (Oracle)
PREFILL_GOAL = 1 / 3


class Case(NamedTuple):
    """One row of the table; speeds are output tokens/s, medians over the rounds."""

    prefix: int  # tokens
    requests: int
    without: float
    with_cache: float
    ratio: float  # median over rounds of with_cache / without
    low: float  # quartiles of the same
    high: float
    hit_percent: float  # of all prompt tokens
    same_percent: float  # of all outputs, those that are the same with and without, token for token
    paper: float | None  # ratio


class Prefill(NamedTuple):
    """Time to the first token of a single prompt, medians in milliseconds."""

    prompt_tokens: int
    cached_tokens: int
    uncached_ms: float
    cached_ms: float
    ratio: float  # median over rounds of cached / uncached
    low: float  # quartiles of the same
    high: float
    goal: float  # of the ratio, at most


def make_engine(enable_prefix_caching: bool) -> Engine:
    return Engine(
        _MODEL.value,
        block_size=_BLOCK_SIZE.value,
        max_num_seqs=_MAX_NUM_SEQS.value,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS.value,
        max_model_len=_MAX_MODEL_LEN.value,
        enable_prefix_caching=enable_prefix_caching,
        seed=_SEED.value,
    )


def encode(engine: Engine, text: str) -> list[int]:
    token_ids: list[int] = engine.tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def answer(
    engine: Engine, prompts: Sequence[list[int]], salt: str
) -> tuple[float, list[RequestOutput]]:
    """(seconds, outputs) of prompts that are all there at the start."""
    params = SamplingParams(
        temperature=0, max_tokens=_OUTPUT_TOKENS.value, ignore_eos=True, cache_salt=salt
    )
    start = time.perf_counter()
    outputs = engine.generate(prompts, params, progress=False)
    return time.perf_counter() - start, outputs


def run_case(
    with_cache: Engine, without: Engine, num_prefix: int, num_requests: int, rounds: int
) -> Case:
    """Let both engines answer the same requests, round by round.

    The salt of a round hides what the rounds before have left in the cache.
    """
    prefix = prefix_tokens(lambda text: encode(with_cache, text), num_prefix)
    own = questions(lambda text: encode(with_cache, text), num_requests, seed=_SEED.value)
    prompts = [prefix + question for question in own]
    seconds: dict[Engine, list[float]] = {with_cache: [], without: []}
    tokens: dict[Engine, list[list[int]]] = {with_cache: [], without: []}
    num_prompt = num_cached = 0
    description = f"prefix of {num_prefix}"
    with tqdm(total=2 * rounds, desc=description, unit="run", leave=False) as bar:
        for number, engine in in_turn(without, with_cache, rounds):
            salt = f"{num_prefix} tokens, round {number}"
            if engine is with_cache:
                engine.pin_prefix(prefix, cache_salt=salt)
            elapsed, outputs = answer(engine, prompts, salt)
            if engine is with_cache:
                engine.unpin_prefix(prefix, cache_salt=salt)
                num_prompt += sum(len(output.prompt_token_ids) for output in outputs)
                num_cached += sum(output.num_cached_tokens for output in outputs)
            seconds[engine].append(elapsed)
            tokens[engine] += [output.outputs[0].token_ids for output in outputs]
            bar.update()
    low, ratio, high = ratio_spread(seconds[without], seconds[with_cache])
    same = [a == b for a, b in zip(tokens[with_cache], tokens[without], strict=True)]
    num_tokens = num_requests * _OUTPUT_TOKENS.value
    return Case(
        num_prefix,
        num_requests,
        without=num_tokens / float(np.median(seconds[without])),
        with_cache=num_tokens / float(np.median(seconds[with_cache])),
        ratio=ratio,
        low=low,
        high=high,
        hit_percent=100 * num_cached / num_prompt,
        same_percent=100 * sum(same) / len(same),
        paper=PAPER_RATIO.get(num_prefix),
    )


def time_to_first_token(engine: Engine, prompt: list[int], salt: str) -> tuple[float, int]:
    """(seconds from a request's arrival to its first token, tokens found in the cache)."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, cache_salt=salt)
    [output] = engine.generate(prompt, params, progress=False)
    first_token_s = output.metrics.first_token_s
    assert first_token_s is not None
    return first_token_s - output.metrics.arrival_s, output.num_cached_tokens


def run_prefill(engine: Engine, rounds: int) -> Prefill:
    """Time a prompt whose beginning is in the cache, and the same one whose is not."""
    num_prefix, num_prompt = _PREFILL_PREFIX_TOKENS.value, _PREFILL_TOKENS.value
    prompt = prefix_tokens(lambda text: encode(engine, text), num_prompt)
    seconds: dict[str, list[float]] = {"cached": [], "uncached": []}
    cached_tokens = 0
    with tqdm(total=2 * rounds, desc="single prompts", unit="prompt", leave=False) as bar:
        for number, kind in in_turn("uncached", "cached", rounds):
            salt = f"{kind}, round {number}"
            if kind == "cached":
                time_to_first_token(engine, prompt[:num_prefix], salt)
            elapsed, num_cached = time_to_first_token(engine, prompt, salt)
            seconds[kind].append(elapsed)
            cached_tokens = max(cached_tokens, num_cached)
            bar.update()
    low, ratio, high = ratio_spread(seconds["cached"], seconds["uncached"])
    return Prefill(
        num_prompt,
        cached_tokens,
        uncached_ms=1e3 * float(np.median(seconds["uncached"])),
        cached_ms=1e3 * float(np.median(seconds["cached"])),
        ratio=ratio,
        low=low,
        high=high,
        goal=PREFILL_GOAL,
    )


def plot(cases: Sequence[Case], path: str) -> None:
    """Output tokens/s of both engines, and the ratio above."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for i, case in enumerate(cases):
        without = axes.bar(i - 0.2, case.without, width=0.38, color="0.6")
        with_cache = axes.bar(i + 0.2, case.with_cache, width=0.38, color="C0")
        axes.annotate(
            f"{case.ratio:.2f} times", (i + 0.2, case.with_cache), ha="center", va="bottom"
        )
    axes.legend([without, with_cache], ["without prefix cache", "with"], ncols=2, loc="upper left")
    axes.margins(y=0.2)
    axes.set_xticks(range(len(cases)), [str(case.prefix) for case in cases])
    axes.set(xlabel="tokens of the shared prefix", ylabel="output tokens/s")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    lengths = reporting.integers(_PREFIX_TOKENS, 1)
    if not _PREFILL_PREFIX_TOKENS.value < _PREFILL_TOKENS.value:
        raise ValueError(
            f"--prefill_prefix_tokens={_PREFILL_PREFIX_TOKENS.value} must be less than "
            f"--prefill_tokens={_PREFILL_TOKENS.value}"
        )
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    is_quick = _QUICK.value
    num_requests = preset(_NUM_REQUESTS, is_quick, quick=16, full=64)
    rounds = preset(_ROUNDS, is_quick, quick=3, full=4)
    engines: list[Engine] = []
    try:
        engines += [make_engine(True), make_engine(False)]
        with_cache, without = engines
        for engine in engines:
            engine.warm_up()
            answer(engine, [[0, 1]], "untimed")
        cases = [run_case(with_cache, without, n, num_requests, rounds) for n in lengths]
        prefill = run_prefill(with_cache, preset(_PREFILL_ROUNDS, is_quick, quick=10, full=50))
    finally:
        for engine in engines:
            engine.close()

    rows: list[dict[str, Any]] = [case._asdict() for case in cases]
    reporting.report_cases(
        f"Few-shot prompts to {with_cache.config.name}: output tokens/s",
        rows,
        out_dir,
        _QUICK,
        rounds=rounds,
        output_tokens=_OUTPUT_TOKENS.value,
        prefill=prefill._asdict(),
    )
    reporting.print_table("Single prompts, time to first token", Prefill._fields, [prefill])
    plot(cases, str(out_dir / "shared_prefix.png"))
    print("paper: over Orca (Oracle), LLaMA-13B on an A100")
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
