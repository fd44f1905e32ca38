"""What reuse between turns is worth to a chatbot: ShareGPT conversations (Figure 17).

    python -m experiments.paper.fig17_chatbot --quick
    python -m experiments.paper.fig17_chatbot
    python -m experiments.paper.fig17_chatbot --window_step=512 --num_users=8

Users ask ShareGPT's questions, each as soon as the answer to the last one is there. A prompt is the
conversation so far, the model's own answers included, cut to its last 1024 tokens; answers are as
long as ShareGPT's, at most 1024 tokens. One engine finds in its prefix cache what it computed for
the turns before, the other has prefix caching off. Both hold the same conversations in turn, round
by round, so that a noisy machine slows both; ratios are medians over the rounds.

A conversation longer than the window loses its beginning with each turn, and with it all that could
be found; the second table keeps these turns apart. With --window_step=512 the beginning of prompts
jumps by 512 tokens, so that it stays for some turns. The paper compares with Orca and keeps nothing
between turns: its gain is memory for larger batches. Here only the cache is different.

Expect minutes with --quick, which has fewer, shorter conversations and answers, and about half an
hour without on two CPU cores. --out_dir gets results.json, results.csv, turns.jsonl, chatbot.png.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.lib import figures
from experiments.lib.claims import Claim, Results, figure
from experiments.lib.driver import with_and_without_cache
from experiments.lib.experiment import grid, run
from experiments.lib.options import Options, engine_option, engine_options, option
from experiments.lib.paired import ratio_spread
from experiments.lib.reporting import print_rows, report, spread, write_jsonl
from experiments.paper.fig17_conversations import (
    AnsweredTurn,
    ChatRun,
    Turn,
    Window,
    chat,
    draw_conversations,
)
from paged_jax import Engine
from paged_jax.workloads import find_packaged_sharegpt, read_conversations

PAPER_RATIO = 2  # over Orca, and nothing kept between turns
WITH, WITHOUT = "with", "without"


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    trace: str | None = option(None, "ShareGPT file. By default the installed package's.")
    num_conversations: int = option(12, "Number of conversations in a round.", quick=4, least=1)
    rounds: int = option(2, "Number of rounds, each of other conversations.", least=1)
    num_users: int = option(8, "So many conversations are held at a time.", quick=4, least=1)
    min_turns: int = option(2, "Conversations of fewer turns are left out.", least=1)
    max_turns: int = option(6, "Longer conversations are cut to so many turns.", quick=4, least=1)
    max_prompt_tokens: int = option(1024, "Prompts hold the last so many tokens.", least=1)
    window_step: int = option(1, "The beginning of prompts moves on in multiples of this.")
    max_output_tokens: int = option(1024, "Longer answers are cut to this.", quick=32, least=1)
    model: str = option("smollm2", "Name or path of the model.")
    block_size: int = engine_option("block_size")
    num_blocks: int | None = option(
        None, "Blocks of each pool. By default twice what the users' longest turns take.", least=1
    )
    max_num_batched_tokens: int | None = engine_option("max_num_batched_tokens")

    def __post_init__(self) -> None:
        if self.max_turns < self.min_turns:
            raise ValueError(
                f"--max_turns={self.max_turns} is less than --min_turns={self.min_turns}"
            )


Row = dict[str, Any]
Turns = dict[str, list[AnsweredTurn]]  # with and without reuse, over all rounds
PARTS: tuple[tuple[str, Callable[[AnsweredTurn], bool]], ...] = (
    ("first turns", lambda turn: turn.turn == 0),
    ("later, all of the conversation", lambda turn: turn.turn > 0 and not turn.is_cut),
    ("later, its beginning cut off", lambda turn: turn.turn > 0 and turn.is_cut),
)


@dataclass(frozen=True)
class Pair:
    """Two engines, with and without reuse, which hold the same conversations."""

    config: Config
    engines: dict[str, Engine]
    conversations: list[list[Turn]]
    window: Window

    def measure(self, number: int) -> dict[str, ChatRun]:
        """Hold the conversations of a round on one engine and on the other."""
        conversations = self.conversations[number :: self.config.rounds]
        title, total = f"round {number + 1}", 2 * sum(map(len, conversations))
        with tqdm(desc=title, total=total, unit="turn", leave=False) as bar:
            return {
                name: chat(
                    self.engines[name],
                    conversations,
                    num_users=self.config.num_users,
                    window=self.window,
                    salt=title,
                    on_turn=lambda _: bar.update(),
                )
                for name in ((WITHOUT, WITH) if number % 2 == 0 else (WITH, WITHOUT))
            }


def hit_percent(turns: Sequence[AnsweredTurn]) -> float:
    """Prompt tokens found in the cache, in percent of all prompt tokens."""
    found = sum(turn.num_cached_tokens for turn in turns)
    return 100 * found / sum(turn.num_prompt_tokens for turn in turns)


def mean_ttft_s(turns: Sequence[AnsweredTurn]) -> float:
    return float(np.mean([turn.first_token_s for turn in turns]))


def row_of(name: str, turns: Sequence[AnsweredTurn], wall_s: float) -> Row:
    """One engine over all rounds."""
    times = spread([turn.first_token_s for turn in turns])
    return {
        "reuse": name,
        "turns": len(turns),
        "output_tokens_per_s": sum(turn.num_output_tokens for turn in turns) / wall_s,
        "turns_per_s": len(turns) / wall_s,
        "hit_percent": hit_percent(turns),
        **{f"ttft_{statistic}_s": value for statistic, value in times.items()},
    }


def parts_of(turns: Turns) -> Iterator[Row]:
    """First turns, later turns, and later turns in conversations longer than the window."""
    for label, belongs in PARTS:
        without, reused = (list(filter(belongs, turns[name])) for name in (WITHOUT, WITH))
        if reused:
            yield {
                "turns": label,
                "number": len(reused),
                "prompt_tokens": float(np.mean([turn.num_prompt_tokens for turn in reused])),
                "hit_percent": hit_percent(reused),
                "without_s": mean_ttft_s(without),  # to the first token, mean
                "with_s": mean_ttft_s(reused),
            }


def plot(turns: Turns, out_dir: str) -> None:
    """Left, time to the first token by turn; right, what of the prompts was found in the cache."""
    figure, axes = figures.panels(1, 2, size=(4.5, 4))
    for name, answered in turns.items():
        numbers = sorted({turn.turn for turn in answered})
        by_turn = [(1 + n, [turn for turn in answered if turn.turn == n]) for n in numbers]
        for panel, of in zip(axes[0], (mean_ttft_s, hit_percent), strict=True):
            figures.lines(panel, {f"{name} reuse": [(n, of(chosen)) for n, chosen in by_turn]})
    for panel in axes[0]:
        panel.set_xlabel("turn")
        panel.xaxis.get_major_locator().set_params(integer=True)
    times, hits = axes[0]
    times.set(ylabel="mean time to first token (s)", ylim=(0, None))
    times.legend()
    hits.set(ylabel="prompt tokens found in the cache (%)", ylim=(0, 100))
    figures.save(figure, out_dir, "chatbot.png")


def main(config: Config) -> None:
    window = Window(config.max_prompt_tokens, config.window_step)
    read, notes = read_conversations(config.trace or find_packaged_sharegpt())
    for note in notes:
        print(f"sharegpt: {note}")
    max_model_len = config.max_prompt_tokens + config.max_output_tokens
    blocks = 2 * config.num_users * -(-max_model_len // config.block_size)
    options = engine_options(config) | {"num_blocks": config.num_blocks or blocks}
    options |= {"max_num_seqs": config.num_users, "max_model_len": max_model_len}
    with with_and_without_cache(config.model, **options) as (with_reuse, without):
        conversations = draw_conversations(
            read,
            without.tokenizer,
            config.rounds * config.num_conversations,
            min_turns=config.min_turns,
            max_turns=config.max_turns,
            max_reply_tokens=config.max_output_tokens,
            seed=config.seed,
        )
        pair = Pair(config, {WITHOUT: without, WITH: with_reuse}, conversations, window)
        rounds = grid(pair.measure, range(config.rounds), config, unit="round")

    runs = {name: [of_round[name] for of_round in rounds] for name in (WITHOUT, WITH)}
    turns = {name: [turn for run in of for turn in run.turns] for name, of in runs.items()}
    wall_s = {name: [run.wall_s for run in of] for name, of in runs.items()}
    parts = list(parts_of(turns))
    low, ratio, high = ratio_spread(wall_s[WITHOUT], wall_s[WITH])
    histories = {name: [each for run in of for each in run.histories] for name, of in runs.items()}
    same = [a == b for a, b in zip(histories[WITH], histories[WITHOUT], strict=True)]
    evictions = sum(run.evictions for run in runs[WITH])
    report(
        f"Conversations with {without.config.name}",
        [row_of(name, turns[name], sum(wall_s[name])) for name in runs],
        config,
        throughput_ratio={"low": low, "median": ratio, "high": high},
        paper_ratio=PAPER_RATIO,
        same_conversations=sum(same),
        conversations=len(same),
        parts=parts,
        evictions=evictions,
    )
    print_rows("Time to first token, with and without reuse", parts)
    answered = (
        {"reuse": name, "round": number, **asdict(turn)}
        for name, of in runs.items()
        for number, run in enumerate(of)
        for turn in run.turns
    )
    write_jsonl(config.out_dir, "turns.jsonl", answered)
    plot(turns, config.out_dir)
    print(
        f"throughput, with reuse over without: {ratio:.2f} ({low:.2f} to {high:.2f}); the paper's, "
        f"without reuse, over Orca: {PAPER_RATIO}\n"
        f"{sum(same)} of {len(same)} conversations are the same, token for token; {evictions} "
        "blocks evicted"
    )


def claims(results: Results) -> Iterator[Claim]:
    """The paper's gain is of another kind, so its figure decides nothing."""
    ratio = results["throughput_ratio"]["median"]
    yield Claim(
        "conversations: throughput",
        f"{PAPER_RATIO} times the Orca baselines",
        f"{figure(ratio)} times the same engine without reuse between turns",
        note="the paper's gain is memory for larger batches and reuses nothing; here only the "
        "prefix cache differs",
    )


if __name__ == "__main__":
    run(main, Config)
