"""From a workload's name and options to its requests: what the experiments call."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from paged_jax.workloads.arrivals import arrive_as_traced, arrive_at_once, arrive_gamma, speedup_to
from paged_jax.workloads.csv_traces import read_azure, read_burstgpt
from paged_jax.workloads.lengths import NAMED_LENGTHS, Lengths, length_requests
from paged_jax.workloads.mooncake import mooncake_requests, read_mooncake
from paged_jax.workloads.overflow import Overflow, limit_lengths
from paged_jax.workloads.prompts import prompt_requests, read_prompts
from paged_jax.workloads.request import VocabRange, WorkloadRequest, traced_requests
from paged_jax.workloads.sharegpt import find_packaged_sharegpt, read_sharegpt, sharegpt_requests

KINDS = ("sharegpt", "azure", "mooncake", "burstgpt", "lengths", "prompts")
ARRIVALS = ("all_at_once", "poisson", "gamma", "trace")
TIMED_KINDS = ("azure", "mooncake", "burstgpt")  # their traces hold arrival times

Encode = Callable[[str], Sequence[int]]


def build_workload(
    kind: str,
    *,
    max_model_len: int,
    num_requests: int | None = None,
    encode: Encode | None = None,
    encode_prompt: Encode | None = None,
    vocab: VocabRange | None = None,
    trace: str | Path | None = None,
    prompts: Sequence[str] | None = None,
    lengths: Lengths | str = "sharegpt",
    max_tokens: int | None = None,
    ignore_eos: bool | None = None,
    overflow: Overflow = "drop",
    arrivals: str = "all_at_once",
    rate: float | None = None,
    cv: float | None = None,
    speedup: float = 1.0,
    seed: int = 0,
) -> tuple[list[WorkloadRequest], list[str]]:
    """The requests of a workload in order of arrival, and notes for the user.

    kind: sharegpt (`trace`, or the installed package), azure, mooncake and burstgpt (`trace`),
        lengths (`lengths`, a name of NAMED_LENGTHS or lengths of your own), prompts (`prompts`, or
        the lines of `trace`).
    encode: text to token ids, for sharegpt and prompts. `encode_prompt` also puts around a prompt
        what the model wants (a chat template); where it is not given, `encode` stands in.
    vocab: the ids of synthetic prompts, for azure, mooncake, burstgpt and lengths.
    num_requests: how many; None takes all there are, and is not for lengths.
    max_tokens: caps every output; for prompts, which have no output lengths, it is the length.
    ignore_eos: None means outputs of exactly the given length, except for prompts.
    overflow: drop or clip a request whose prompt and output exceed `max_model_len`.
    arrivals: all_at_once; poisson (at `rate` requests/s); gamma (likewise, `cv` the coefficient of
        variation of the gaps); or trace (`speedup` times as fast, or scaled to `rate`).
    Raises ValueError, in one line, for a bad value, options that do not go together, a bad file.
    """
    _require_choice("workload", kind, KINDS)
    _require_choice("arrivals", arrivals, ARRIVALS)
    _require_choice("overflow", overflow, get_args(Overflow))
    if arrivals in ("poisson", "gamma"):
        is_misplaced = rate is None
    else:
        is_misplaced = rate is not None and (arrivals != "trace" or speedup != 1)
    if is_misplaced:
        raise ValueError(
            "a rate goes with poisson arrivals, gamma and, in place of a speed-up, trace arrivals; "
            f"got {rate=}, {arrivals=} and {speedup=}"
        )
    if (cv is not None) != (arrivals == "gamma"):
        raise ValueError(f"a cv goes with gamma arrivals, got {cv=} and {arrivals=}")
    if speedup != 1 and arrivals != "trace":
        raise ValueError(f"a speed-up goes with trace arrivals, got {speedup=} and {arrivals=}")
    if arrivals == "trace" and kind not in TIMED_KINDS:
        raise ValueError(f"the {kind} workload has no arrival times; {TIMED_KINDS} have")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if num_requests is not None and num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, got {num_requests}")
    if trace is not None and kind == "lengths":
        raise ValueError(f"the lengths workload reads no trace, got {str(trace)!r}")
    if trace is not None and prompts is not None:
        raise ValueError("prompts come from a list or from a file, got both")
    if prompts is not None and kind != "prompts":
        raise ValueError(f"prompts go with the prompts workload, not with {kind}")

    path = None if trace is None else Path(trace)
    if ignore_eos is None:
        ignore_eos = kind != "prompts"
    options: dict[str, Any] = {"seed": seed, "ignore_eos": ignore_eos}
    skipped: list[str] = []
    drawn: Iterator[WorkloadRequest]
    match kind:
        case "sharegpt":
            exchanges, skipped = read_sharegpt(path or find_packaged_sharegpt())
            encode = _require(encode, kind, "encode")
            drawn = sharegpt_requests(
                exchanges, encode=encode, encode_prompt=encode_prompt or encode, **options
            )
        case "azure" | "burstgpt":
            read = read_azure if kind == "azure" else read_burstgpt
            rows, skipped = read(_require(path, kind, "trace"))
            drawn = traced_requests(rows, vocab=_require(vocab, kind, "vocab"), **options)
        case "mooncake":
            blocks, skipped = read_mooncake(_require(path, kind, "trace"))
            drawn = mooncake_requests(blocks, vocab=_require(vocab, kind, "vocab"), **options)
        case "lengths":
            if isinstance(lengths, str):
                _require_choice("lengths", lengths, tuple(NAMED_LENGTHS))
                lengths = NAMED_LENGTHS[lengths]
            drawn = length_requests(
                lengths,
                _require(num_requests, kind, "num_requests"),
                vocab=_require(vocab, kind, "vocab"),
                **options,
            )
        case _:
            if prompts is None:
                prompts, skipped = read_prompts(_require(path, kind, "prompts or trace"))
            drawn = prompt_requests(
                prompts,
                encode=encode_prompt or _require(encode, kind, "encode"),
                max_tokens=_require(max_tokens, kind, "max_tokens"),
                ignore_eos=ignore_eos,
            )

    if max_tokens is not None:
        drawn = (
            replace(request, max_tokens=min(request.max_tokens, max_tokens)) for request in drawn
        )
    requests, limits = limit_lengths(
        drawn, max_model_len, overflow=overflow, num_requests=num_requests
    )
    notes = [f"{kind}: {note}" for note in (*skipped, *limits.notes())]
    if not requests:
        raise ValueError(
            f"{kind}: no request left; {limits.dropped} longer than {max_model_len=} dropped"
        )
    if num_requests is not None and len(requests) < num_requests:
        notes.append(f"{kind}: {len(requests)} requests, not the {num_requests} asked for")
    match arrivals:
        case "poisson" | "gamma":
            rate = _require(rate, kind, "rate")
            cv = 1.0 if arrivals == "poisson" else _require(cv, kind, "cv")
            return arrive_gamma(requests, rate=rate, cv=cv, seed=seed), notes
        case "trace":
            speedup = speedup if rate is None else speedup_to(requests, rate)
            return arrive_as_traced(requests, speedup=speedup), notes
        case _:
            return arrive_at_once(requests), notes


def _require_choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}; one of {', '.join(choices)}")


def _require[T](value: T | None, kind: str, option: str) -> T:
    if value is None:
        raise ValueError(f"the {kind} workload needs {option}")
    return value
