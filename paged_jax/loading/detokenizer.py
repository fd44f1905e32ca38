"""Text from tokens as they come, at a constant cost per token: bytes of tokens, then UTF-8."""

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paged_jax.loading.byte_tokenizer import CHARACTER_TO_BYTE
from paged_jax.loading.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's byte fallback


@dataclass(frozen=True)
class Spelling:
    """How a tokenizer spells bytes, read from its decoder."""

    is_byte_level: bool  # GPT-2's alphabet; otherwise SentencePiece's
    space: str = " "  # the character that stands for a space
    num_stripped: int = 0  # spaces dropped at the start of a text

    def to_bytes(self, token: str) -> bytes:
        if self.is_byte_level:
            try:
                return bytes([CHARACTER_TO_BYTE[character] for character in token])
            except KeyError:  # an added token, written as it is
                return token.encode()
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace(self.space, " ").encode()


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, looked up once; an id without a token has none."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        """Raises ValueError if the tokenizer's texts are no concatenation of its tokens' bytes."""
        super().__init__()
        backend = tokenizer.backend_tokenizer
        decoder = backend.decoder
        # Only the serialised form shows the members of a sequence of decoders.
        self.spelling = _spelling(None if decoder is None else json.loads(decoder.__getstate__()))
        self._id_to_token = backend.id_to_token
        if skip_special_tokens:
            added = backend.get_added_tokens_decoder()
            self.update({index: b"" for index, token in added.items() if token.special})

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id)
        value = b"" if token is None else self.spelling.to_bytes(token)
        self[token_id] = value
        return value


@lru_cache(maxsize=8)
def token_bytes(tokenizer: Tokenizer, skip_special_tokens: bool) -> TokenBytes:
    """One table for all sequences of a tokenizer."""
    return TokenBytes(tokenizer, skip_special_tokens)


def _spelling(decoder: dict[str, Any] | None) -> Spelling:
    """The spelling that a serialised decoder of a `tokenizers.Tokenizer` describes."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    match steps:
        case [{"type": "ByteLevel"}]:
            return Spelling(is_byte_level=True)
        case [
            {"type": "Replace", "pattern": {"String": space}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *strip,
        ]:
            match strip:
                case []:
                    return Spelling(is_byte_level=False, space=space)
                case [{"type": "Strip", "content": " ", "start": start, "stop": 0}]:
                    return Spelling(is_byte_level=False, space=space, num_stripped=start)
    kinds = ", ".join(step["type"] for step in steps)
    raise ValueError(
        f"text of a tokenizer with the decoder [{kinds}] cannot be streamed; supported: "
        "[ByteLevel] and SentencePiece's [Replace, ByteFallback, Fuse, Strip]"
    )


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """SentencePiece's decoder gives one replacement character for every byte of bad UTF-8."""
    assert isinstance(error, UnicodeDecodeError)
    return "�" * (error.end - error.start), error.end


codecs.register_error("paged_jax.replace_each_byte", _replace_each_byte)


class IncrementalDetokenizer:
    """The text of one sequence, in pieces.

    An unfinished UTF-8 character is held back until it is whole, or until `flush`. For byte-level
    tokenizers the pieces together always equal `tokenizer.decode(all ids)`. SentencePiece decodes
    a run of byte tokens as a whole: if a run turns bad after a good character, `decode` replaces
    that character too, while here it has been handed out.

    Raises ValueError for a tokenizer of another kind.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._token_bytes = token_bytes(tokenizer, skip_special_tokens)
        spelling = self._token_bytes.spelling
        errors = "replace" if spelling.is_byte_level else "paged_jax.replace_each_byte"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._num_to_strip = spelling.num_stripped  # spaces, while the text has not begun

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        table = self._token_bytes
        text = self._utf8.decode(b"".join([table[token_id] for token_id in token_ids]))
        return self._stripped(text) if self._num_to_strip else text

    def flush(self) -> str:
        """The text still held back, with replacement characters; for the end of the sequence."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._num_to_strip and text:
            if not text.startswith(" "):
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text
