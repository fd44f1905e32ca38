"""Tokenizers built from GGUF metadata, against recorded ids of the reference implementations."""

import json
from pathlib import Path
from typing import Any

import pytest

from paged_jax.loading import load_tokenizer, resolve_model
from paged_jax.loading.gguf_file import GgufFile
from paged_jax.loading.gguf_tokenizer import read_gguf_tokenizer
from tests.loading.loading_models import LLAMA, random_tensors, write_gguf

GOLDENS = Path(__file__).parents[1] / "goldens"
SMOLLM2 = json.loads((GOLDENS / "tokenizer_smollm2.json").read_text(encoding="utf-8"))
SPLITS = json.loads((GOLDENS / "tokenizer_splits.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def smollm2_file() -> GgufFile:
    return GgufFile(resolve_model("smollm2"))


@pytest.fixture(scope="module")
def smollm2(smollm2_file: GgufFile) -> Any:
    return read_gguf_tokenizer(smollm2_file)


@pytest.mark.parametrize("case", SMOLLM2["texts"], ids=lambda case: ascii(case["text"][:20]))
def test_smollm2_ids_equal_the_references(smollm2: Any, case: dict[str, Any]) -> None:
    """The right ids are those of llama.cpp and of transformers with the pre-tokenizer of the
    model's own tokenizer.json, Sequence[Digits(individual_digits), ByteLevel]; both agree on every
    text. The file says `tokenizer.ggml.pre = smollm`, which in llama.cpp stands for that same
    split: first every number character alone, then GPT-2's expression. transformers' own GGUF
    reader does not know `smollm` and splits as GPT-2 does, so it goes wrong where number characters
    of several bytes, or two spaces before a digit, merge across the split; its ids are recorded
    for those texts, and ours must differ from them there.
    """
    ids = smollm2.encode(case["text"])
    assert ids == case["ids"]
    assert ids != case.get("transformers_gguf_ids")
    assert smollm2.decode(ids) == case["text"]


@pytest.mark.parametrize("case", SMOLLM2["chats"])
def test_smollm2_chat_template_equals_the_reference(smollm2: Any, case: dict[str, Any]) -> None:
    text = smollm2.apply_chat_template(
        case["messages"], add_generation_prompt=case["add_generation_prompt"], tokenize=False
    )
    assert text == case["text"]
    assert smollm2.encode(text) == case["ids"]


def test_smollm2_special_tokens(smollm2: Any) -> None:
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_id == 2
    assert smollm2.pad_token_id == 2
    assert smollm2.unk_token == "<|endoftext|>"
    assert len(smollm2) == 49152
    assert smollm2.decode([1, 33, 2], skip_special_tokens=True) == "1"


@pytest.mark.parametrize("pre", SPLITS["ids"])
def test_every_pre_tokenizer_splits_as_llama_cpp(pre: str, smollm2_file: GgufFile) -> None:
    """Recorded with SmolLM2's vocabulary under each name (without bos)."""
    file = GgufFile(smollm2_file.path)
    file.metadata["tokenizer.ggml.pre"] = pre
    tokenizer = read_gguf_tokenizer(file)
    for text, ids in zip(SPLITS["texts"], SPLITS["ids"][pre], strict=True):
        assert tokenizer.encode(text) == ids, text


def sentencepiece_metadata() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    golden = json.loads((GOLDENS / "tokenizer_sentencepiece.json").read_text(encoding="utf-8"))
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": golden["tokens"],
        "tokenizer.ggml.scores": golden["scores"],
        "tokenizer.ggml.token_type": golden["types"],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata, golden["texts"]


def test_sentencepiece_ids_equal_the_reference(small_file: GgufFile) -> None:
    """Scores become merges, unknown characters become bytes, texts start with bos."""
    small_file.metadata, texts = sentencepiece_metadata()
    tokenizer = read_gguf_tokenizer(small_file)
    for case in texts:
        ids = tokenizer.encode(case["text"])
        assert ids == case["ids"], case["text"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == case["text"]


@pytest.fixture
def small_file(tmp_path: Path) -> GgufFile:
    file = GgufFile(write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA)))
    file.metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "</s>", "<think>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 4,
    }
    return file


def test_llama3_files_start_texts_with_bos_unless_told_otherwise(small_file: GgufFile) -> None:
    assert read_gguf_tokenizer(small_file).encode("ab") == [3, 2]
    small_file.metadata["tokenizer.ggml.add_bos_token"] = False
    small_file.metadata["tokenizer.ggml.add_eos_token"] = True
    assert read_gguf_tokenizer(small_file).encode("ab") == [2, 4]


def test_only_control_tokens_are_skipped_in_text(small_file: GgufFile) -> None:
    tokenizer = read_gguf_tokenizer(small_file)
    ids = tokenizer.encode("a<think>b</s>")
    assert ids == [3, 0, 5, 1, 4]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"
    assert tokenizer.decode(ids) == "<s>a<think>b</s>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not supported; suppor"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model None is not supported"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre 'viking' is not supported; sup"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre None is not supported"),
        (
            {"tokenizer.ggml.tokens": None, "tokenizer.ggml.merges": None},
            "tokenizer.ggml metadata lacks tokens, merges",
        ),
        ({"tokenizer.ggml.token_type": [1]}, "6 tokens, but 1 token types"),
        ({"tokenizer.ggml.bos_token_id": 6}, "bos_token_id 6 is outside the vocabulary of 6"),
        (
            {"tokenizer.ggml.bos_token_id": None},
            "texts get bos added, but there is no bos_token_id",
        ),
        ({"tokenizer.ggml.merges": ["a c"]}, "the merges do not fit the vocabulary"),
    ],
)
def test_metadata_that_cannot_be_used_is_refused(
    change: dict[str, Any], message: str, small_file: GgufFile
) -> None:
    changed = small_file.metadata | change
    small_file.metadata = {key: value for key, value in changed.items() if value is not None}
    with pytest.raises(ValueError, match=message) as error:
        read_gguf_tokenizer(small_file)
    assert str(error.value).startswith(str(small_file.path))


@pytest.mark.parametrize("declared", ["TokenizersBackend", "GPT2Tokenizer", "LlamaTokenizer"])
def test_saved_tokenizer_json_is_taken_as_it_stands(
    declared: str, tmp_path: Path, smollm2: Any
) -> None:
    """Whatever class its config declares; SmolLM2's own declares GPT2Tokenizer."""
    smollm2.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": declared}))
    saved = load_tokenizer(str(tmp_path))
    for case in SMOLLM2["texts"]:
        assert saved.encode(case["text"]) == case["ids"]
    assert saved.chat_template == smollm2.chat_template
    assert saved.eos_token_id == smollm2.eos_token_id
