"""What XLA has to be told before JAX starts it."""

import os

_OPTION = "--xla_backend_extra_options"


def prefer_vector_loops() -> None:
    """Keep XLA's CPU compiler from unrolling loops that it could vectorise.

    Unrolled, the gather of a KV block copies one float at a time, at a third of the speed. A user's
    own extra options are left alone. Has no effect once JAX has started its backend, and none on a
    GPU.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _OPTION not in flags:
        option = f"{_OPTION}=xla_cpu_disable_loop_unrolling"
        os.environ["XLA_FLAGS"] = f"{flags} {option}".strip()
