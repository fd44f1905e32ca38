"""Incremental detokenization: the pieces equal the whole, and characters arrive when complete."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from paged_jax.loading import IncrementalDetokenizer, build_byte_tokenizer, load_tokenizer
from paged_jax.loading.tokenizer import wrap

GOLDENS = Path(__file__).parents[1] / "goldens"
TEXTS = [
    case["text"]
    for case in json.loads((GOLDENS / "tokenizer_smollm2.json").read_text(encoding="utf-8"))[
        "texts"
    ]
]
SMOLLM2 = load_tokenizer("smollm2")
BYTES = build_byte_tokenizer()


def sentencepiece_tokenizer() -> Any:
    """SentencePiece's decoding over single characters and bytes."""
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    characters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,", "é", "中"]
    tokens = [*specials, *byte_tokens, *characters]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    tokenizer.add_special_tokens(specials)
    return wrap(tokenizer)


SENTENCEPIECE = sentencepiece_tokenizer()
TOKENIZERS = {"smollm2": SMOLLM2, "bytes": BYTES, "sentencepiece": SENTENCEPIECE}


def pieces(
    tokenizer: Any, token_ids: Sequence[int], skip_special_tokens: bool = True, step: int = 1
) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    found = [stream.append(token_ids[i : i + step]) for i in range(0, len(token_ids), step)]
    return [*found, stream.flush()]


@given(st.data())
@settings(deadline=None)
@pytest.mark.parametrize("name", ["smollm2", "bytes"])
def test_pieces_of_random_tokens_equal_the_whole(name: str, data: st.DataObject) -> None:
    """Invalid UTF-8, special tokens and ids that no token has, one token or several at a time."""
    tokenizer = TOKENIZERS[name]
    rare = st.sampled_from([0, 1, 2, 256, 257, 258, len(tokenizer) - 1, len(tokenizer)])
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2) | rare))
    skip, step = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, token_ids, skip, step)) == whole


@given(st.text(), st.booleans(), st.integers(1, 3))
@settings(deadline=None)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_text_equal_the_whole(name: str, text: str, skip: bool, step: int) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode(text)
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, token_ids, skip, step)) == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_real_texts(name: str) -> None:
    for text in TEXTS:
        token_ids = TOKENIZERS[name].encode(text)
        whole = TOKENIZERS[name].decode(token_ids, skip_special_tokens=True)
        found = pieces(TOKENIZERS[name], token_ids)
        assert "".join(found) == whole
        assert not any(piece.endswith("�") for piece in found[:-1])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_appears_with_its_last_byte(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    stream = IncrementalDetokenizer(tokenizer)
    first = tokenizer.convert_tokens_to_ids("<0xF0>") if name == "sentencepiece" else None
    token_ids = [first + byte - 0xF0 if first else None for byte in "🙂".encode()]
    if not first:
        token_ids = tokenizer.encode("🙂")
    assert len(token_ids) > 1
    found = [stream.append([token]) for token in token_ids]
    assert found == [""] * (len(token_ids) - 1) + ["🙂"]
    assert stream.flush() == ""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_flush_gives_an_unfinished_character_up(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode("x🙂")[:-1]
    found = pieces(tokenizer, token_ids)
    assert "".join(found) == tokenizer.decode(token_ids)
    assert found[-1].endswith("�")


def test_other_decoders_are_refused() -> None:
    tokenizer = Tokenizer(models.BPE())
    with pytest.raises(ValueError, match=r"the decoder \[\] cannot be streamed"):
        IncrementalDetokenizer(wrap(tokenizer))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"the decoder \[WordPiece\] cannot be streamed"):
        IncrementalDetokenizer(wrap(tokenizer))
