"""How an experiment runs: flags to options, a grid of points to rows, an exit code.

README.md shows an experiment that is made of these parts.
"""

import contextlib
import functools
import hashlib
import multiprocessing
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from absl import app, flags, logging
from tqdm import tqdm

from experiments.lib import options, reporting
from experiments.lib.options import Options
from pallas_kernels import extras

_POINTS = "points.pickle"  # points that are done, in the folder of an experiment that is not


def run(main: Callable[..., int | None], *configs: type[Any]) -> NoReturn:
    """Parse the flags of `configs`, call `main` with an instance of each, and exit.

    One of `configs` is an `Options`: its folder is there before `main` runs, and the last line
    names it. The exit code is what `main` returns (None: 0).

    Bad input, which is a flag that absl refuses or a ValueError, is one line on stderr and exit
    code 2; `--verbosity=1` adds the traceback. Any other exception is a fault and keeps its
    traceback.
    """
    for name in [name for config in configs for name in options.define(config)]:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

    def parse_flags(argv: list[str]) -> list[str]:
        try:
            return list(flags.FLAGS(argv))
        except flags.Error as error:
            _exit_on_bad_input(error)
        except SystemExit:
            sys.exit(0)  # the help flags, for which absl exits with 1

    def guarded_main(argv: list[str]) -> int | None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # absl's default shows JAX's search for devices
        try:
            if len(argv) > 1:
                raise ValueError(f"unexpected argument {argv[1]!r}; flags start with --")
            extras.check_platforms()
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

    Points that an interrupted run has done with the same options and code, on the same kind of
    machine, are not measured again: a row depends on these and on its point alone. `measure` may be
    a method of an object that holds an engine.

    With more `processes` than one (None: one for each core), points must not depend on each other,
    and `measure`, points and rows travel between processes: they are plain data and functions of a
    module. Points that take longest should come first.
    """
    keys = _keys(measure, points, config)
    with (Path(config.out_dir) / _POINTS).open("a+b") as store:
        done = dict(_read(store))
        missing = {i: points[i] for i, key in enumerate(keys) if key not in done}
        num_done = len(points) - len(missing)
        with (
            tqdm(total=len(points), desc=description, unit=unit, initial=num_done) as bar,
            contextlib.closing(_measured(measure, missing, processes)) as rows,
        ):
            for index, row in rows:
                done[keys[index]] = pickle.dumps(row)
                pickle.dump((keys[index], done[keys[index]]), store)
                store.flush()
                bar.update()
    return [pickle.loads(done[key]) for key in keys]


def _measured[Point, Row](
    measure: Callable[[Point], Row], points: dict[int, Point], processes: int | None
) -> Generator[tuple[int, Row], None, None]:
    """Each point's index and row, as they are done; a fault ends all at once."""
    processes = min(processes or _num_cores(), len(points))
    if processes <= 1:
        for index, point in points.items():
            yield index, measure(point)
        return
    # Not forked: a process that runs JAX's threads must not be.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(measure, point): index for index, point in points.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _num_cores() -> int:
    """The cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _keys(measure: Callable[..., Any], points: Sequence[object], config: Options) -> list[str]:
    """For each point a digest of all that its row depends on; equal points are told apart."""
    given = options.as_dict(config) | {"out_dir": None, "processes": None}
    machine = reporting.environment() | {"git_commit": None}
    measure = getattr(measure, "__func__", measure)  # without the object that it is a method of
    seen: Counter[bytes] = Counter()
    keys = []
    for point in points:
        pickled = _code() + pickle.dumps((measure, point, given, machine))
        keys.append(f"{hashlib.sha256(pickled).hexdigest()} {seen[pickled]}")
        seen[pickled] += 1
    return keys


@functools.cache
def _code() -> bytes:
    """A digest of the project's sources and of the script that runs."""
    root = Path(__file__).parents[2]
    packages = ("experiments", "paged_jax", "pallas_kernels")
    files = sorted(path for package in packages for path in (root / package).rglob("*.py"))
    script = Path(sys.argv[0])
    contents = [path.read_bytes() for path in (*files, script) if path.is_file()]
    return hashlib.sha256(b"".join(contents)).digest()


def _read(store: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Keys and pickled rows of the points that are done; what is cut off after them is removed."""
    store.seek(0)
    end = 0
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(store)
            end = store.tell()
    store.truncate(end)
