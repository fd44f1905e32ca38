"""Functions that workers call in their tests."""

import os
import signal
import subprocess
import time


def add(a: int, b: int) -> int:
    return a + b


def process() -> int:
    return os.getpid()


def wait_forever(pid_path: str) -> None:
    """Hang, with a child process; both process ids are written to a file."""
    child = subprocess.Popen(["sleep", "1000"])
    with open(pid_path, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def fail(text: str) -> None:
    raise KeyError(text)


def die() -> None:
    print("the last words")
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(code: int) -> None:
    os._exit(code)
