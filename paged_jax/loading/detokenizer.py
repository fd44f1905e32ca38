"""Text from tokens as they come, at a constant cost per token."""

import codecs
from collections.abc import Sequence

from paged_jax.loading.token_bytes import token_bytes
from paged_jax.loading.transformers_tokenizer import Tokenizer


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
    that one too, while here it has been handed out.

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
        """What is still held back, with replacement characters; for the end of the sequence."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._num_to_strip and text:
            if not text.startswith(" "):
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text
