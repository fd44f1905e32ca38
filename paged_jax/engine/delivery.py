"""The way of a sampled token from the core to its caller, and of a caller's abort to the core."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tqdm import tqdm

from paged_jax.engine.core import EngineCore
from paged_jax.engine.records import RequestRecord, SequenceRecord
from paged_jax.engine.turn import Turn, in_turn
from paged_jax.executor.interface import StepResult
from paged_jax.loading.tokenizer import Tokenizer
from paged_jax.observability.observer import Iteration
from paged_jax.outputs import RequestOutput, error_text
from paged_jax.scheduling.request import Request, Sequence


class Delivery:
    """Turns the core, keeps the records of unfinished requests, and outputs until they are taken.

    Each output goes to one place: the request's callback, the mailbox that `generate` or `stream`
    has opened for it, or else the outbox, for `Engine.step`. An error in making or taking a
    request's outputs ends that request alone.
    """

    def __init__(self, core: EngineCore, tokenizer: Tokenizer):
        self._core = core
        self._tokenizer = tokenizer
        self._records: dict[str, RequestRecord] = {}
        self._sequence_records: dict[int, SequenceRecord] = {}
        self._mailboxes: dict[str, deque[RequestOutput]] = {}
        self._outbox: deque[RequestOutput] = deque()
        self._calls: deque[tuple[RequestRecord, RequestOutput]] = deque()  # for its on_output
        self._abandoned: deque[str] = deque()
        self.turn = Turn(self._is_free)

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is unfinished, or its outputs still have a mailbox."""
        return request_id in self._records or request_id in self._mailboxes

    @property
    def request_ids(self) -> list[str]:
        """Ids of the unfinished requests."""
        return list(self._records)

    @property
    def has_outputs(self) -> bool:
        """Whether a callback or the outbox has an output to hand over."""
        return bool(self._outbox or self._calls)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of any request."""
        return not (self._records or self._sequence_records or self._mailboxes or self.has_outputs)

    def _is_free(self) -> bool:
        """Whether another thread may have the engine."""
        self._drop_abandoned()
        return self.is_idle

    def check_is_new(self, request_id: str) -> None:
        """ValueError if a new request's outputs would get among those of an earlier one."""
        if request_id in self:
            state = (
                "is running already" if request_id in self._records else "has outputs to be read"
            )
            raise ValueError(f"request {request_id!r} {state}; give each request an id of its own")

    def add(self, record: RequestRecord) -> None:
        """Keep the record of a request that the scheduler has taken."""
        self._records[record.request.request_id] = record
        self._sequence_records |= {each.seq.seq_id: each for each in record.sequences}

    def open_mailbox(self, request_ids: Iterable[str]) -> deque[RequestOutput]:
        """The place of these requests' outputs until `close_mailbox`."""
        mailbox: deque[RequestOutput] = deque()
        self._mailboxes |= dict.fromkeys(request_ids, mailbox)
        return mailbox

    def close_mailbox(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self._mailboxes[request_id]

    def take_outbox(self) -> list[RequestOutput]:
        """The outputs that no callback and no mailbox has got."""
        outputs = list(self._outbox)
        self._outbox.clear()
        return outputs

    # The way of a token: `advance` runs an iteration, in which the core has `_read` read the
    # sampled tokens; then `_file` makes outputs of them, and puts each where its caller finds it.

    def advance(self) -> None:
        """One iteration; its outputs go to their callers."""
        self._drop_abandoned()
        self._file(seq.request for seq in self._core.expire())
        if self._core.scheduler.has_work:
            try:
                iteration = self._core.step(self._read)
            except BaseException:  # an interrupted iteration may have ended requests
                self._file(
                    [each.request for each in self._records.values() if each.request.is_finished]
                )
                raise
            self._note_times(iteration)
            self._file([*(seq.request for seq in iteration.sampled), *iteration.failed])
            self._core.report(iteration)
        self._call_back()

    def _read(
        self, sampled: list[Sequence], result: StepResult, time_s: float
    ) -> Iterator[tuple[int, str]]:
        """Append tokens to the texts; yields (sequence id, stop string) where one is complete."""
        for seq, token, logprobs in zip(sampled, result.tokens, result.logprobs, strict=True):
            record = self._sequence_records.get(seq.seq_id)
            if record is None or seq.is_finished:  # a beam, or its request has just failed
                continue
            try:
                stop = record.append(token, time_s, logprobs)
            except Exception as error:
                self._records[seq.request.request_id].note_error(error, record)
                continue
            if stop is not None:
                yield seq.seq_id, stop

    def _note_times(self, iteration: Iteration) -> None:
        """Note when requests were first scheduled, and when beam searches made a step."""
        for chunk in iteration.batch.prefills:
            record = self._records.get(chunk.seq.request.request_id)
            if record is not None and record.first_scheduled_s is None:
                record.first_scheduled_s = iteration.start_s
        for seq in iteration.sampled:
            if seq.is_beam:
                self._records[seq.request.request_id].note_search(iteration.end_s)

    def _file(self, requests: Iterable[Request]) -> None:
        """File an output of each request that has ended, or streams."""
        for request_id in dict.fromkeys(request.request_id for request in requests):
            record = self._records.get(request_id)
            if record is None:
                continue
            if record.error is not None:
                self._core.scheduler.fail(request_id, record.error)
            if record.request.is_finished:
                self._post(record, self._close(record))
            elif record.streams:
                self._post(record, record.output())

    def _close(self, record: RequestRecord) -> RequestOutput:
        """Complete a request that has ended, and forget it."""
        request_id = record.request.request_id
        del self._records[request_id]
        for sequence in record.sequences:
            del self._sequence_records[sequence.seq.seq_id]
        output = record.finish(self._tokenizer)
        self._core.note_ended(output)
        return output

    def _post(self, record: RequestRecord, output: RequestOutput) -> None:
        if record.on_output is not None:
            self._calls.append((record, output))
        else:
            self._mailboxes.get(output.request_id, self._outbox).append(output)

    def _call_back(self) -> None:
        """Hand outputs to callbacks, in the order in which they were made.

        The iteration is complete: a callback may do whatever a caller of the engine may do, and a
        callback that advances the engine gets its outputs in the same order.
        """
        while self._calls:
            record, output = self._calls.popleft()
            assert record.on_output is not None
            try:
                record.on_output(output)
            except Exception as error:
                self._take_from_callback(record, output, f"its on_output: {error_text(error)}")

    def _take_from_callback(self, record: RequestRecord, last: RequestOutput, reason: str) -> None:
        """End the request of a callback that has raised; its last output goes to the outbox."""
        request = record.request
        is_unfinished = self._records.get(request.request_id) is record
        if is_unfinished:
            self._core.scheduler.fail(request.request_id, reason)
            last = self._close(record)
        for other, output in self._calls:
            if other is record and not is_unfinished:
                last = output
        self._calls = deque(call for call in self._calls if call[0] is not record)
        if last.finished:  # otherwise the callback has aborted it, and got its last output
            self._outbox.append(replace(last, error=last.error or reason))

    # The way of an abort

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; returns its last output, None if it is not unfinished."""
        record = self._records.get(request_id)
        if record is None:
            return None
        self._core.scheduler.abort(request_id)
        output = self._close(record)
        # This output replaces a stream's outputs that are not taken yet. Another request of the
        # same name may have ended before; its output stays.
        self._outbox = deque(
            out for out in self._outbox if out.request_id != request_id or out.finished
        )
        self._calls = deque(call for call in self._calls if call[0] is not record)
        if request_id in self._mailboxes:
            self._mailboxes[request_id].append(output)
        return output

    def abandon(self, request_id: str) -> None:
        """Abort a request before the next iteration: this may be the middle of one."""
        self._abandoned.append(request_id)

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self.abort(request_id)
            self.close_mailbox([request_id])


class OutputStream(Iterator[RequestOutput]):
    """Yields a request's outputs, the last of which is finished.

    The request goes on while nobody reads. It is aborted when its stream is closed or lost before
    its end. The thread that has the engine reads and closes it; any thread may lose it.
    """

    def __init__(self, request_id: str, delivery: Delivery):
        self._request_id = request_id
        self._delivery = delivery
        self._mailbox = delivery.open_mailbox([request_id])
        self._is_open = True
        self._turn = delivery.turn

    @in_turn
    def __next__(self) -> RequestOutput:
        if not self._is_open:
            raise StopIteration
        try:
            while not self._mailbox:
                self._delivery.advance()
        except BaseException:
            self.close()
            raise
        output = self._mailbox.popleft()
        if output.finished:
            self._is_open = False
            self._delivery.close_mailbox([self._request_id])
        return output

    @in_turn
    def close(self) -> None:
        """Abort the request, if it has not ended; nothing more is yielded."""
        if self._is_open:
            self._is_open = False
            self._delivery.abort(self._request_id)
            self._delivery.close_mailbox([self._request_id])

    def __del__(self) -> None:
        if self._is_open:
            self._delivery.abandon(self._request_id)


def complete(request_ids: list[str], delivery: Delivery, *, progress: bool) -> list[RequestOutput]:
    """Advance the engine until all these requests have ended; their last outputs, in this order."""
    mailbox = delivery.open_mailbox(request_ids)
    done: dict[str, RequestOutput] = {}
    num_tokens, start = 0, time.perf_counter()
    try:
        with tqdm(total=len(request_ids), unit="request", disable=not progress) as bar:
            while len(done) < len(request_ids):
                delivery.advance()
                while mailbox:
                    output = mailbox.popleft()
                    done[output.request_id] = output
                    num_tokens += sum(len(out.token_ids) for out in output.outputs)
                    rate = num_tokens / (time.perf_counter() - start)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s")
                    bar.update()
    finally:
        delivery.close_mailbox(request_ids)
    return [done[request_id] for request_id in request_ids]
