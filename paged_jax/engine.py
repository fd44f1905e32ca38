"""The public API: an engine that serves requests over a paged KV cache.

    engine = Engine("smollm2")
    [output] = engine.generate("The capital of France is", SamplingParams(temperature=0))
    print(output.outputs[0].text)

Names follow vLLM's where the same thing exists there.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from paged_jax import pool_size
from paged_jax.attention_choice import choose_attention
from paged_jax.compilation import use_persistent_cache
from paged_jax.construction import build
from paged_jax.engine_core import EngineCore, Iteration, IterationStats
from paged_jax.limits import Limits, integer
from paged_jax.loading import LoadedModel, load_config, load_model
from paged_jax.loading.arrays import weight_dtype
from paged_jax.memory.stats import SharingStats
from paged_jax.models.split import nest
from paged_jax.outputs import RequestOutput
from paged_jax.prompts import Prompt, encode, is_chat, is_single_prompt
from paged_jax.request_checks import check_request
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sampling_params import SamplingParams
from paged_jax.tracking import RequestRecord, SequenceRecord
from paged_jax.warm_up import WarmUp


class Engine:
    """Serves a model: continuous batching over a paged KV cache on JAX's default device.

    model: "smollm2" (the packaged model), a Hugging Face directory or a .gguf file; or a
        `LoadedModel`.
    block_size: slots (tokens) per KV block.
    num_blocks: blocks of the pool; None: as many as are needed, or fit (`paged_jax.pool_size`).
    max_num_seqs: sequences that run at a time; None: 32 on a CPU, 256 on a GPU.
    max_num_batched_tokens: tokens per iteration; None: 256 on a CPU, 4096 on a GPU. Longer prompts
        are prefilled in chunks.
    max_model_len: longest sequence, prompt and output; None: what the model was made for.
    max_prefill_seqs: prompts prefilled in one step.
    watermark: fraction of the blocks that admission leaves free for running sequences to grow.
    enable_prefix_caching: requests use what others have computed of the same beginning, as long as
        its blocks are not needed (`SamplingParams.cache_salt` keeps requests apart). Sequences of
        one request share in any case.
    dtype: of weights and cache; "auto": float32 on a CPU, bfloat16 on a GPU.
    attention, prefill_attention: an implementation of `pallas_kernels.paged_attention` for either
        step, by name, or "auto"; kv_write: likewise, of `pallas_kernels.kv_write`.
    interpret_kernels: run Pallas kernels in Pallas' interpreter: no GPU needed, slow. Nothing is
        compiled in the background then: JAX does not keep such steps.
    seed: of requests that bring none.
    warm_up: compile every step in the background; one that is needed before has priority. `warm_up`
        waits until all are there, so that no request ever waits for one.
    on_iteration: called with the statistics of every iteration; it must not abort requests.

    ValueError, in one line, for anything that cannot work.
    """

    def __init__(
        self,
        model: str | LoadedModel = "smollm2",
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        max_prefill_seqs: int = 16,
        watermark: float = 0.01,
        enable_prefix_caching: bool = True,
        dtype: str = "auto",
        attention: str = "auto",
        prefill_attention: str = "auto",
        kv_write: str = "auto",
        interpret_kernels: bool = False,
        seed: int = 0,
        warm_up: bool = True,
        on_iteration: Callable[[IterationStats], None] | None = None,
    ):
        limits = Limits.of(
            jax.default_backend(),
            {
                "dtype": dtype,
                "block_size": block_size,
                "num_blocks": num_blocks,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "max_model_len": max_model_len,
                "max_prefill_seqs": max_prefill_seqs,
            },
        )
        self.dtype, self.block_size = limits.dtype, limits.block_size
        self.max_num_seqs = limits.max_num_seqs
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self._seeds = np.random.default_rng(integer("seed", seed, low=0))
        self._next_seed = int(self._seeds.integers(2**32))
        use_persistent_cache()

        self.config = model.config if isinstance(model, LoadedModel) else load_config(model)
        self.max_model_len = limits.model_len(self.config)
        choice = choose_attention(
            self.config,
            limits,
            self.max_model_len,
            decode=attention,
            prefill=prefill_attention,
            write=kv_write,
            interpret=interpret_kernels,
        )
        self.attention = choice.attention
        self.num_blocks = pool_size.num_blocks(
            self.config, limits, self.max_model_len, cache_head_size=choice.cache_head_size
        )
        scheduler, self.executor = build(
            self.config,
            limits,
            choice,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            watermark=watermark,
            enable_prefix_caching=enable_prefix_caching,
        )
        if warm_up and not interpret_kernels:
            self.executor.warm_up = WarmUp(self.executor.lowerings())
        try:
            loaded = model if isinstance(model, LoadedModel) else load_model(model, self.dtype)
            kind = weight_dtype(self.dtype)
            self.executor.params = nest(
                {n: jax.device_put(x.astype(kind, copy=False)) for n, x in loaded.weights.items()}
            )
        except BaseException:
            self.close()
            raise
        self.tokenizer = loaded.tokenizer
        self.core = EngineCore(scheduler, self.executor, on_iteration=on_iteration)
        self._records: dict[str, RequestRecord] = {}
        self._sequence_records: dict[int, SequenceRecord] = {}
        # Outputs that their callers have not taken yet: of `generate` and `stream` by request, and
        # of all others for `step`.
        self._mailboxes: dict[str, deque[RequestOutput]] = {}
        self._outbox: deque[RequestOutput] = deque()
        self._numbers = itertools.count()

    def warm_up(self, *, wait: bool = True, progress: bool = True) -> None:
        """Compile every step, or load it from JAX's persistent cache; return once all are there.

        With ``wait`` off it goes on in the background, as it does after construction.
        """
        if self.executor.warm_up is None:
            self.executor.warm_up = WarmUp(self.executor.lowerings())
        if wait:
            self.executor.warm_up.wait(progress=progress)

    def close(self) -> None:
        """Give up what is still to be compiled in the background."""
        if self.executor.warm_up is not None:
            self.executor.warm_up.cancel()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, in their order. One prompt may stand alone; so may its parameters.

        Nothing runs unless all of them are valid. What others have added goes on meanwhile.
        """
        many: Sequence[Any] = [prompts] if is_single_prompt(prompts) else prompts  # type: ignore[assignment]
        if params is None or isinstance(params, SamplingParams):
            params = [params] * len(many)  # type: ignore[list-item]
        if len(params) != len(many):
            raise ValueError(f"{len(many)} prompts, but {len(params)} sampling parameters")
        ids: list[str] = []
        try:
            for i, (prompt, prompt_params) in enumerate(zip(many, params, strict=True)):
                try:
                    ids.append(self.add_request(None, prompt, prompt_params))
                except ValueError as error:
                    raise ValueError(f"prompt {i}: {error}") from None
            return self._run(ids, progress)
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one chat (a list of messages with role and content) or several."""
        chats = [messages] if is_single_prompt(messages) else messages
        if others := [chat for chat in chats if not is_chat(chat)]:
            raise ValueError(
                f"a chat is a list of messages with role and content; got {others[0]!r:.80}"
            )
        return self.generate(messages, params, progress=progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt; yields all of its output so far after every token.

        Several streams may be read in turns; each advances the engine when it has nothing to yield.
        """
        request_id = self.add_request(None, prompt, params, stream=True)
        mailbox = self._mailboxes[request_id] = deque()
        try:
            finished = False
            while not finished:
                while not mailbox:
                    self._advance()
                output = mailbox.popleft()
                finished = output.finished
                yield output
        finally:
            self.abort(request_id)
            del self._mailboxes[request_id]

    def add_request(
        self,
        request_id: str | None,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        stream: bool = False,
    ) -> str:
        """Queue a request for `step`; returns its id, a new one if None was given.

        ``arrival_time`` is in seconds on the engine's clock; None: now. With ``stream``, `step`
        also returns what is there after each token. ValueError for a request that can never be
        served; those that run are not touched by it.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {params!r:.80}")
        text, token_ids = encode(prompt, self.tokenizer, self.config.vocab_size)
        check_request(params, self.config, stream=stream)
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError(f"request_id must be a string, got {request_id!r}")
        request = Request(
            self._new_id() if request_id is None else request_id,
            token_ids,
            params,
            self.core.clock() if arrival_time is None else arrival_time,
            self._next_seed if params.seed is None else params.seed,
        )
        record = RequestRecord.of(request, text, stream, self.tokenizer)
        self.core.add(request)
        if params.seed is None:  # one that was refused would have shifted all later ones
            self._next_seed = int(self._seeds.integers(2**32))
        self._sequence_records |= {each.seq.seq_id: each for each in record.sequences}
        self._records[request.request_id] = record
        return request.request_id

    def _new_id(self) -> str:
        """One that no request has."""
        names = (f"request-{number}" for number in self._numbers)
        return next(name for name in names if name not in self._records)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running, or has an output that `step` returns."""
        return self.core.scheduler.has_work or bool(self._outbox)

    def step(self) -> list[RequestOutput]:
        """One iteration; returns what has been added by `add_request` and has finished, or got a
        token if it streams. Nothing is lost while `generate` or `stream` advances the engine.
        """
        self._advance()
        outputs = list(self._outbox)
        self._outbox.clear()
        return outputs

    def _advance(self) -> None:
        """One iteration; its outputs go to those who wait for them."""
        if not self.core.scheduler.has_work:
            return
        iteration = self.core.step()
        self._take_tokens(iteration)
        touched = {
            seq.request.request_id: None
            for seq in iteration.sampled
            if seq.request.request_id in self._records
        }
        for request_id in touched:
            record = self._records[request_id]
            mailbox = self._mailboxes.get(request_id, self._outbox)
            if record.request.is_finished:
                mailbox.append(self._close(request_id))
            elif record.streams:
                mailbox.append(record.output())
        self.core.report(iteration)

    def _take_tokens(self, iteration: Iteration) -> None:
        """Note tokens and times, and end what a stop string ends."""
        records, now = self._sequence_records, iteration.end_s
        for chunk in iteration.batch.prefills:
            request = self._records[chunk.seq.request.request_id]
            if request.first_scheduled_s is None:
                request.first_scheduled_s = iteration.start_s
        result = iteration.result
        for seq, token, logprobs in zip(
            iteration.sampled, result.tokens, result.logprobs, strict=True
        ):
            record = records.get(seq.seq_id)
            if record is None:
                self._records[seq.request.request_id].note_search(now)
                continue
            stop = record.append(token, now, logprobs)
            if stop is not None:
                self.core.scheduler.finish(seq, "stop", stop)
                # It may have reached its last token with this one: the stop string came first.
                seq.finish_reason, seq.stop_reason = "stop", stop

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; returns what it has, None if there is no such request."""
        if request_id not in self._records:
            return None
        self.core.scheduler.abort(request_id)
        output = self._close(request_id)
        # What `step` has not returned yet of a streaming request is in this output too.
        self._outbox = deque(out for out in self._outbox if out.request_id != request_id)
        if request_id in self._mailboxes:
            self._mailboxes[request_id].append(output)
        return output

    def _close(self, request_id: str) -> RequestOutput:
        record = self._records.pop(request_id)
        for sequence in record.sequences:
            del self._sequence_records[sequence.seq.seq_id]
        output = record.finish(self.tokenizer)
        self.core.note_ended(output)
        return output

    def pin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> int:
        """Compute the beginning of later prompts and keep it; returns how many tokens are kept.

        Whole blocks are: requests that begin with these tokens find them in the prefix cache until
        `unpin_prefix`, however long nobody uses them. ValueError if that would leave a request
        that waits or runs too little memory.
        """
        _, token_ids = encode(prompt, self.tokenizer, self.config.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=1, seed=0, cache_salt=cache_salt)
        self.generate(list(token_ids), params, progress=False)
        return self.core.scheduler.pin(token_ids, cache_salt)

    def unpin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> None:
        """Let go of a pinned prefix, given as it was; KeyError if it is not pinned."""
        _, token_ids = encode(prompt, self.tokenizer, self.config.vocab_size)
        self.core.scheduler.memory.unpin(token_ids, cache_salt)

    @property
    def sharing_stats(self) -> SharingStats:
        """Hits of the prefix cache, evictions, forks and copies since the engine was made."""
        return replace(self.core.scheduler.memory.stats)

    def _run(self, ids: list[str], progress: bool) -> list[RequestOutput]:
        """Step until all of these have ended."""
        mailbox: deque[RequestOutput] = deque()
        self._mailboxes |= dict.fromkeys(ids, mailbox)
        done: dict[str, RequestOutput] = {}
        num_tokens, start = 0, time.perf_counter()
        try:
            with tqdm(total=len(ids), unit="request", disable=not progress) as bar:
                while len(done) < len(ids):
                    self._advance()
                    while mailbox:
                        output = mailbox.popleft()
                        done[output.request_id] = output
                        num_tokens += sum(len(out.token_ids) for out in output.outputs)
                        rate = num_tokens / (time.perf_counter() - start)
                        bar.set_postfix_str(f"{rate:.0f} tokens/s")
                        bar.update()
        finally:
            for request_id in ids:
                del self._mailboxes[request_id]
        return [done[request_id] for request_id in ids]
