"""What callers want of each request while it runs: text, times, log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paged_jax.loading import IncrementalDetokenizer
from paged_jax.loading.tokenizer import Tokenizer
from paged_jax.outputs import (
    CUT_SHORT,
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    error_text,
)
from paged_jax.scheduling.request import Request, Sequence

OnOutput = Callable[[RequestOutput], None]


@dataclass(slots=True)
class SequenceRecord:
    """A sequence's output so far.

    Text is decoded token by token only where a stop string or a stream needs it at once.
    """

    seq: Sequence
    detokenizer: IncrementalDetokenizer | None
    text: str = ""
    token_times_s: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stopped: bool = False  # by a stop string: the text is complete
    failed: bool = False  # its text could not be decoded

    def append(self, token: int, time_s: float, logprobs: TokenLogprobs | None) -> str | None:
        """Take in the sequence's next token, before the scheduler does.

        Returns the stop string that the token completes, if any.
        """
        self.token_times_s.append(time_s)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.detokenizer is None or self._hides(self.seq.end_with(token)):
            return None
        start = len(self.text)
        self.text += self.detokenizer.append([token])
        return self._cut_at_stop(start)

    def _hides(self, end: tuple[FinishReason | None, int | str | None] | None) -> bool:
        """Whether a sequence that ends like this ends with a stop token outside its text."""
        if end is None or self.seq.request.params.include_stop_str_in_output:
            return False
        reason, stop_reason = end
        return reason == "stop" and isinstance(stop_reason, int)

    def _cut_at_stop(self, start: int) -> str | None:
        """Look for a stop string that ends after `start` and cut the text there."""
        params = self.seq.request.params
        if len(self.token_times_s) < params.min_tokens:
            return None
        found = []
        for stop in params.stop_strings:
            at = self.text.find(stop, max(0, start - len(stop) + 1))
            if at >= 0:
                found.append((at, stop))
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[: at + len(stop) if params.include_stop_str_in_output else at]
        self.stopped = True
        return stop

    @property
    def shown_text(self) -> str:
        """The text, without an end that may turn out to begin a stop string."""
        params = self.seq.request.params
        if self.seq.is_finished or params.include_stop_str_in_output:
            return self.text
        beginnings = (stop[:n] for stop in params.stop_strings for n in range(1, len(stop)))
        num_held = max((len(b) for b in beginnings if self.text.endswith(b)), default=0)
        return self.text[: len(self.text) - num_held]

    def finish(self, tokenizer: Tokenizer) -> None:
        """Complete the text of a sequence that has ended, unless a stop string has cut it."""
        if self.stopped:
            return
        if self.detokenizer is not None:
            self.text += self.detokenizer.flush()
            return
        token_ids = self.seq.output_token_ids
        hides_last = self._hides((self.seq.finish_reason, self.seq.stop_reason))
        self.text = _decode(tokenizer, self.seq.request, token_ids, hides_last)

    def output(self) -> CompletionOutput:
        """A snapshot."""
        seq, params = self.seq, self.seq.request.params
        return CompletionOutput(
            index=seq.index,
            text=self.shown_text,
            token_ids=seq.output_token_ids,
            finish_reason="error" if self.failed else seq.finish_reason,
            stop_reason=None if self.failed else seq.stop_reason,
            logprobs=None if params.logprobs is None else list(self.logprobs),
            cumulative_logprob=seq.cumulative_logprob if params.wants_candidates else None,
        )


@dataclass(slots=True)
class RequestRecord:
    """A request's sequence records, and how its caller wants its outputs."""

    request: Request
    prompt: str | None
    streams: bool  # there is an output after every token
    sequences: list[SequenceRecord]  # empty for a beam search, whose beams replace each other
    on_output: OnOutput | None = None
    first_scheduled_s: float | None = None
    beam_times_s: list[float] = field(default_factory=list)  # when each step of the search was made
    error: str | None = None  # why its text could not be decoded

    @classmethod
    def of(
        cls,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer,
        *,
        streams: bool,
        on_output: OnOutput | None,
    ) -> "RequestRecord":
        """The record of a request that has just been made."""
        params = request.params
        sequences = [] if params.beam_width else request.sequences
        decodes_early = streams or params.stop_strings

        def detokenizer() -> IncrementalDetokenizer | None:
            if not decodes_early:
                return None
            return IncrementalDetokenizer(tokenizer, params.skip_special_tokens)

        records = [SequenceRecord(seq, detokenizer()) for seq in sequences]
        return cls(request, prompt, streams, records, on_output)

    def note_search(self, time_s: float) -> None:
        """Note the time if the request's beam search has made a step."""
        search = self.request.beam_search
        if search is not None and search.num_tokens > len(self.beam_times_s):
            self.beam_times_s.append(time_s)

    def note_error(self, error: Exception, record: SequenceRecord | None = None) -> None:
        """Note why there is no text, of one sequence or of all; the first reason stands."""
        self.error = self.error or f"its text could not be decoded: {error_text(error)}"
        if record is not None:
            record.failed = True

    def finish(self, tokenizer: Tokenizer) -> RequestOutput:
        """The last output, with all texts complete; a tokenizer that raises fails the request."""
        for record in self.sequences:
            try:
                record.finish(tokenizer)
            except Exception as error:
                self.note_error(error, record)
        if self.request.beam_search is None:
            return self.output()
        try:
            outputs = beam_outputs(self.request, tokenizer)
        except Exception as error:
            self.note_error(error)
            outputs = [
                replace(out, finish_reason="error", stop_reason=None)
                for out in beam_outputs(self.request, None)
            ]
        return self._output(outputs, [self.beam_times_s])

    def output(self) -> RequestOutput:
        """A snapshot."""
        params = self.request.params
        outputs = [record.output() for record in self.sequences]
        if len(outputs) > params.n:
            # Of a request that was cut short, sequences that never ran are no better than others.
            outputs.sort(key=lambda out: (not out.token_ids, -(out.cumulative_logprob or 0.0)))
            outputs = [replace(out, index=i) for i, out in enumerate(outputs[: params.n])]
        return self._output(outputs, [record.token_times_s for record in self.sequences])

    def _output(self, outputs: list[CompletionOutput], times_s: list[list[float]]) -> RequestOutput:
        asked = self.request.params.prompt_logprobs
        error = self.request.error or self.error
        metrics = RequestMetrics(
            arrival_s=self.request.arrival_time,
            first_scheduled_s=self.first_scheduled_s,
            token_times_s=[list(times) for times in times_s],
            num_preemptions=self.request.num_preemptions,
        )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=outputs,
            finished=self.request.is_finished,
            metrics=metrics,
            num_cached_tokens=self.request.num_cached_tokens or 0,
            prompt_logprobs=None if asked is None else [None, *self.request.prompt_logprobs],
            error=error,
            finish_reason=self._finish_reason(outputs, error),
        )

    def _finish_reason(
        self, outputs: list[CompletionOutput], error: str | None
    ) -> FinishReason | None:
        """The request's reason. All sequences of `best_of` count, also those not returned."""
        if not self.request.is_finished:
            return None
        if error is not None:
            return "error"
        reasons = (seq.finish_reason for seq in self.request.sequences)
        return next((each for each in reasons if each in CUT_SHORT), outputs[0].finish_reason)


