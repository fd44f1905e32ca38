"""Builds a tokenizer from a GGUF file's metadata, as llama.cpp does.

`tokenizer.ggml.model` is "gpt2" (byte-level BPE; `tokenizer.ggml.pre` names how text is split
before merging) or "llama" (SentencePiece BPE).
"""

from collections.abc import Mapping
from typing import Any

import gguf
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from paged_jax.loading import tokenizer as transformers_tokenizer
from paged_jax.loading.gguf_file import GgufFile
from paged_jax.loading.gguf_metadata import GgufMetadata

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS_SPACES}"
_QWEN2 = rf"{_CONTRACTION_WORD}|\p{{N}}|{_SYMBOLS_SPACES}"

# tokenizer.ggml.pre -> regular expressions, each of which splits the pieces that the one before it
# left. llama.cpp's llama-vocab.cpp has them, and takes them from the models' own tokenizer.json.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
}
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe")  # whole words before merges; bos by default
_NFC_NAMES = ("qwen2",)  # llama.cpp leaves out the normalisation of Qwen2's tokenizer.json

_SPACE = "▁"  # stands for a space in SentencePiece's tokens
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where a file does not say

# The tokens with these texts end a text, a turn or a message. Converters often name one of them in
# the metadata, or none; llama.cpp finds them by their texts too, whatever their types. It also ends
# at separators of repositories and files, which code models write within a text: not so here.
_END_TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|eot|>",
        "<|eom|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<EOT>",
        "▁<EOT>",
        "[EOT]",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001  DeepSeek's bars are wide ones
    )
)


def read_gguf_tokenizer(file: GgufFile) -> transformers_tokenizer.Tokenizer:
    """The file's tokenizer, with its special tokens and chat template.

    Raises ValueError if the metadata is incomplete, of a kind not listed above, or tells of
    something that is not done here.
    """
    metadata = GgufMetadata(file.metadata)
    try:
        tokenizer = _from_metadata(metadata)
        metadata.refuse_unread("tokenizer")
        return tokenizer
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def special_token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id of the token with GGUF's name for its role: bos, eos, unknown, padding, ..."""
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    default = _SENTENCEPIECE_IDS.get(name) if is_sentencepiece else None
    value: int | None = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    return value


def end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end generation, each once: those that the metadata names come first."""
    named = [special_token_id(metadata, role) for role in ("eos", "eot", "eom")]
    listed = metadata.get("tokenizer.ggml.eos_token_ids", [])  # Ollama's converter writes it
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    found = [index for index, token in enumerate(tokens) if token in _END_TEXTS]
    return tuple(dict.fromkeys(i for i in (*named, *listed, *found) if i is not None))


def _from_metadata(metadata: Mapping[str, Any]) -> transformers_tokenizer.Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise ValueError(
            f"tokenizer.ggml.model {model!r} is not supported; supported: {', '.join(builders)}"
        )
    needed = ["tokens", "token_type", "merges" if model == "gpt2" else "scores"]
    missing = [name for name in needed if f"tokenizer.ggml.{name}" not in metadata]
    if missing:
        raise ValueError(f"tokenizer.ggml metadata lacks {', '.join(missing)}")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    if len(tokens) != len(types):
        raise ValueError(f"tokenizer.ggml has {len(tokens)} tokens, but {len(types)} token types")
    special = _special_tokens(metadata)
    tokenizer, adds_bos = builders[model](metadata)
    _add_tokens(tokenizer, tokens, types)
    ends = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    for role, is_added in ends.items():
        if is_added and f"{role}_token" not in special:
            raise ValueError(f"texts get {role} added, but there is no {role}_token_id")
    _wrap_in_special_tokens(
        tokenizer, *[special[f"{role}_token"] if ends[role] else None for role in ("bos", "eos")]
    )
    return transformers_tokenizer.wrap(tokenizer, chat_template=_chat_template(metadata), **special)


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template, or all by their names ("default", "tool_use") where the file has several."""
    default: str | None = metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {k.removeprefix(prefix): metadata[k] for k in metadata if k.startswith(prefix)}
    if not named:
        return default
    return named if default is None else {"default": default} | named


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """transformers' name -> token, for each special token in the metadata."""
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = special_token_id(metadata, name)
        if index is not None:
            if index >= len(tokens):
                raise ValueError(
                    f"{name}_token_id {index} is outside the vocabulary of {len(tokens)} tokens"
                )
            special[f"{role}_token"] = tokens[index]
    return special


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """(tokenizer, whether it starts texts with bos unless the metadata says otherwise)."""
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(_SPLITS)}"
        )
    is_llama3 = pre in _LLAMA3_NAMES
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3)
    except Exception as error:  # tokenizers raises nothing more special
        raise ValueError(f"the merges do not fit the vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    if pre in _NFC_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, is_llama3


def _sentencepiece(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """(tokenizer, True: SentencePiece models start texts with bos)."""
    tokens = metadata["tokenizer.ggml.tokens"]
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    unknown = special_token_id(metadata, "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges_from_scores(
                tokens, metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
            ),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _merges_from_scores(
    tokens: list[str], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """SentencePiece merges into the best scored piece; merge lists say the same by their order."""
    score_of = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind == gguf.TokenType.NORMAL
    }
    merges = [
        (-score, cut, token[:cut], token[cut:])
        for token, score in score_of.items()
        for cut in range(1, len(token))
        if token[:cut] in score_of and token[cut:] in score_of
    ]
    return [(left, right) for _, _, left, right in sorted(merges)]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add the tokens that are matched whole in a text; decoding leaves out control tokens."""

    unknown_types = set(types) - set(gguf.TokenType)
    if unknown_types:
        raise ValueError(f"tokenizer.ggml.token_type has unknown types {sorted(unknown_types)}")
    control = gguf.TokenType.CONTROL
    types = [control if t in _END_TEXTS else k for t, k in zip(tokens, types, strict=True)]

    def added(*kinds: int) -> list[AddedToken]:
        typed = zip(tokens, types, strict=True)
        return [AddedToken(token, normalized=False) for token, kind in typed if kind in kinds]

    tokenizer.add_special_tokens(added(control, gguf.TokenType.UNKNOWN))
    tokenizer.add_tokens(added(gguf.TokenType.USER_DEFINED))


def _wrap_in_special_tokens(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Every encoded text starts with bos and ends with eos, where given."""
    before, after = ([bos] if bos else []), ([eos] if eos else [])
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in [*before, *after]],
        )
