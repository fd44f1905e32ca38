"""Fast tokenizers of transformers: read from a directory, or wrapped around a `tokenizers` one."""

import os
from pathlib import Path
from typing import Any

from paged_jax.values import one_line

# transformers.PreTrainedTokenizerFast; the package has no type information.
Tokenizer = Any

# The engine checks lengths; a tokenizer's warning would only repeat it.
_NO_LIMIT = 1 << 62

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_hf_tokenizer(directory: Path) -> Tokenizer:
    """The directory's own tokenizer; nothing is fetched.

    Raises ValueError if there is none that transformers can load as a fast tokenizer.

    A tokenizer.json is taken as it stands. `AutoTokenizer` of transformers 5 would rebuild it for
    some classes: for SmolLM2's it forgets that numbers are split into digits.
    """
    if not any((directory / name).is_file() for name in _FILES):
        raise ValueError(f"{directory} has no tokenizer: none of {', '.join(_FILES)}")
    transformers = import_transformers()
    is_complete = (directory / "tokenizer.json").is_file()
    loader = transformers.PreTrainedTokenizerFast if is_complete else transformers.AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise bare Exceptions, among others
        raise ValueError(
            f"{directory}: transformers cannot load the tokenizer: {one_line(error)}"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"{directory}: {type(tokenizer).__name__} has no fast implementation; add a "
            "tokenizer.json (save_pretrained of a fast tokenizer writes it)"
        )
    # Otherwise decode deletes spaces that the model wrote.
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = _NO_LIMIT
    return tokenizer


def wrap(tokenizer: Any, **options: Any) -> Tokenizer:
    """A `tokenizers.Tokenizer` as a transformers tokenizer; options: special tokens, template."""
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=_NO_LIMIT,
        **options,
    )


def import_transformers() -> Any:
    """transformers, without its warning that torch is absent: only tokenizers are wanted.

    Imported on first use because it takes most of a second.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers
