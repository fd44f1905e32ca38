"""The figures of a run, which results.json and the tables hold."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.lib import reporting
from experiments.lib.driver import ServedRequest, ServedRun
from paged_jax.engine.engine import Engine
from paged_jax.observability.observer import IterationStats
from paged_jax.outputs import CUT_SHORT, CompletionOutput, RequestOutput

Outcome = tuple[str, str]  # what happened, why
COUNTERS = (  # of the scheduler, as results.json has them
    *("preemptions", "preemptions_by_swap", "swap_fallbacks", "recomputed_tokens"),
    *("swapped_out_blocks", "swapped_in_blocks"),
)
TIMES = ("first_scheduled_s", "first_token_s", "last_token_s")  # of a request's metrics


def outcome(served: ServedRequest) -> Outcome | None:
    """None for a request that was served to its end; the reason may be empty."""
    if served.output is None:
        return "refused", served.refusal or ""
    if served.output.error is not None:
        return "failed", served.output.error
    reason = served.output.finish_reason  # also if it was a sample that is not among the outputs
    if reason == "timeout":
        return "timed out", "its deadline passed"
    return ("cut short", reason) if reason in CUT_SHORT else None


def complete_outputs(run: ServedRun) -> list[RequestOutput]:
    """The outputs of requests that were served to their end."""
    return [each.output for each in run.served if each.output and outcome(each) is None]


def num_output_tokens(run: ServedRun) -> int:
    """The tokens of all outputs, complete or not."""
    outputs = (served.output for served in run.served if served.output is not None)
    return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


def shortfalls(requests: Iterable[ServedRequest]) -> list[dict[str, str | int]]:
    """How requests fell short and how often, the most frequent first.

    Reasons that differ in numbers alone count as one, and the first of them is given.
    """
    kinds: dict[Outcome, list[Outcome]] = defaultdict(list)
    for what, why in filter(None, map(outcome, requests)):
        kinds[what, re.sub(r"\d+(\.\d+)?|'[^']*'", "#", why)].append((what, why))
    alike = sorted(kinds.values(), key=len, reverse=True)
    return [{"what": what, "why": why, "requests": 1 + len(more)} for (what, why), *more in alike]


def run_figures(run: ServedRun, engine: Engine, started_s: float) -> dict[str, Any]:
    """Everything that was measured; None where there is nothing to measure.

    engine: the run's, which has served nothing else.
    started_s: the time at which the command started, on the engine's clock.
    """
    outputs = [served.output for served in run.served if served.output is not None]
    output_tokens = num_output_tokens(run)
    device_s = sum(step.device_s for step in run.steps)
    executor, counters = engine.executor, engine.core.scheduler.counters
    warm_up_wait_s = executor.warm_up.waited_s if executor.warm_up else 0.0
    step_s = run.step_s - warm_up_wait_s
    ends_s = [times[-1] for each in outputs for times in each.metrics.token_times_s if times]
    outcomes = Counter(what for what, _ in filter(None, map(outcome, run.served)))
    return {
        "requests": len(run.served),
        "refused": outcomes["refused"],
        "failed": outcomes["failed"],
        "timed_out": outcomes["timed out"],
        "shortfalls": shortfalls(run.served),
        "finish_reasons": Counter(out.finish_reason for o in outputs for out in o.outputs),
        "input_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / run.wall_s,
        "wall_s": run.wall_s,
        "idle_s": run.idle_s,
        "step_s": step_s,
        "device_s": device_s,
        "host_fraction": _ratio(step_s - device_s, step_s),
        "host_s_per_iteration": _ratio(step_s - device_s, len(run.steps)),
        "wall_over_device": _ratio(run.wall_s - run.idle_s - warm_up_wait_s, device_s),
        **latencies(complete_outputs(run)),
        "ttft_s_by_priority": ttft_by_priority(run),
        "iterations": len(run.steps),
        **mean_batch_sizes(run.steps),
        **{name: getattr(counters, f"num_{name}") for name in COUNTERS},
        "swap_s": sum(step.swap_s for step in run.steps),
        "prefix_hit_rate": engine.sharing_stats.hit_rate,
        "sharing": engine.sharing_stats,
        "prefill_padding": _ratio(executor.num_padded_tokens, executor.num_prefill_tokens),
        "kv_usage": kv_usage(run.steps),
        "compilations_after_warmup": run.num_compilations,
        "warm_up_wait_s": warm_up_wait_s,
        "first_completion_s": _since(started_s, min(ends_s, default=None)),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _since(start_s: float, time_s: float | None) -> float | None:
    return None if time_s is None else time_s - start_s


def latencies(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Latencies in seconds, each as mean and percentiles; waiting after the arrival is included.

    outputs: `complete_outputs`; the times of others say nothing of what they needed.

    ttft_s: from arrival to first token, for each request.
    tpot_s: time per token after the first, for each request that has one.
    inter_token_s: from each token to the next, for all requests together.
    normalised_latency_s: from arrival to last token, per output token (Kwon et al., section 6.1).
    """
    ttft, tpot, gaps, normalised = [], [], [], []
    for output in outputs:
        arrival = output.metrics.arrival_s
        for times in filter(None, output.metrics.token_times_s):
            ttft.append(times[0] - arrival)
            normalised.append((times[-1] - arrival) / len(times))
            gaps += [after - before for before, after in pairwise(times)]
            if len(times) > 1:
                tpot.append((times[-1] - times[0]) / (len(times) - 1))
    return {
        "ttft_s": reporting.spread(ttft),
        "tpot_s": reporting.spread(tpot),
        "inter_token_s": reporting.spread(gaps),
        "normalised_latency_s": reporting.spread(normalised),
    }


