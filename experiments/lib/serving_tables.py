"""A run as people read it: completions, tables, summary.md."""

import textwrap
from collections.abc import Sequence
from typing import Any

from experiments.lib import reporting
from experiments.lib.driver import ServedRun

Row = tuple[object, ...]
Table = tuple[str, tuple[str, ...], list[Row]]  # title, columns, rows

_SHOWN_CHARACTERS = 400
_KV_NAMES = {
    "token_states": "token states",
    "reserved": "reserved",
    "internal": "internal fragmentation",
    "external": "external fragmentation",
    "free": "free",
}


def tables(figures: dict[str, Any]) -> list[Table]:
    """What was served and how fast, how long it took, where the KV slots went.

    Then, if there is any of it: latency by priority, and what was not served to its end.
    """
    found: list[Table] = [
        (
            "Served",
            ("figure", "value"),
            [
                ("requests", figures["requests"]),
                ("of which refused", figures["refused"]),
                ("of which timed out", figures["timed_out"]),
                ("of which failed", figures["failed"]),
                ("input tokens", figures["input_tokens"]),
                ("output tokens", figures["output_tokens"]),
                ("output tokens/s", figures["output_tokens_per_s"]),
                ("wall time (s)", figures["wall_s"]),
                ("of which idle (s)", figures["idle_s"]),
                ("iterations", figures["iterations"]),
                ("mean batch size, of iterations", figures["mean_batch_size"]),
                ("mean batch size, over time", figures["mean_batch_size_over_time"]),
                ("preemptions", figures["preemptions"]),
                ("of which by swap", figures["preemptions_by_swap"]),
                ("tokens computed again", figures["recomputed_tokens"]),
                ("blocks swapped out", figures["swapped_out_blocks"]),
                ("found in the prefix cache (%)", _percent(figures["prefix_hit_rate"])),
                ("blocks copied on write", figures["sharing"].copies),
                ("host share of the step (%)", _percent(figures["host_fraction"])),
                ("host work per iteration (ms)", _times(1e3, figures["host_s_per_iteration"])),
                ("padding in prefill (% of tokens)", _percent(figures["prefill_padding"])),
                ("compilations after warm-up", figures["compilations_after_warmup"]),
                ("waited for compilation (s)", figures["warm_up_wait_s"]),
                ("first completion after (s, since the start)", figures["first_completion_s"]),
            ],
        ),
        (
            "Latency",
            ("of", "mean", "p50", "p99"),
            [
                _spread_row("time to first token (s)", figures["ttft_s"]),
                _spread_row("time per token after the first (ms)", figures["tpot_s"], 1e3),
                _spread_row("token to token, all requests (ms)", figures["inter_token_s"], 1e3),
                _spread_row(
                    "normalised: per output token, waiting included (ms)",
                    figures["normalised_latency_s"],
                    1e3,
                ),
            ],
        ),
        (
            "KV slots",
            ("held as", "share of the pool over time (%)"),
            [
                (name, _percent((figures["kv_usage"] or {}).get(key)))
                for key, name in _KV_NAMES.items()
            ],
        ),
    ]
    by_priority = figures["ttft_s_by_priority"]
    if len(by_priority) > 1:
        rows: list[Row] = [
            _spread_row(str(priority), spread) for priority, spread in by_priority.items()
        ]
        columns = ("priority", "mean", "p50", "p99")
        found.append(("Time to first token by priority (s)", columns, rows))
    if figures["shortfalls"]:
        rows = [tuple(row.values()) for row in figures["shortfalls"]]
        found.append(("Not served to their end", ("requests that", "why", "requests"), rows))
    return found


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _percent(fraction: float | None) -> float | None:
    return _times(100, fraction)


def _spread_row(name: str, spread: dict[str, float | None], factor: float = 1.0) -> Row:
    return name, *(_times(factor, value) for value in spread.values())


def print_completions(run: ServedRun, count: int) -> None:
    """The first ``count`` prompts and what became of them."""
    for served in run.served[:count]:
        request = served.request
        prompt = request.prompt or f"({request.num_prompt_tokens} random tokens)"
        print(f"{served.request_id}: {_shortened(prompt)}")
        if served.output is None:
            print(f"  refused: {served.refusal}\n")
            continue
        if served.output.error is not None:
            print(f"  failed: {served.output.error}")
        for completion in served.output.outputs:
            num_tokens, reason = len(completion.token_ids), completion.finish_reason
            print(textwrap.indent(textwrap.fill(_shortened(completion.text), 98), "  "))
            print(f"  ({num_tokens} tokens, {reason})\n")


def _shortened(text: str) -> str:
    return textwrap.shorten(text, _SHOWN_CHARACTERS, placeholder=" …")


def summary(title: str, command: str, notes: Sequence[str], parts: Sequence[Table]) -> str:
    """``summary.md``."""
    lines = [f"# {title}\n", f"    {command}\n"]
    lines += ["".join(f"- {note}\n" for note in notes)] if notes else []
    lines += [
        f"## {name}\n\n{reporting.markdown_table(columns, rows)}" for name, columns, rows in parts
    ]
    lines += ["![batch size and KV use over time](timeline.png)\n"]
    lines += ["![what the blocks held over time](occupancy.png)\n"]
    return "\n".join(lines)
