"""What the optional extras of pyproject.toml bring, and what to type where one is missing."""

import importlib.util
import os

CUDA_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


def command(extra: str) -> str:
    """The command, to be typed in the repository, that installs an extra."""
    return f'pip install -e ".[{extra}]"'


def is_installed(module: str) -> bool:
    """Whether a module can be imported; it is not, but the packages that hold it are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that would hold it
        return False


def missing_for_gpu() -> str | None:
    """Why JAX cannot run on an NVIDIA GPU, with what to install, in one line; None if it can."""
    if any(map(is_installed, CUDA_PLUGINS)):
        return None
    return (
        "JAX needs its CUDA plugin to run on a GPU; install it with: "
        f"{command('cuda12')} (cuda13 for CUDA 13)"
    )


def check_platforms() -> None:
    """ValueError where JAX_PLATFORMS asks for an NVIDIA GPU and JAX has no plugin for one."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if "cuda" in platforms.split(",") and (reason := missing_for_gpu()):
        raise ValueError(f"JAX_PLATFORMS is {platforms}: {reason}")