def ttft_by_priority(run: ServedRun) -> dict[int, dict[str, float | None]]:
    """Seconds from arrival to first token, for each priority that a request has.

    As in `latencies`, requests that were not served to their end do not count.
    """
    times: dict[int, list[float]] = {served.priority: [] for served in run.served}
    for served in run.served:
        metrics = served.output and served.output.metrics
        if metrics and metrics.first_token_s is not None and outcome(served) is None:
            times[served.priority].append(metrics.first_token_s - metrics.arrival_s)
    return {priority: reporting.spread(times[priority]) for priority in sorted(times)}


def batch_size(step: IterationStats) -> int:
    """Sequences that an iteration computed, decoding or prefilling."""
    return step.num_decodes + step.num_prefill_seqs


def mean_batch_sizes(steps: list[IterationStats]) -> dict[str, float | None]:
    """The mean over iterations, and the mean over time, where a long iteration weighs more."""
    sizes = list(map(batch_size, steps))
    return {
        "mean_batch_size": float(np.mean(sizes)) if steps else None,
        "mean_batch_size_over_time": _over_time(steps, sizes) if steps else None,
    }


def kv_usage(steps: list[IterationStats]) -> dict[str, float] | None:
    """The pool's slots by what held them: shares, averaged over the time of the iterations."""
    shares = [step.usage.shares() for step in steps]
    names = shares[0] if shares else ()
    return {name: _over_time(steps, [each[name] for each in shares]) for name in names} or None


def _over_time(steps: list[IterationStats], values: Sequence[float]) -> float:
    return float(np.average(values, weights=[step.wall_s for step in steps]))


def request_rows(run: ServedRun) -> Iterator[dict[str, Any]]:
    """A row a request, by arrival. Times in seconds from the start of the run."""
    for served in run.served:
        request, output = served.request, served.output
        row: dict[str, Any] = {
            "request_id": served.request_id,
            "arrival_s": request.arrival_s,
            "num_prompt_tokens": request.num_prompt_tokens,
            "max_tokens": request.max_tokens,
            "priority": served.priority,
            "refusal": served.refusal,
            "prompt": request.prompt,
        }
        if output is not None:
            metrics, first = output.metrics, output.outputs[0]
            row |= {
                "num_output_tokens": sum(len(out.token_ids) for out in output.outputs),
                "num_cached_tokens": output.num_cached_tokens,
                "num_preemptions": metrics.num_preemptions,
                "error": output.error,
                **{name: _since(run.start_s, getattr(metrics, name)) for name in TIMES},
                **_completion(first),
            }
            if others := output.outputs[1:]:
                row["others"] = [_completion(out) for out in others]
        yield row


def _completion(out: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": out.finish_reason, "text": out.text, "token_ids": out.token_ids}
