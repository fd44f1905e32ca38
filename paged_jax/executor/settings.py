"""JAX's settings, which belong to the process or to a `with` block: what an engine makes of them.

Kernels and steps keep to JAX's default rules for types and shapes, and samples to one random number
generator, so most settings change nothing. A few leave an engine no way to run: it refuses them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import jax

# Settings `jax_…`, and context managers `jax.…`, that a compiled step is good for one value of.
COMPILED_FOR = (
    "debug_infs",
    "debug_nans",
    "default_device",
    "default_matmul_precision",
    "default_prng_impl",
    "enable_checks",
    "enable_custom_prng",
    "enable_x64",
    "check_tracer_leaks",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "softmax_custom_jvp",
    "threefry_partitionable",
)


def check_settings() -> None:
    """ValueError, in one line, for a setting under which no step can run."""
    for name in ("jax_transfer_guard_host_to_device", "jax_transfer_guard_device_to_host"):
        guard = getattr(jax.config, name) or jax.config.jax_transfer_guard or "allow"
        if guard.startswith("disallow"):
            raise ValueError(
                f"{name} is {guard!r}, but each step takes its arrays from the host and gives its "
                "tokens back; set it to 'allow' or 'log'"
            )
    if jax.config.jax_disable_jit and jax.config.jax_debug_infs:
        raise ValueError(
            "jax_debug_infs with jax_disable_jit checks each operation, and attention masks by "
            "minus infinity; turn one of them off"
        )
    device, backend = jax.config.jax_default_device, jax.default_backend()
    platform = getattr(device, "platform", device)
    if device is not None and platform != backend:
        raise ValueError(
            f"jax_default_device is {device}, but kernels are chosen for JAX's default backend "
            f"{backend!r}; choose the backend itself: JAX_PLATFORMS={platform}"
        )


def current_device() -> Callable[[], AbstractContextManager[None]]:
    """Makes blocks in which the default device is what it is now."""
    device = jax.config.jax_default_device
    return nullcontext if device is None else partial(jax.default_device, device)


def current_settings() -> Callable[[], AbstractContextManager[None]]:
    """Makes blocks, for any thread, in which `COMPILED_FOR` are what they are now in this one."""
    values = {name: getattr(jax.config, f"jax_{name}") for name in COMPILED_FOR}

    @contextmanager
    def block() -> Iterator[None]:
        with ExitStack() as stack:
            for name, value in values.items():
                stack.enter_context(getattr(jax, name)(value))
            yield

    return block
