"""A GGUF file's metadata, which notes what is read, so that nothing is skipped in silence.

Every key that tells how the model computes or how texts become tokens is read, is known to change
nothing, or is refused. Other keys (name, licence, sampling hints, a community's own) are free.
"""

import reprlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

_ANY = object()
# Keys that need not be read -> the values with which they change nothing, beside 0, False and empty
# ones, which no key here uses to ask for something.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "*.vocab_size": (_ANY,),  # the embedding has the rows that it has
    "*.expert_*": (_ANY,),  # `expert_count` itself is read
    "*.rope.scaling.finetuned": (_ANY,),
    "*.rope.scale": (1,),
    "*.rope.scaling.alpha": (1,),
    "*.rope.scaling.attn_factor": (1,),
    "*.rope.scaling.yarn_attn_factor": (1,),
    "*.logit_scale": (1,),
    "*.residual_scale": (1,),
    "*.embedding_scale": (1,),
    # How the converter got query and key rows into the order of all files of the architecture.
    "*.tensor_data_layout": ("reference", "Meta AI original pth"),
    "tokenizer.ggml.*_token_id": (_ANY,),  # a name for a token: an end token, or for programs
    "tokenizer.ggml.*_token_ids": (_ANY,),
    "tokenizer.ggml.pre": ("default",),  # SentencePiece does not split texts before merging
    "tokenizer.ggml.merges": (_ANY,),  # SentencePiece merges by the scores
    "tokenizer.ggml.scores": (_ANY,),  # byte-level BPE by the merges
    "tokenizer.ggml.added_tokens": (_ANY,),  # they are among the tokens
    "tokenizer.ggml.token_type_count": (_ANY,),  # of segments, which these models do not have
    "tokenizer.chat_templates": (_ANY,),  # the names in the keys of the templates
    "tokenizer.huggingface.json": (_ANY,),  # the same tokenizer, told again
}


class GgufMetadata(Mapping[str, Any]):
    """The metadata of a file by key; a key that is looked up counts as read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def refuse_unread(self, section: str) -> None:
        """ValueError for a key of the section that is neither read nor harmless."""
        for key, value in self._values.items():
            if not key.startswith(section + ".") or key in self._read or not value:
                continue
            allowed = [v for k, values in _HARMLESS.items() if fnmatchcase(key, k) for v in values]
            if _ANY not in allowed and value not in allowed:
                raise ValueError(
                    f"{key}={reprlib.repr(value)} is not supported and may change the output; to "
                    f"do without it, remove it: gguf-new-metadata --remove-metadata {key} IN OUT"
                )
