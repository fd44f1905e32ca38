"""The timeline of an engine: its iterations, what they did, and the phases of each request.

    with watch(engine.core, ChromeTrace("trace.json", engine.core)):
        ...
    # then open trace.json in https://ui.perfetto.dev

Tracks of the engine: iterations, with the host's part before and the device's part in them;
prefill, decode and swaps, each drawn over the device's part of the iterations that have any, as
the steps of an iteration run without the host in between; preemptions. Counters: sequences, blocks.
Tracks of the requests: each request is drawn from its arrival to its end, and in it, without a gap,
its phases: waiting, prefill, running, swapped.

The file is in Chrome's trace event format: an array of events, each on its own line, written as
they come. Viewers also open a file without the closing bracket, as a crash leaves it. Times are
whole microseconds.
"""

import json
from bisect import insort
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_jax.observability.observer import Iteration, Observed, Observer, open_output
from paged_jax.observability.phases import Phase, RequestPhases
from paged_jax.outputs import RequestOutput
from paged_jax.scheduling.request import Request, SequenceStatus

ENGINE, REQUESTS = 1, 2  # pid
ITERATIONS, PREFILL, DECODE, SWAPS, PREEMPTIONS = 11, 12, 13, 14, 15  # tid
FIRST_LANE = 100  # tid of the requests' first track

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
Args = Mapping[str, Any]


