"""The public API: an engine that serves requests over a paged KV cache.

    engine = Engine("smollm2")
    [output] = engine.generate("The capital of France is", SamplingParams(temperature=0))
    print(output.outputs[0].text)

Names follow vLLM's where the same thing exists there.
"""

import itertools
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Unpack

import jax
import numpy as np

from paged_jax.config import EngineConfig
from paged_jax.constraints.build import Constraints
from paged_jax.engine.build import build, choose_attention, device_params
from paged_jax.engine.chat import ChatOptions, Message, is_chat
from paged_jax.engine.core import EngineCore
from paged_jax.engine.delivery import Delivery, OutputStream, complete
from paged_jax.engine.processors import check_names, check_processors
from paged_jax.engine.prompts import (
    Prompt,
    as_list,
    check_call,
    check_request,
    encode,
    prompt_list,
    truncate,
)
from paged_jax.engine.records import OnOutput, RequestRecord
from paged_jax.engine.turn import in_turn
from paged_jax.executor.compilation import WarmUp, use_persistent_cache
from paged_jax.executor.settings import check_settings
from paged_jax.loading import LoadedModel, load_config, load_model
from paged_jax.loading.weights import weight_dtype
from paged_jax.memory.policies import PAGED
from paged_jax.memory.usage import SharingStats
from paged_jax.observability.metrics import Metrics
from paged_jax.observability.observer import IterationStats
from paged_jax.outputs import RequestOutput
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.checks import QueueFull
from paged_jax.scheduling.request import Request
from paged_jax.steps.logits import LogitsProcessor
from pallas_kernels.extras import check_platforms

# How a request is to be completed; a dict has the fields of SamplingParams, None its defaults.
Params = SamplingParams | Mapping[str, Any] | None


class Engine:
    """Serves a model: continuous batching over a paged KV cache on JAX's default device.

    Requests come in by `generate`, `chat`, `stream` or `add_request`. The caller that waits for an
    output advances the engine, an iteration at a time. An engine has one thread at a time, which is
    free to change while no request is left; a call from another raises RuntimeError. Any thread may
    ask for `metrics` and call `close`.

    model: "smollm2" (the packaged model), a Hugging Face directory or a .gguf file; or a
        `LoadedModel`.
    on_iteration: called with the statistics of every iteration; it must not abort requests. If it
        raises, a warning says so and it is not called again.
    logits_processors: functions by the names that `SamplingParams.logits_processors` chooses from,
        applied in this order. Each is a pure JAX function of one row, `(logits f32[V], token_ids
        i32[max_model_len], num_tokens i32[], num_prompt_tokens i32[]) -> f32[V]`, compiled into the
        steps; `token_ids[:num_tokens]` are the tokens so far, and V fills up the rest.
    options: the fields of `paged_jax.EngineConfig`, such as `block_size=16`, which describes each
        of them. `Engine.options` has them with all defaults filled in.

    ValueError, in one line, for anything that cannot work; TypeError for an unknown option.
    """

    def __init__(
        self,
        model: str | LoadedModel = "smollm2",
        *,
        on_iteration: Callable[[IterationStats], None] | None = None,
        logits_processors: Mapping[str, LogitsProcessor] = types.MappingProxyType({}),
        **options: Any,
    ):
        check_platforms()
        check_settings()
        given = EngineConfig.of(options)
        self.config = model.config if isinstance(model, LoadedModel) else load_config(model)
        self.options = resolved = given.resolved(
            jax.default_backend(),
            model_name=self.config.name,
            max_position_embeddings=self.config.max_position_embeddings,
        )
        self.config = self.config.served_up_to(resolved.max_model_len)
        self.dtype, self.block_size = resolved.dtype, resolved.block_size
        weight_dtype(self.dtype)  # ValueError if weights cannot have this dtype
        self.enable_prefix_caching = (
            resolved.enable_prefix_caching and resolved.memory_policy == PAGED
        )
        self.pipelined = resolved.pipelined
        self.max_num_seqs = resolved.max_num_seqs
        self.max_model_len = resolved.max_model_len
        self.max_num_batched_tokens = resolved.max_num_batched_tokens
        self._seeds = np.random.default_rng(resolved.seed)
        self._next_seed = int(self._seeds.integers(2**32))
        use_persistent_cache()

        check_processors(logits_processors, self.config.vocab_size, self.max_model_len)
        self.logits_processors = dict(logits_processors)
        choice = choose_attention(self.config, resolved)
        self.attention = choice.attention
        scheduler, self.executor = build(self.config, resolved, choice, self.logits_processors)
        self.num_blocks = scheduler.memory.num_total_blocks
        self.num_swap_blocks = scheduler.memory.num_swap_blocks
        if resolved.warm_up and not resolved.interpret_kernels:
            self.executor.warm_up = WarmUp(self.executor.lowerings())
        try:
            loaded = model if isinstance(model, LoadedModel) else load_model(model, self.dtype)
            self.executor.params = device_params(loaded, self.dtype)
        except BaseException:
            self.close()
            raise
        self.tokenizer = loaded.tokenizer
        self._constraints = Constraints(
            self.tokenizer, self.config.vocab_size, self.config.eos_token_ids
        )
        self.metrics_observer = Metrics(scheduler)
        self.core = EngineCore(
            scheduler,
            self.executor,
            on_iteration=on_iteration,
            observers=[self.metrics_observer],
            is_pipelined=self.pipelined,
        )
        self._delivery = Delivery(self.core, self.tokenizer)
        self._turn = self._delivery.turn
        self._numbers = itertools.count()

    @in_turn
    def warm_up(self, *, wait: bool = True, progress: bool = True) -> None:
        """Compile every step, or load it from JAX's persistent cache; return once all are there.

        With `wait` off the steps compile in the background, as they do after construction.
        """
        if self.executor.warm_up is None:
            self.executor.warm_up = WarmUp(self.executor.lowerings())
        if wait:
            self.executor.warm_up.wait(progress=progress)

    def close(self) -> None:
        """Compile no more steps in the background."""
        if self.executor.warm_up is not None:
            self.executor.warm_up.cancel()

    @in_turn
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | Iterable[Params] = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, in their order. One prompt may stand alone; so may its parameters.

        Prompts, and parameters of each, come in any iterable. One 1-D array is one prompt of ids; a
        2-D array's rows are prompts.

        Nothing runs unless all prompts are valid. Requests added before go on meanwhile. A request
        that fails has its reason in `RequestOutput.error`.
        """
        many = prompt_list(prompts)
        of_each: list[Any] | None = as_list(params)
        if of_each is None:
            of_each = [params] * len(many)
        if len(of_each) != len(many):
            raise ValueError(f"{len(many)} prompts, but {len(of_each)} sampling parameters")
        ids: list[str] = []
        try:
            for i, (prompt, prompt_params) in enumerate(zip(many, of_each, strict=True)):
                try:
                    ids.append(self.add_request(None, prompt, prompt_params))
                except ValueError as error:
                    kind = QueueFull if isinstance(error, QueueFull) else ValueError
                    raise kind(f"prompt {i}: {error}") from None
            return complete(ids, self._delivery, progress=progress)
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        params: Params | Iterable[Params] = None,
        *,
        progress: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one chat (a list of messages with role and content) or several.

        options: tools, add_generation_prompt, continue_final_message, chat_template and
            chat_template_kwargs, of all chats; `ChatOptions` describes each. `generate`, `stream`
            and `add_request` take a chat with its options as a `ChatPrompt`.
        """
        chats: Any = as_list(messages)
        if chats is None or is_chat(chats):
            chats = [messages if chats is None else chats]
        prompts = [{"messages": chat, **options} for chat in chats]
        return self.generate(prompts, params, progress=progress)

    @in_turn
    def stream(self, prompt: Prompt, params: Params = None) -> OutputStream:
        """Complete one prompt; iterate to get all of its output so far after every token.

        Several streams may be read in turns; each advances the engine when it has nothing to yield.
        A stream that is closed or lost aborts its request.
        """
        request_id = self.add_request(None, prompt, params, stream=True)
        return OutputStream(request_id, self._delivery)

    @in_turn
    def add_request(
        self,
        request_id: str | None,
        prompt: Prompt,
        params: Params = None,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        stream: bool = False,
        on_output: OnOutput | None = None,
    ) -> str:
        """Queue a request for `step`; returns its id, a new one if None was given.

        params: also as a dict of their fields.
        arrival_time: in seconds on the engine's clock; None: now.
        priority: a lower one goes first, where the scheduling policy looks at priorities.
        timeout_s: the request ends so many seconds after its arrival, with the tokens it has.
        stream: there is an output after each token, not only at the end.
        on_output: called with each output, which `step` does not return then. It may add and abort
            requests. If it raises, its request alone ends, and `step` returns the last output.

        ValueError, which touches no other request, if the request can never be served or the queue
        is full.
        """
        with self.core.telling_refusal():
            params = SamplingParams.of(params)
            text, token_ids = encode(prompt, self.tokenizer, self.config.vocab_size)
            token_ids = truncate(token_ids, params, self.max_model_len)
            check_request(params, self.config, stream=stream)
            check_names(params.processor_names, self.logits_processors)
            check_call(
                request_id,
                arrival_time=arrival_time,
                priority=priority,
                timeout_s=timeout_s,
                stream=stream,
                on_output=on_output,
            )
            if request_id is not None:
                self._delivery.check_is_new(request_id)
            arrival = self.core.clock() if arrival_time is None else float(arrival_time)
            request = Request(
                self._new_id() if request_id is None else request_id,
                token_ids,
                params,
                arrival,
                self._next_seed if params.seed is None else params.seed,
                priority=int(priority),
                deadline_s=None if timeout_s is None else arrival + float(timeout_s),
                constraint=self._constraints.of(params),
            )
            record = RequestRecord.of(
                request, text, self.tokenizer, streams=stream, on_output=on_output
            )
            self.core.add(request)
            if params.seed is None:  # a refused request would have shifted all later seeds
                self._next_seed = int(self._seeds.integers(2**32))
            self._delivery.add(record)
            return request.request_id

    def _new_id(self) -> str:
        """An id that no request has."""
        names = (f"request-{number}" for number in self._numbers)
        return next(name for name in names if name not in self._delivery)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or has an output that `step` hands over."""
        return self.core.scheduler.has_work or self._delivery.has_outputs

    @in_turn
    def step(self) -> list[RequestOutput]:
        """One iteration; returns outputs of requests that `add_request` has added.

        A request has one when it has finished, and one after each token if it streams. Outputs made
        while `generate` or `stream` advances the engine are kept for the next `step`. A request
        that fails ends alone, with its reason in `RequestOutput.error`.
        """
        self._delivery.advance()
        return self._delivery.take_outbox()

    @in_turn
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; returns its last output, None if there is no such request.

        Its `on_output` is not called.
        """
        return self._delivery.abort(request_id)

    @in_turn
    def pin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> int:
        """Compute the beginning of later prompts and keep it; returns how many tokens are kept.

        Whole blocks are kept: requests that begin with these tokens find them in the prefix cache
        until `unpin_prefix`, even if they are not used for long. ValueError if a request that waits
        or runs would have too little memory left. A device step that fails may lose pinned
        prefixes; a warning says so.
        """
        if not self.enable_prefix_caching:
            raise ValueError("nothing can be pinned: prefix caching is off")
        _, token_ids = encode(prompt, self.tokenizer, self.config.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=1, seed=0, cache_salt=cache_salt)
        [output] = self.generate(list(token_ids), params, progress=False)
        if output.error is not None:
            raise RuntimeError(f"the prefix could not be computed: {output.error}")
        return self.core.scheduler.pin(token_ids, cache_salt)

    @in_turn
    def unpin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> None:
        """Let go of a pinned prefix, given as to `pin_prefix`; KeyError if it is not pinned."""
        _, token_ids = encode(prompt, self.tokenizer, self.config.vocab_size)
        try:
            self.core.scheduler.memory.unpin(token_ids, cache_salt)
        except KeyError:
            raise KeyError(
                f"these {len(token_ids)} tokens are not pinned with cache_salt {cache_salt!r}"
            ) from None

    def metrics(self) -> dict[str, float]:
        """The figures that `paged_jax.observability.prometheus` serves, by name and labels."""
        return self.metrics_observer.values()

    @property
    def sharing_stats(self) -> SharingStats:
        """Hits of the prefix cache, evictions, forks and copies since the engine was made."""
        return replace(self.core.scheduler.memory.stats)
