"""How an experiment runs: flags to options, a grid of points to rows, an exit code.

@dataclass(frozen=True, kw_only=True)
class Config(Options): ...                        # its flags

def measure(point: Point) -> Row: ...             # one point of its grid

def main(config: Config) -> None:
    rows = grid(measure, points(config), config, unit="system")
    report("What it shows", rows, config)

if __name__ == "__main__":
    run(main, Config)
"""

import functools
import hashlib
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging
from tqdm import tqdm

from experiments.lib import options, reporting
from experiments.lib.options import Options

_POINTS = "points.pickle"  # points that are done, in the folder of an experiment that is not


def run(main: Callable[..., int | None], *configs: type[Any]) -> NoReturn:
    """Parse the flags of `configs`, call `main` with an instance of each, and exit.

    The exit code is what `main` returns (None: 0), or 2 on bad input, which is one line on stderr:
    a flag that absl refuses, or a ValueError; `--verbosity=1` adds the traceback. Any other
    exception is a fault and keeps its traceback. One of `configs` is an `Options`: its folder is
    there before `main` runs, and is named in the last line.
    """
    for name in [name for config in configs for name in options.define(config)]:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

    def parse_flags(argv: list[str]) -> list[str]:
        try:
            rest: list[str] = flags.FLAGS(argv)
        except flags.Error as error:
            _exit_on_bad_input(error)
        except SystemExit:
            sys.exit(0)  # the help flags, for which absl exits with 1
        if len(rest) > 1:
            _exit_on_bad_input(ValueError(f"unexpected argument {rest[1]!r}; flags start with --"))
        return rest

    def guarded_main(_: list[str]) -> int | None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # absl's default shows JAX's search for devices
        try:
            given = [options.from_flags(config) for config in configs]
            own = next(index for index, each in enumerate(given) if isinstance(each, Options))
            given[own] = replace(given[own], out_dir=given[own].out_dir or default_out_dir())
            out_dir = reporting.make_out_dir(given[own].out_dir)
            code = main(*given)
        except ValueError as error:
            _exit_on_bad_input(error)
        (out_dir / _POINTS).unlink(missing_ok=True)
        print(f"Results are in {out_dir}")
        return code

    app.run(guarded_main, flags_parser=parse_flags)
    raise AssertionError("app.run exits")


def default_out_dir() -> str:
    """out/<name of the script that runs>; the figures of the paper go without their number."""
    name = Path(sys.argv[0]).stem
    return f"out/{name.partition('_')[2] if name.startswith('fig') else name}"


def _exit_on_bad_input(error: Exception) -> NoReturn:
    logging.debug("bad input", exc_info=error)
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


def grid[Point, Row](
    measure: Callable[[Point], Row],
    points: Sequence[Point],
    config: Options,
    *,
    unit: str,
    description: str | None = None,
    processes: int | None = 1,
) -> list[Row]:
    """`measure` of each point, in their order, with a progress bar.

    Points that an interrupted run with the same options and the same code has done are not measured
    again. A row depends on its point and the options alone; `measure` may be a method of an object
    that holds an engine. With more `processes` than one (None: one for each core), points must not
    depend on each other, and `measure`, points and rows travel between processes: they are plain
    data and functions of a module. Points that take longest should come first.
    """
    store = Path(config.out_dir) / _POINTS
    done = dict(_read(store))
    keys = [_key(measure, point, config) for point in points]
    missing = [index for index, key in enumerate(keys) if key not in done]
    bar = tqdm(total=len(points), desc=description, unit=unit, initial=len(points) - len(missing))
    with bar, store.open("ab") as file:
        for index, row in _measured(measure, points, missing, processes):
            done[keys[index]] = row
            pickle.dump((keys[index], row), file)
            file.flush()
            bar.update()
    return [done[key] for key in keys]


def _measured(
    measure: Callable[[Any], Any], points: Sequence[Any], missing: list[int], processes: int | None
) -> Iterator[tuple[int, Any]]:
    """(index, row) of the missing points, as they are done."""
    processes = min(processes or len(os.sched_getaffinity(0)), len(missing))
    if processes <= 1:
        yield from ((index, measure(points[index])) for index in missing)
        return
    with _pool(processes) as pool:
        futures = {pool.submit(measure, points[index]): index for index in missing}
        for future in as_completed(futures):
            yield futures[future], future.result()  # a fault ends the run at once


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    # Not forked: a process that runs JAX's threads must not be.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _key(measure: Callable[..., Any], point: object, config: Options) -> str:
    """A digest of all that a point's row depends on."""
    shared = options.as_dict(config) | {"out_dir": None, "processes": None}
    measure = getattr(measure, "__func__", measure)  # without the object that it is a method of
    return hashlib.sha256(_code() + pickle.dumps((measure, point, shared))).hexdigest()


@functools.cache
def _code() -> bytes:
    """A digest of the project's sources."""
    root = Path(__file__).parents[2]
    packages = ("experiments", "paged_jax", "pallas_kernels")
    files = sorted(path for package in packages for path in (root / package).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).digest()


def _read(store: Path) -> Iterator[tuple[str, Any]]:
    """Keys and rows of the points that are done; the last one may have been cut off."""
    if not store.exists():
        return
    with store.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return
