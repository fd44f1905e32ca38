"""Tokenizers from Hugging Face directories, and the byte tokenizer that is saved into one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.loading import build_byte_tokenizer, load_model, load_tokenizer
from paged_jax.models.params import expected_shapes
from tests.loading.loading_models import LLAMA, random_tensors, write_directory

BYTES = build_byte_tokenizer()


@given(st.text())
def test_byte_tokens_are_the_bytes(text: str) -> None:
    assert BYTES.encode(text) == list(text.encode())
    assert BYTES.decode(list(text.encode())) == text


def test_byte_tokenizer_special_tokens() -> None:
    assert len(BYTES) == 259
    assert (BYTES.bos_token_id, BYTES.eos_token_id, BYTES.pad_token_id) == (256, 257, 258)
    assert BYTES.encode("a<|eos|>\n<|bos|>") == [97, 257, 10, 256]
    assert BYTES.decode([97, 257], skip_special_tokens=True) == "a"


def test_byte_tokenizer_is_saved_and_loaded(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model", LLAMA, {})
    BYTES.save_pretrained(path)
    loaded = load_tokenizer(str(path))
    text = "def f(x):\n    return 'é' + x  # 中文 🙂<|eos|>"
    assert loaded.encode(text) == BYTES.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token_id == 257
    messages = [{"role": "user", "content": "Hi"}]
    prompt = loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "user: Hi\nassistant: "


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model", LLAMA, {})
    with pytest.raises(ValueError, match=r"has no tokenizer: none of tokenizer.json"):
        load_tokenizer(str(path))


def test_damaged_tokenizer_json(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "model", LLAMA, {})
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="transformers cannot load the tokenizer: ") as error:
        load_tokenizer(str(path))
    assert "\n" not in str(error.value)


def test_directory_loads_as_a_whole(tmp_path: Path) -> None:
    hf = LLAMA | {"vocab_size": 259}
    tensors = random_tensors(hf)
    path = write_directory(tmp_path / "model", hf, tensors)
    BYTES.save_pretrained(path)
    model = load_model(str(path), "bfloat16")
    assert model.config.vocab_size == len(model.tokenizer) == 259
    assert model.config.name == "model"
    assert {name: array.shape for name, array in model.weights.items()} == expected_shapes(
        model.config
    )
    assert {array.dtype.name for array in model.weights.values()} == {"bfloat16"}
