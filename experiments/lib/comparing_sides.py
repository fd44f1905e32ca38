"""The two configurations that are compared, and the rounds in which they serve."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import jax
from absl import flags

from experiments.lib import engine_flags
from experiments.lib.driver import ServedRun, require_fitting, serve
from experiments.lib.paired import in_turn
from experiments.lib.workload_flags import Workload
from paged_jax import Engine, SamplingParams

BASELINE, CANDIDATE = SIDES = ("baseline", "candidate")


def parse_side(name: str, common: str, text: str) -> flags.FlagValues:
    """A side's engine flags; ValueError says which side has one that is wrong."""
    values = flags.FlagValues()
    engine_flags.define(values)
    try:
        rest = values([name, *shlex.split(common), *shlex.split(text)])
    except (flags.Error, ValueError) as error:
        raise ValueError(f"--{name}={text!r}: {error}") from None
    if len(rest) > 1:
        raise ValueError(f"--{name}={text!r}: unexpected {rest[1]!r}; flags start with --")
    return values


@contextmanager
def engines(sides: Mapping[str, flags.FlagValues], *, seed: int) -> Iterator[dict[str, Engine]]:
    """Both engines, with all their steps compiled."""
    if jax.default_backend() != "cpu" and any(
        values["num_blocks"].value is None for values in sides.values()
    ):
        raise ValueError(
            "both pools are in the device's memory, and the first would take what is free: give "
            "each side its --num_blocks"
        )
    with ExitStack() as stack:
        built = {}
        for name, values in sides.items():
            try:
                built[name] = engine_flags.make_engine(values, seed=seed)
            except ValueError as error:
                raise ValueError(f"the {name}: {error}") from None
            stack.callback(built[name].close)
        for engine in built.values():
            engine.warm_up()
        yield built


def check_fitting(built: Mapping[str, Engine], workload: Workload, params: SamplingParams) -> None:
    """ValueError if a side can never hold one of the requests."""
    for name, engine in built.items():
        try:
            require_fitting(engine, workload.requests, params)
        except ValueError as error:
            raise ValueError(f"the {name}: {error}") from None


def serve_in_turn(
    built: Mapping[str, Engine], workload: Workload, params: SamplingParams, num_rounds: int
) -> dict[str, list[ServedRun]]:
    """Each side's runs of the same workload. The first of each warms up: its times mean nothing.

    Who goes first alternates. No run finds in the prefix cache what an earlier one has left there.
    """
    runs: dict[str, list[ServedRun]] = {name: [] for name in SIDES}
    for number, name in in_turn(BASELINE, CANDIDATE, num_rounds + 1):
        runs[name].append(
            serve(
                built[name],
                workload.requests,
                replace(params, cache_salt=f"round {number}"),
                priorities=workload.priorities,
                timeout_s=workload.timeout_s,
            )
        )
    return runs


def timed(runs: Sequence[ServedRun]) -> Sequence[ServedRun]:
    """Those whose times count."""
    return runs[1:]
