"""The loop: schedule, execute, update. Knows neither text nor models."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from paged_jax.engine.pipelining import (
    InFlightBatch,
    Pipeline,
    carry_over,
    live_rows,
    recover,
    requests_of,
)
from paged_jax.executor.interface import Executor, StepResult
from paged_jax.memory.usage import MemoryUsage
from paged_jax.observability.observer import Iteration, IterationStats, Observer
from paged_jax.outputs import RequestOutput, error_text
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request, Sequence
from paged_jax.scheduling.scheduler import Scheduler

# Reads the tokens of the sequences, at a time in seconds; yields (sequence id, stop string) for
# each sequence whose text now holds a stop string.
ReadTokens = Callable[[list[Sequence], StepResult, float], Iterable[tuple[int, str]]]


class EngineCore:
    """Drives one scheduler and one executor.

    on_iteration: called with the statistics of every iteration.
    observers: see all that happens.
    is_pipelined: iterations are planned and dispatched before the tokens of the iteration before
        are there, wherever the plan does not depend on them; needs a `PipelinedExecutor`.
    survives_faults: a step that raises is planned again. Otherwise `step` raises the error, and the
        core is of no use after that.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_iteration: Callable[[IterationStats], None] | None = None,
        observers: Iterable[Observer] = (),
        is_pipelined: bool = False,
        survives_faults: bool = True,
    ):
        self.scheduler = scheduler
        self.clock = clock
        self.on_iteration = on_iteration
        self.observers = list(observers)
        self.num_iterations = 0
        self._survives_faults = survives_faults
        self._is_set_back = False  # whether the cache was lost, and no request got a token since
        self._pipeline = Pipeline(scheduler, executor, clock, is_pipelined=is_pipelined)

    @property
    def executor(self) -> Executor:
        """Another executor may take its place between two iterations."""
        return self._pipeline.executor

    @executor.setter
    def executor(self, executor: Executor) -> None:
        self._pipeline.executor = executor

    def add(self, request: Request) -> None:
        """Queue a request; ValueError as `Scheduler.add`."""
        self.scheduler.add(request)
        self._tell(lambda observer: observer.on_request_added(request))

    def expire(self) -> list[Sequence]:
        """End the requests whose deadline has passed; returns the sequences that this ends."""
        return self.scheduler.expire(self.clock())

    def step(self, read: ReadTokens | None = None) -> Iteration:
        """One iteration; call it while the scheduler has work, then `report` the iteration.

        read: is given the sampled tokens before the scheduler is, and decides which sequences a
            stop string ends.

        A step that raises is planned and run once more. If it raises again, the requests in it end
        with "error", and the next call goes on with the other requests. So they do if it loses the
        cache, and no request has got a token since one before it did. A request whose logits are
        not finite, or leave no token, ends alone. An interrupt, such as Ctrl-C, is raised, and no
        work is lost.
        """
        planned, usage, result = self._execute()
        end_s = self.clock()
        self._pipeline.note_end(end_s)
        batch = planned.batch
        failed: list[Request] = []
        if isinstance(result, Exception):
            failed += self._fail_step(batch, error_text(result))
            batch, result = ScheduledBatch([], [], batch.preempted), StepResult([], [], 0.0)
        else:
            self.scheduler.estimates.observe(batch, result)
        sampled, taken = live_rows(batch, result)
        if sampled:
            self._is_set_back = False
        failed += self._fail_rows(sampled, taken)
        stops: dict[int, str] = {}
        try:
            for seq_id, stop in read(sampled, taken, end_s) if read else ():
                stops[seq_id] = stop
        finally:  # an interrupt may cost text, but no request its end
            finished = self.scheduler.update(
                batch, result.tokens, result.logprobs, result.prompt_logprobs, stops
            )
            iteration = Iteration(
                batch=batch,
                sampled=sampled,
                result=taken,
                finished=finished,
                usage=usage,
                start_s=planned.start_s,
                end_s=end_s,
                failed=failed,
                is_ahead=planned.is_ahead,
            )
            self._tell(lambda observer: observer.on_step(iteration))
        return iteration

    def _execute(self) -> tuple[InFlightBatch, MemoryUsage | None, StepResult | Exception]:
        """Plan an iteration and run it; its result is the error if it has raised for good."""
        failed: ScheduledBatch | None = None
        while True:
            planned = self._pipeline.take()
            if failed is not None:
                carry_over(failed, planned.batch)
            usage = self.scheduler.memory_usage() if self._wants_stats else None
            try:
                return planned, usage, self._pipeline.run(planned)
            except BaseException as error:
                if not self._survives_faults:
                    raise
                self._pipeline.clear()
                is_lost = recover(self.scheduler, self.executor)
                self._tell(lambda observer: observer.on_recovery(self.clock()))
                if not isinstance(error, Exception):
                    raise
                # All computed anew, and the same fault before there is a token: it would never end.
                if failed is not None or (is_lost and self._is_set_back):
                    return planned, usage, error
                self._is_set_back |= is_lost
                failed = planned.batch
                _warn(f"a step has failed and is planned again: {error_text(error)}")

    def _fail_step(self, batch: ScheduledBatch, reason: str) -> list[Request]:
        """End the requests of a step that has failed for good; returns them."""
        failed = requests_of(batch)
        _warn(f"a step has failed twice, and ends {len(failed)} requests: {reason}")
        for request in failed:
            self.scheduler.fail(request.request_id, f"its step failed twice: {reason}")
        return failed

    def _fail_rows(self, sampled: list[Sequence], result: StepResult) -> list[Request]:
        """End the requests whose tokens mean nothing, before they get them; returns them."""
        failed = {}
        for index, reason in result.failed.items():
            request = sampled[index].request
            failed[request.request_id] = request
            self.scheduler.fail(request.request_id, reason)
        return list(failed.values())

    # What observers see

    @contextmanager
    def telling_refusal(self) -> Iterator[None]:
        """Tell the observers of a ValueError, which refuses a request."""
        try:
            yield
        except ValueError as error:
            refusal = error  # `error` is gone after this clause
            self._tell(lambda observer: observer.on_request_refused(refusal))
            raise

    def note_ended(self, output: RequestOutput) -> None:
        """Tell the observers that a request has ended."""
        now = self.clock()
        self._tell(lambda observer: observer.on_request_ended(output, now))

    def report(self, iteration: Iteration) -> None:
        """Give the observers an iteration's statistics, once its outputs are there."""
        index = self.num_iterations
        self.num_iterations += 1
        if iteration.usage is None:
            return
        batch, memory = iteration.batch, self.scheduler.memory
        # An iteration that was planned ahead has begun when the iteration before it ended.
        end_s = iteration.end_s if self._pipeline.has_next else self.clock()
        wall_s = end_s - iteration.start_s
        stats = IterationStats(
            index=index,
            start_s=iteration.start_s,
            wall_s=wall_s,
            # The executor looks at its clock a moment earlier, at either end.
            device_s=min(iteration.result.device_s, wall_s),
            num_decodes=len(batch.decodes),
            num_prefill_tokens=batch.num_prefill_tokens,
            num_prefill_seqs=len(batch.prefills),
            num_sampled=len(iteration.sampled),
            num_preempted=len(batch.preempted),
            # A beam that dies has no reason: its search goes on with other beams.
            num_finished=sum(seq.finish_reason is not None for seq in iteration.sampled),
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            usage=iteration.usage,
            num_resumed=len(batch.resumed),
            num_swapped=self.scheduler.num_swapped,
            num_swapped_out_blocks=len(batch.swap_outs),
            num_swapped_in_blocks=len(batch.swap_ins),
            swap_s=iteration.result.swap_s,
            num_free_blocks=memory.num_free_blocks,
            num_cached_blocks=memory.num_cached_blocks,
            num_used_swap_blocks=memory.num_swap_blocks - memory.num_free_swap_blocks,
            is_ahead=iteration.is_ahead,
        )
        if self.on_iteration is not None:
            try:
                self.on_iteration(stats)
            except Exception as error:
                _warn_of_observer(self.on_iteration, error)
                self.on_iteration = None

        def show(observer: Observer) -> None:
            if observer.wants_stats:
                observer.on_iteration(stats)

        self._tell(show)

    @property
    def _wants_stats(self) -> bool:
        return self.on_iteration is not None or any(each.wants_stats for each in self.observers)

    def _tell(self, call: Callable[[Observer], None]) -> None:
        """Call each observer; an observer that raises is let go."""
        for observer in tuple(self.observers):
            try:
                call(observer)
            except Exception as error:
                self.observers.remove(observer)
                _warn_of_observer(observer, error)


def _warn_of_observer(observer: object, error: Exception) -> None:
    _warn(f"{observer!r} has raised, and sees no more iterations: {error_text(error)}")


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