class ChromeTrace(Observer):
    """Writes the timeline while the engine runs. Times count from when the observer was made.

    path: the timeline's file; ValueError if it cannot be written.
    """

    def __init__(self, path: str | Path, core: Observed):
        self._scheduler = core.scheduler
        self._clock, self._origin_s = core.clock, core.clock()
        self._file = TraceFile(path)
        self._phases = RequestPhases(self._on_phase)
        self._lanes = Lanes()
        self._lane: dict[str, int] = {}  # by id of the unfinished requests
        self._num_iterations = 0
        self._drawn_to = 0  # end of the last iteration
        for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
            self._file.process(pid, name)
        names = ("iterations", "prefill", "decode", "swaps", "preemptions")
        for tid, name in enumerate(names, start=ITERATIONS):
            self._file.track(ENGINE, tid, name)

    def _time(self, time_s: float) -> int:
        """Microseconds since the timeline's start."""
        return max(0, round(1e6 * (time_s - self._origin_s)))

    def on_request_added(self, request: Request) -> None:
        time, num_lanes = self._time(request.arrival_time), self._lanes.num_lanes
        lane = self._lane[request.request_id] = self._lanes.take(time)
        if lane == num_lanes:
            self._file.track(REQUESTS, FIRST_LANE + lane, f"requests, lane {lane}")
        facts = {
            "prompt_tokens": len(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "sequences": request.params.beam_width or request.params.num_sequences,
            "priority": request.priority,
        }
        self._file.begin(REQUESTS, FIRST_LANE + lane, request.request_id, time, facts)
        self._phases.add(request)

    def _on_phase(
        self, request: Request, before: Phase | None, phase: Phase, since_s: float
    ) -> None:
        tid, time = FIRST_LANE + self._lane[request.request_id], self._time(since_s)
        if before is not None:
            self._file.end(REQUESTS, tid, time, {})
        self._file.begin(REQUESTS, tid, phase, time, {})

    def on_request_ended(self, output: RequestOutput, time_s: float) -> None:
        self._end(
            output.request_id,
            time_s,
            {
                "finish_reason": output.finish_reason,
                "output_tokens": sum(len(out.token_ids) for out in output.outputs),
                "cached_tokens": output.num_cached_tokens,
                "preemptions": output.metrics.num_preemptions,
                **({} if output.error is None else {"error": output.error}),
            },
        )

    def _end(self, request_id: str, time_s: float, facts: dict[str, object]) -> None:
        _, end_s = self._phases.end(request_id, time_s)
        lane, time = self._lane.pop(request_id), self._time(end_s)
        self._file.end(REQUESTS, FIRST_LANE + lane, time, {})
        self._file.end(REQUESTS, FIRST_LANE + lane, time, facts)
        self._lanes.give_back(lane, time)

    def on_request_refused(self, error: ValueError) -> None:
        now = self._time(self._clock())
        self._file.instant(ENGINE, ITERATIONS, "refused", now, {"reason": str(error)})

    def on_step(self, iteration: Iteration) -> None:
        start = max(self._time(iteration.start_s), self._drawn_to)
        end = max(self._time(iteration.end_s), start)
        device = max(self._time(iteration.end_s - iteration.result.device_s), start)
        self._draw_preemptions(iteration, start)
        self._draw_steps(iteration, start, device, end)
        self._phases.follow(iteration)
        self._draw_counters(end)
        self._drawn_to = end
        self._num_iterations += 1

    def on_recovery(self, time_s: float) -> None:
        now = max(self._time(time_s), self._drawn_to)
        self._file.instant(ENGINE, ITERATIONS, "a step has failed", now, {})
        self._phases.recover(time_s)

    def _draw_preemptions(self, iteration: Iteration, start: int) -> None:
        for request in {seq.request: None for seq in iteration.batch.preempted}:
            swapped = any(seq.status is SequenceStatus.SWAPPED for seq in request.sequences)
            facts = {"request": request.request_id, "mode": "swap" if swapped else "recompute"}
            self._file.instant(ENGINE, PREEMPTIONS, "preemption", start, facts)

    def _draw_steps(self, iteration: Iteration, start: int, device: int, end: int) -> None:
        batch, name = iteration.batch, f"iteration {self._num_iterations}"
        facts = {"tokens": batch.num_tokens, "copies": len(batch.copies)}
        self._file.span(ENGINE, ITERATIONS, name, start, end, facts)
        self._file.span(ENGINE, ITERATIONS, "host: schedule, arrays", start, device, {})
        self._file.span(ENGINE, ITERATIONS, "device", device, end, {})
        if batch.swap_outs or batch.swap_ins:
            done = min(device + round(1e6 * iteration.result.swap_s), end)
            facts = {"blocks_out": len(batch.swap_outs), "blocks_in": len(batch.swap_ins)}
            self._file.span(ENGINE, SWAPS, "swap", device, done, facts)
        if batch.prefills:
            facts = {"sequences": len(batch.prefills), "tokens": batch.num_prefill_tokens}
            self._file.span(ENGINE, PREFILL, "prefill", device, end, facts)
        if batch.decodes:
            self._file.span(
                ENGINE, DECODE, "decode", device, end, {"sequences": len(batch.decodes)}
            )

    def _draw_counters(self, time: int) -> None:
        memory = self._scheduler.memory
        free, cached = memory.num_free_blocks, memory.num_cached_blocks
        blocks = {"used": memory.num_total_blocks - free, "cached": cached, "free": free - cached}
        self._file.counter(ENGINE, "KV blocks", time, blocks)
        if memory.num_swap_blocks:
            used = memory.num_swap_blocks - memory.num_free_swap_blocks
            self._file.counter(ENGINE, "host blocks", time, {"used": used})
        self._file.counter(ENGINE, "requests", time, self._phases.num_requests)

    def close(self) -> None:
        """Complete the file; unfinished requests are drawn up to now."""
        now = self._clock()
        for request in self._phases.requests:
            self._end(request.request_id, now, {"finish_reason": None})
        self._file.close()


class Lanes:
    """Numbers lanes from 0; a request takes the lowest lane that is free since its arrival."""

    def __init__(self) -> None:
        self.num_lanes = 0
        self._free: list[tuple[int, int]] = []  # (lane, time from which it is free), by lane

    def take(self, time: int) -> int:
        """A lane on which nothing has been drawn after `time`."""
        for index, (lane, free_from) in enumerate(self._free):
            if free_from <= time:
                del self._free[index]
                return lane
        self.num_lanes += 1
        return self.num_lanes - 1

    def give_back(self, lane: int, time: int) -> None:
        """The lane is free from `time` on."""
        insort(self._free, (lane, time))


class TraceFile:
    """Events on tracks, which are threads (`tid`) of processes (`pid`) in the format's words.

    Numbers are positive, as 0 is an idle processor to Perfetto. Spans of one track must nest.
    ValueError for a path that cannot be written.
    """

    def __init__(self, path: str | Path):
        self._file = open_output(path)
        self._separator = "[\n"

    def process(self, pid: int, name: str) -> None:
        """Name a group of tracks; groups are sorted by number."""
        for event, args in (("process_name", {"name": name}), ("process_sort_index", _sort(pid))):
            self._write({"ph": "M", "pid": pid, "tid": pid, "ts": 0, "name": event, "args": args})

    def track(self, pid: int, tid: int, name: str) -> None:
        """Name a track; tracks are sorted by number."""
        for event, args in (("thread_name", {"name": name}), ("thread_sort_index", _sort(tid))):
            self._write({"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": event, "args": args})

    def span(self, pid: int, tid: int, name: str, start: int, end: int, args: Args) -> None:
        """Something that took from `start` to `end`."""
        if end < start:
            raise ValueError(f"the span {name!r} ends at {end} us, before its start at {start} us")
        event = {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": end - start, "name": name}
        self._write({**event, "args": args})

    def begin(self, pid: int, tid: int, name: str, time: int, args: Args) -> None:
        """Something that goes on until `end`."""
        self._write({"ph": "B", "pid": pid, "tid": tid, "ts": time, "name": name, "args": args})

    def end(self, pid: int, tid: int, time: int, args: Args) -> None:
        """The end of the last `begin` on the track that has none yet."""
        self._write({"ph": "E", "pid": pid, "tid": tid, "ts": time, "args": args})

    def instant(self, pid: int, tid: int, name: str, time: int, args: Args) -> None:
        event = {"ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": time, "name": name}
        self._write({**event, "args": args})

    def counter(self, pid: int, name: str, time: int, values: Mapping[str, int]) -> None:
        """Values from this time on, drawn as one stack or one line each."""
        event = {"ph": "C", "pid": pid, "tid": pid, "ts": time, "name": name}
        self._write({**event, "args": values})

    def close(self) -> None:
        """Complete the file; nothing happens if it is closed."""
        if not self._file.closed:
            self._file.write("[]\n" if self._separator == "[\n" else "\n]\n")
            self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(self._separator + _encode(event))
        self._separator = ",\n"


def _sort(index: int) -> dict[str, int]:
    return {"sort_index": index}
