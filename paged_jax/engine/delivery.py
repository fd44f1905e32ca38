"""From an iteration's tokens to outputs, and from there to those who wait for them."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from tqdm import tqdm

from paged_jax.engine.core import EngineCore
from paged_jax.engine.records import RequestRecord, SequenceRecord
from paged_jax.loading.tokenizer import Tokenizer
from paged_jax.observability.observer import Iteration
from paged_jax.outputs import RequestOutput, error_text
from paged_jax.scheduling.request import Request


class Delivery:
    """Keeps the records of the requests in work, and outputs until they are taken.

    Each output goes to one place: the request's callback, the mailbox that `generate` or `stream`
    has opened for it, or else the outbox, for `Engine.step`. What raises while it makes or takes a
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

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is in work, or its outputs still have a mailbox."""
        return request_id in self._records or request_id in self._mailboxes

    @property
    def request_ids(self) -> list[str]:
        """Of those in work."""
        return list(self._records)

    @property
    def has_outputs(self) -> bool:
        """Whether `call_back` or `take_outbox` has something to hand over."""
        return bool(self._outbox or self._calls)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of any request."""
        return not (self._records or self._sequence_records or self._mailboxes or self.has_outputs)

    def check_is_new(self, request_id: str) -> None:
        """ValueError if outputs of a new request would get among those of one before it."""
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
        """Where these requests' outputs go until `close_mailbox`."""
        mailbox: deque[RequestOutput] = deque()
        self._mailboxes |= dict.fromkeys(request_ids, mailbox)
        return mailbox

    def close_mailbox(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self._mailboxes[request_id]

    def take_outbox(self) -> list[RequestOutput]:
        """What nobody else waits for."""
        outputs = list(self._outbox)
        self._outbox.clear()
        return outputs

    def take(self, iteration: Iteration) -> None:
        """Note an iteration's tokens and times, and file the outputs that it made or ended."""
        self._note_starts(iteration)
        try:
            self._take_tokens(iteration)
        finally:  # an interrupt may cost text, but no request its end
            sampled = [seq.request for seq in iteration.sampled]
            self.file([*sampled, *iteration.failed])

    def file(self, requests: Iterable[Request]) -> None:
        """File an output of each that has ended, or streams."""
        for request_id in dict.fromkeys(request.request_id for request in requests):
            record = self._records.get(request_id)
            if record is None:
                continue
            if record.request.is_finished:
                self._post(record, self._close(record))
            elif record.streams:
                self._post(record, record.output())

    def _note_starts(self, iteration: Iteration) -> None:
        for chunk in iteration.batch.prefills:
            record = self._records.get(chunk.seq.request.request_id)
            if record is not None and record.first_scheduled_s is None:
                record.first_scheduled_s = iteration.start_s

    def _take_tokens(self, iteration: Iteration) -> None:
        """Note tokens and times, and end what a stop string ends."""
        records, now = self._sequence_records, iteration.end_s
        result = iteration.result
        failed = {request.request_id for request in iteration.failed}
        for seq, token, logprobs in zip(
            iteration.sampled, result.tokens, result.logprobs, strict=True
        ):
            if seq.request.request_id in failed:  # its token has been thrown away
                continue
            record = records.get(seq.seq_id)
            if record is None:
                self._records[seq.request.request_id].note_search(now)
                continue
            try:
                stop = record.append(token, now, logprobs)
            except Exception as error:
                request_id = seq.request.request_id
                reason = self._records[request_id].note_error(error)
                self._core.scheduler.fail(request_id, reason)
                # Its last token may have ended it just now.
                seq.finish_reason, seq.stop_reason = "error", None
                continue
            if stop is not None:
                self._core.scheduler.finish(seq, "stop", stop)
                # It may have reached its last token with this one: the stop string came first.
                seq.finish_reason, seq.stop_reason = "stop", stop

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

    def call_back(self) -> None:
        """Hand outputs to callbacks, in the order in which they were made.

        The iteration is complete: callbacks may do whatever a caller of the engine may do, and one
        that turns the engine gets its outputs in the same order.
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
        in_work = self._records.get(request.request_id) is record
        if in_work:
            self._core.scheduler.fail(request.request_id, reason)
            last = self._close(record)
        for other, output in self._calls:
            if other is record and not in_work:
                last = output
        self._calls = deque(call for call in self._calls if call[0] is not record)
        if last.finished:  # otherwise the callback has aborted it, and got what there is
            self._outbox.append(replace(last, error=last.error or reason))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; returns what it has, None if it is not in work."""
        record = self._records.get(request_id)
        if record is None:
            return None
        self._core.scheduler.abort(request_id)
        output = self._close(record)
        # What nobody has taken yet of a streaming request is in this output too. Another of the
        # same name may have ended before.
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

    def drop_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self.abort(request_id)
            self.close_mailbox([request_id])


class OutputStream(Iterator[RequestOutput]):
    """Yields a request's outputs, the last of which is finished; `advance` makes more of them.

    The request goes on while nobody reads. It is aborted when its stream is closed or lost before
    its end.
    """

    def __init__(self, request_id: str, delivery: Delivery, advance: Callable[[], None]):
        self._request_id = request_id
        self._delivery = delivery
        self._advance = advance
        self._mailbox = delivery.open_mailbox([request_id])
        self._is_open = True

    def __next__(self) -> RequestOutput:
        if not self._is_open:
            raise StopIteration
        try:
            while not self._mailbox:
                self._advance()
        except BaseException:
            self.close()
            raise
        output = self._mailbox.popleft()
        if output.finished:
            self._is_open = False
            self._delivery.close_mailbox([self._request_id])
        return output

    def close(self) -> None:
        """Abort the request, if it has not ended; nothing more is yielded."""
        if self._is_open:
            self._is_open = False
            self._delivery.abort(self._request_id)
            self._delivery.close_mailbox([self._request_id])

    def __del__(self) -> None:
        if self._is_open:
            self._delivery.abandon(self._request_id)


def complete(
    request_ids: Sequence[str],
    delivery: Delivery,
    advance: Callable[[], None],
    *,
    progress: bool,
) -> list[RequestOutput]:
    """Call `advance` until all of these have ended; their last outputs, in this order."""
    mailbox = delivery.open_mailbox(request_ids)
    done: dict[str, RequestOutput] = {}
    num_tokens, start = 0, time.perf_counter()
    try:
        with tqdm(total=len(request_ids), unit="request", disable=not progress) as bar:
            while len(done) < len(request_ids):
                advance()
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
