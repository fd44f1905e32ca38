"""What reuse between turns is worth to a chatbot: ShareGPT conversations (Figure 17).

    python -m experiments.paper.fig17_chatbot --quick
    python -m experiments.paper.fig17_chatbot
    python -m experiments.paper.fig17_chatbot --window_step=512 --num_users=8

Users ask ShareGPT's questions, each as soon as the answer to the last one is there. A prompt is the
conversation so far, the model's own answers included, cut to its last 1024 tokens; answers are as
long as ShareGPT's, at most 1024 tokens. One engine finds in its prefix cache what it computed for
the turns before, the other has prefix caching off. Both hold the same conversations in turn, round
by round, so that a noisy machine slows both; ratios are medians over the rounds.

A conversation longer than the window loses its beginning with each turn, and with it all that
could be found: no two prompts begin alike any more. The second table keeps these turns apart.
--window_step=512 lets the beginning of prompts jump by 512 tokens, so that it stays for some turns.

The paper compares with Orca and keeps nothing between turns: the whole of its gain is memory for
larger batches. Here only the cache is different.

Expect minutes with --quick, which has fewer, shorter conversations and answers, and about half an
hour without on two CPU cores. --out_dir gets results.json, results.csv, turns.jsonl, chatbot.png.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from absl import flags
from tqdm import tqdm

from experiments.lib import reporting
from experiments.lib.paired import in_turn, ratio_spread
from experiments.lib.reporting import preset
from experiments.paper.chat import (
    AnsweredTurn,
    ChatRun,
    Turn,
    Window,
    chat,
    draw_conversations,
    read_conversations,
)
from paged_jax import Engine
from paged_jax.workloads import find_packaged_sharegpt

_QUICK = flags.DEFINE_bool("quick", False, "Fewer, shorter conversations and answers.")
_TRACE = flags.DEFINE_string("trace", None, "A ShareGPT file; default: the installed package.")
_NUM_CONVERSATIONS = flags.DEFINE_integer(
    "num_conversations",
    None,
    "Conversations of a round; default: 12, or 4 with --quick.",
    lower_bound=1,
)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 2, "Every round has conversations of its own, and both engines hold them.",
    lower_bound=1,
)  # fmt: skip
_NUM_USERS = flags.DEFINE_integer(
    "num_users", None, "Conversations at a time; default: 8, or 4 with --quick.", lower_bound=1
)
_MIN_TURNS = flags.DEFINE_integer(
    "min_turns", 2, "Leave out conversations of fewer turns.", lower_bound=1
)
_MAX_TURNS = flags.DEFINE_integer(
    "max_turns", None, "Cut longer conversations; default: 6, or 4 with --quick.", lower_bound=1
)
_MAX_PROMPT_TOKENS = flags.DEFINE_integer(
    "max_prompt_tokens", 1024, "Prompts hold so many of the conversation's last tokens.",
    lower_bound=1,
)  # fmt: skip
_WINDOW_STEP = flags.DEFINE_integer(
    "window_step", 1, "The beginning of prompts moves on in multiples of so many tokens."
)
_MAX_OUTPUT_TOKENS = flags.DEFINE_integer(
    "max_output_tokens",
    None,
    "Cut longer answers; default: 1024, or 32 with --quick.",
    lower_bound=1,
)
_MODEL = flags.DEFINE_string("model", "smollm2", "The model's name or path.")
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Slots (tokens) of a KV block.", lower_bound=1)
_NUM_BLOCKS = flags.DEFINE_integer(
    "num_blocks",
    None,
    "Blocks of each engine's KV pool; default: twice what the users' longest prompts and answers "
    "take.",
    lower_bound=1,
)
_MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", None, "Tokens of an iteration; default: 256 on a CPU, 4096 on a GPU."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the choice of conversations.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/chatbot", "Where the results go.")

PAPER_RATIO = 2  # over Orca, and nothing kept between turns
WITH, WITHOUT = "with", "without"


class Case(NamedTuple):
    """One engine over all rounds. Times in seconds."""

    reuse: str
    turns: int
    output_tokens_per_s: float
    turns_per_s: float
    hit_percent: float  # of all prompt tokens
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float


class Part(NamedTuple):
    """Some of the turns. Times are mean times to the first token, in seconds."""

    turns: str
    number: int
    prompt_tokens: float  # mean
    hit_percent: float
    without_s: float
    with_s: float


PARTS: tuple[tuple[str, Callable[[AnsweredTurn], bool]], ...] = (
    ("first turns", lambda turn: turn.turn == 0),
    ("later, all of the conversation", lambda turn: turn.turn > 0 and not turn.is_cut),
    ("later, its beginning cut off", lambda turn: turn.turn > 0 and turn.is_cut),
)


def make_engine(enable_prefix_caching: bool, num_users: int, max_model_len: int) -> Engine:
    num_blocks = 2 * num_users * -(-max_model_len // _BLOCK_SIZE.value)
    return Engine(
        _MODEL.value,
        block_size=_BLOCK_SIZE.value,
        num_blocks=num_blocks if _NUM_BLOCKS.value is None else _NUM_BLOCKS.value,
        max_num_seqs=num_users,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS.value,
        max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        seed=_SEED.value,
    )


def run_rounds(
    engines: dict[str, Engine],
    conversations: Sequence[Sequence[Turn]],
    *,
    num_users: int,
    rounds: int,
    window: Window,
) -> dict[str, list[ChatRun]]:
    """Let both engines hold the conversations of each round."""
    runs: dict[str, list[ChatRun]] = {name: [] for name in engines}
    num_turns = len(engines) * sum(map(len, conversations))
    with tqdm(total=num_turns, desc="chatting", unit="turn", leave=False) as bar:
        for number, name in in_turn(WITHOUT, WITH, rounds):
            bar.set_postfix_str(f"{name} reuse, round {number + 1} of {rounds}")
            run = chat(
                engines[name],
                conversations[number::rounds],
                num_users=num_users,
                window=window,
                salt=f"round {number}",
                on_turn=lambda _: bar.update(),
            )
            runs[name].append(run)
    return runs


def case_of(name: str, runs: Sequence[ChatRun]) -> Case:
    turns = [turn for run in runs for turn in run.turns]
    wall_s = sum(run.wall_s for run in runs)
    ttft = reporting.spread([turn.first_token_s for turn in turns])
    return Case(
        name,
        len(turns),
        output_tokens_per_s=sum(turn.num_output_tokens for turn in turns) / wall_s,
        turns_per_s=len(turns) / wall_s,
        hit_percent=hit_percent(turns),
        ttft_mean_s=ttft["mean"],
        ttft_p50_s=ttft["p50"],
        ttft_p99_s=ttft["p99"],
    )


def hit_percent(turns: Sequence[AnsweredTurn]) -> float:
    """Prompt tokens found in the cache, in percent of all prompt tokens."""
    found = sum(turn.num_cached_tokens for turn in turns)
    return 100 * found / sum(turn.num_prompt_tokens for turn in turns)


def parts_of(runs: dict[str, list[ChatRun]]) -> list[Part]:
    """First turns, later ones, and those whose conversation is longer than the window."""
    parts: list[Part] = []
    for label, belongs in PARTS:
        chosen = {
            name: [turn for run in all_runs for turn in run.turns if belongs(turn)]
            for name, all_runs in runs.items()
        }
        if turns := chosen[WITH]:
            parts.append(
                Part(
                    label,
                    len(turns),
                    float(np.mean([turn.num_prompt_tokens for turn in turns])),
                    hit_percent(turns),
                    *(
                        float(np.mean([t.first_token_s for t in chosen[n]]))
                        for n in (WITHOUT, WITH)
                    ),
                )
            )
    return parts


def turn_rows(runs: dict[str, list[ChatRun]]) -> list[dict[str, Any]]:
    """A row a turn, of both engines."""
    return [
        {
            "reuse": name,
            "round": number,
            **{field: getattr(turn, field) for field in AnsweredTurn.__dataclass_fields__},
        }
        for name, all_runs in runs.items()
        for number, run in enumerate(all_runs)
        for turn in run.turns
    ]


def plot(runs: dict[str, list[ChatRun]], path: str) -> None:
    """Left, time to the first token by turn; right, what of the prompts was found in the cache."""
    figure, (times, hits) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for name, all_runs in runs.items():
        by_turn: dict[int, list[AnsweredTurn]] = {}
        for run in all_runs:
            for turn in run.turns:
                by_turn.setdefault(turn.turn + 1, []).append(turn)
        numbers = sorted(by_turn)
        means = [np.mean([turn.first_token_s for turn in by_turn[n]]) for n in numbers]
        times.plot(numbers, means, "o-", label=f"{name} reuse")
        hits.plot(numbers, [hit_percent(by_turn[n]) for n in numbers], "o-")
    times.set(xlabel="turn", ylabel="mean time to first token (s)")
    times.set_ylim(bottom=0)
    for axes in (times, hits):
        axes.xaxis.get_major_locator().set_params(integer=True)
    times.legend()
    hits.set(xlabel="turn", ylabel="prompt tokens found in the cache (%)")
    hits.set_ylim(0, 100)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    is_quick = _QUICK.value
    num_users = preset(_NUM_USERS, is_quick, quick=4, full=8)
    rounds = _ROUNDS.value
    count = rounds * preset(_NUM_CONVERSATIONS, is_quick, quick=4, full=12)
    max_turns = preset(_MAX_TURNS, is_quick, quick=4, full=6)
    max_output = preset(_MAX_OUTPUT_TOKENS, is_quick, quick=32, full=1024)
    if max_turns < _MIN_TURNS.value:
        raise ValueError(f"--max_turns={max_turns} is less than --min_turns={_MIN_TURNS.value}")
    window = Window(_MAX_PROMPT_TOKENS.value, _WINDOW_STEP.value)
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    read = read_conversations(_TRACE.value or find_packaged_sharegpt())
    engines: dict[str, Engine] = {}
    try:
        for name in (WITHOUT, WITH):
            engines[name] = make_engine(name == WITH, num_users, window.max_tokens + max_output)
        conversations = draw_conversations(
            read,
            engines[WITH].tokenizer,
            count,
            min_turns=_MIN_TURNS.value,
            max_turns=max_turns,
            max_reply_tokens=max_output,
            seed=_SEED.value,
        )
        for engine in engines.values():
            engine.warm_up()
            chat(engine, [[Turn([0, 1], 2)]], num_users=1, window=window)  # untimed
        runs = run_rounds(engines, conversations, num_users=num_users, rounds=rounds, window=window)
        stats = engines[WITH].sharing_stats
    finally:
        for engine in engines.values():
            engine.close()

    cases = [case_of(name, all_runs) for name, all_runs in runs.items()]
    parts = parts_of(runs)
    low, ratio, high = ratio_spread(
        [run.wall_s for run in runs[WITHOUT]], [run.wall_s for run in runs[WITH]]
    )
    same = sum(
        a == b
        for one, other in zip(runs[WITH], runs[WITHOUT], strict=True)
        for a, b in zip(one.histories, other.histories, strict=True)
    )
    config = engines[WITH].config
    reporting.report_cases(
        f"Conversations with {config.name}",
        [case._asdict() for case in cases],
        out_dir,
        _QUICK,
        throughput_ratio={"low": low, "median": ratio, "high": high},
        paper_ratio=PAPER_RATIO,
        same_conversations=same,
        conversations=count,
        parts=[part._asdict() for part in parts],
        evictions=stats.evictions,
    )
    reporting.print_table("Time to first token, with and without reuse", Part._fields, parts)
    reporting.write_jsonl(out_dir, "turns.jsonl", turn_rows(runs))
    plot(runs, str(out_dir / "chatbot.png"))
    print(
        f"throughput, with reuse over without: {ratio:.2f} ({low:.2f} to {high:.2f}); the paper's, "
        f"without reuse, over Orca: {PAPER_RATIO}\n"
        f"{same} of {count} conversations are the same, token for token; {stats.evictions} blocks "
        f"evicted\nresults in {out_dir}"
    )


if __name__ == "__main__":
    reporting.run(main)
