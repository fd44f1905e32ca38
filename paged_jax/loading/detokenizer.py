"""Text from tokens as they come, without decoding a sequence from its start each time."""

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from paged_jax.loading.byte_alphabet import CHARACTER_TO_BYTE
from paged_jax.loading.transformers_tokenizer import Tokenizer

_REPLACEMENT = "�"


class _Stream(Protocol):
    def append(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """The text of one sequence, in pieces; constant cost per token.

    An unfinished UTF-8 character is held back until it is whole, or until `flush`. The pieces
    together equal `tokenizer.decode(all ids)`. One exception: a SentencePiece tokenizer decodes a
    run of byte tokens as a whole, so if such a run turns invalid after a valid character, `decode`
    replaces that character too, while it has been handed out here.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        backend = tokenizer.backend_tokenizer
        self._stream: _Stream
        if type(backend.decoder).__name__ == "ByteLevel":
            self._stream = _ByteStream(_token_bytes(tokenizer, skip_special_tokens))
        else:
            self._stream = _WindowStream(tokenizer, skip_special_tokens)

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return self._stream.append(token_ids)

    def flush(self) -> str:
        """What is still held back, with replacement characters; call it once, at the end."""
        return self._stream.flush()


class _TokenBytes(dict[int, bytes]):
    """Token id -> the bytes it adds to a text, looked up once per id."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._id_to_token = tokenizer.backend_tokenizer.id_to_token
        if skip_special_tokens:
            added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
            self.update({index: b"" for index, token in added.items() if token.special})

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id) or ""
        try:
            value = bytes([CHARACTER_TO_BYTE[character] for character in token])
        except KeyError:  # an added token, spelled as it is
            value = token.encode()
        self[token_id] = value
        return value


@lru_cache(maxsize=8)
def _token_bytes(tokenizer: Tokenizer, skip_special_tokens: bool) -> _TokenBytes:
    """Shared by all sequences of a tokenizer."""
    return _TokenBytes(tokenizer, skip_special_tokens)


class _ByteStream:
    """For byte-level tokenizers: their text is the UTF-8 of their tokens' bytes, nothing else."""

    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_ids: Sequence[int]) -> str:
        token_bytes = self._token_bytes
        return self._decoder.decode(b"".join([token_bytes[index] for index in token_ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """For all others: decodes the last few tokens, and again with the new ones; the difference is
    new text. The window starts at a token whose text is out already, because decoders treat the
    first token of a text differently (SentencePiece drops its space)."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0  # tokens at the start of the window whose text is out
        self._emitted = ""  # what the window's text has given so far

    def append(self, token_ids: Sequence[int]) -> str:
        self._window.extend(token_ids)
        text = self._decode(self._window)
        complete = text[: len(text) - _num_unfinished(text)]
        new = complete[len(self._emitted) :]
        self._emitted += new
        if new and len(complete) == len(text):
            context = self._window[self._num_context :]
            self._window, self._num_context = context, len(context)
            self._emitted = self._decode(context)
        return new

    def flush(self) -> str:
        return self._decode(self._window)[len(self._emitted) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text


def _num_unfinished(text: str) -> int:
    """Replacement characters at the end that more bytes may still turn into a character."""
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), 3)