def beam_outputs(request: Request, tokenizer: Tokenizer | None) -> list[CompletionOutput]:
    """The n best hypotheses of a search that is done, or the n best beams of one cut short.

    An abort or an error has ended those beams. Without a tokenizer the outputs have no text.
    """
    search, params = request.beam_search, request.params
    assert search is not None
    found: list[tuple[list[int], FinishReason | None, float | None, float | None]]
    if search.is_done:
        best = search.hypotheses
        found = [(h.token_ids, h.finish_reason, h.cumulative_logprob, h.score) for h in best]
    else:
        found = [(s.output_token_ids, s.finish_reason, None, None) for s in request.sequences]
    outputs = []
    for index, (token_ids, reason, cumulative_logprob, score) in enumerate(found[: params.n]):
        ends_with_stop_token = reason == "stop" and token_ids[-1] not in request.eos_token_ids
        hides_last = ends_with_stop_token and not params.include_stop_str_in_output
        outputs.append(
            CompletionOutput(
                index=index,
                text=_decode(tokenizer, request, token_ids, hides_last) if tokenizer else "",
                token_ids=token_ids,
                finish_reason=reason,
                stop_reason=token_ids[-1] if ends_with_stop_token else None,
                logprobs=None,
                cumulative_logprob=cumulative_logprob,
                score=score,
            )
        )
    return outputs


def _decode(tokenizer: Tokenizer, request: Request, token_ids: list[int], hides_last: bool) -> str:
    """The text of generated tokens, without the last token if that is hidden."""
    return str(
        tokenizer.decode(
            token_ids[:-1] if hides_last else token_ids,
            skip_special_tokens=request.params.skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
    )
