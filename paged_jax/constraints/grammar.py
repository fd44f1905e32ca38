"""Structured outputs: llguidance finds the tokens that keep a text within a grammar."""

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from tokenizers import AddedToken

from paged_jax.constraints.tokens import bits_of
from paged_jax.structured_outputs import StructuredOutputsParams
from paged_jax.values import one_line

MAX_CACHED_GRAMMARS = 64
# What llguidance takes for the end of a text: a token that no model has. Which of the model's
# tokens end a sequence is the request's choice.
_END = "<|the end of a text that matches|>"
_LIMITS = LLParserLimits(verbose_errors=False)
# llguidance recurses along chains of rules, and where the stack ends, so does the process. This
# stack holds a chain as long as the longest grammar.
_STACK_BYTES = 256 << 20
MAX_GRAMMAR = 500_000  # characters


class GrammarCompiler:
    """Compiles what texts must match, for one tokenizer; keeps what it has compiled.

    tokenizer: a fast tokenizer of transformers.
    vocab_size: tokens of the model, which may have more or fewer than its tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._matcher = lru_cache(MAX_CACHED_GRAMMARS)(self._compile)

    def constraint(
        self, params: StructuredOutputsParams, end_token_ids: Iterable[int], eos: Iterable[int]
    ) -> "Grammar":
        """A constraint whose text ends by `end_token_ids`; `eos`: those that are no text.

        ValueError, with llguidance's reason, for a grammar that does not compile.
        """
        size, matcher, reader = self._vocab_size, self._matcher(params), self._reader
        # Special tokens are no text for llguidance either, unless the grammar names them.
        spelt_out = [token for token in eos if not reader.is_special_token(token)]
        no_text = bits_of([*spelt_out, reader.eos_token], size)
        return Grammar(matcher.deep_copy(), bits_of(end_token_ids, size), ~no_text)

    @cached_property
    def _reader(self) -> LLTokenizer:
        """The tokenizer as llguidance reads it, with `_END`; takes up to a second."""
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        backend.add_special_tokens([AddedToken(_END, normalized=False)])
        end = backend.token_to_id(_END)
        try:
            size = max(self._vocab_size, end + 1)
            return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=end)
        except Exception as error:  # of whatever kind
            raise ValueError(
                f"structured_outputs: llguidance cannot read the model's tokenizer: {_line(error)}"
            ) from error

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        reader = self._reader
        rules = params.grammar or params.json or ""
        if len(rules) > MAX_GRAMMAR:
            raise ValueError(
                f"structured_outputs: a grammar or a JSON schema has at most {MAX_GRAMMAR} "
                f"characters, got {len(rules)}"
            )
        try:
            matcher = _with_deep_stack(
                lambda: LLMatcher(reader, _grammar(params), log_level=0, limits=_LIMITS)
            )
        except ValueError as error:  # GBNF that is no grammar, or a text that is no Unicode
            raise ValueError(f"structured_outputs: {_line(error)}") from error
        if matcher.is_error():
            raise ValueError(f"structured_outputs: {_line(matcher.get_error())}")
        return matcher


def _with_deep_stack[T](work: Callable[[], T]) -> T:
    """What `work` returns in a thread of its own, with a stack of `_STACK_BYTES`."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(work).result()
    finally:
        threading.stack_size(before)


def _grammar(params: StructuredOutputsParams) -> str:
    """llguidance's own form of a grammar."""
    if params.regex is not None:
        return str(grammar_from("regex", params.regex))
    if params.choice is not None:
        # One terminal: as rules of their own, few thousands would be too many.
        return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, params.choice))}"
    if params.grammar is not None:
        return str(grammar_from("grammar", params.grammar))
    return str(grammar_from("json_schema", str(params.json or '{"type": "object"}')))


def _line(error: object) -> str:
    """The first 200 characters of a message, in one line."""
    return one_line(str(error).replace("<non-verbose/>", ""))[:200]


class Grammar:
    """The tokens that keep one sequence's text within a grammar, and its end where it matches."""

    def __init__(self, matcher: LLMatcher, ends: np.ndarray, texts: np.ndarray):
        """ends, texts: bits of the tokens that end a text, and of those that may go into it."""
        self._matcher = matcher
        self._ends = ends
        self._texts = texts
        self._num_read = 0  # output tokens that the matcher knows

    def restrict(self, output_token_ids: Sequence[int], allowed: np.ndarray) -> None:
        """ValueError if llguidance gives up: a grammar may be too complex for it."""
        matcher = self._matcher
        matcher.consume_tokens(list(output_token_ids[self._num_read :]))
        self._num_read = len(output_token_ids)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: allowed.size] & self._texts
        if matcher.is_error():
            raise ValueError(f"structured_outputs: {_line(matcher.get_error())}")
        allowed &= bits | self._ends if matcher.is_accepting() else bits

    def branch(self) -> "Grammar":
        other = Grammar(self._matcher.deep_copy(), self._ends, self._texts)
        other._num_read = self._num_read
        return other
