"""A cost model fitted to measured iterations of a real executor.

An executor with static shapes takes the same time for a bucket of rows or tokens, whatever fills
it. So each bucket has a time of its own; other terms grow with the contents. An iteration's time is
the sum of

    decode N                   a decode step of N rows, and the host's work for them
    decode context             for each KV slot that decodes attend to
    prefill N                  a prefill step of N tokens, likewise
    prefill pairs              for each (query, key) pair of its attention
    head N                     sampling after the prompts that it completes, in N rows
    copied blocks              for each block copied
    swapped blocks             for each block moved to host memory or back

by a least-squares fit in which no term is negative, so that no predicted time is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from paged_jax.executor.buckets import bucket_of
from paged_jax.simulation.cost_model import StepWork

Measured = tuple[StepWork, float]  # an iteration's work, and the seconds that it took

# Errors count relative to the prediction, by their square; beyond this limit they count by their
# distance (Huber), so that a step that was held up is outvoted.
_OUTLIER = 0.2
_NUM_ROUNDS = 20


@dataclass(frozen=True)
class StepBuckets:
    """The static sizes that an executor pads its steps to, ascending."""

    decode: tuple[int, ...]  # rows
    prefill: tuple[int, ...]  # tokens
    head: tuple[int, ...]  # rows

    def features(self, work: StepWork) -> dict[str, float]:
        """The terms of this module's docstring for one iteration, by name."""
        found: dict[str, float] = {}
        if work.num_decodes:
            found[f"decode {_bucket('decode', self.decode, work.num_decodes)}"] = 1.0
            found["decode context"] = work.decode_context
        if work.prefills:
            found[f"prefill {_bucket('prefill', self.prefill, work.num_prefill_tokens)}"] = 1.0
            found["prefill pairs"] = work.prefill_pairs
        if work.num_first_samples:
            found[f"head {_bucket('head', self.head, work.num_first_samples)}"] = 1.0
        if work.num_copied_blocks:
            found["copied blocks"] = work.num_copied_blocks
        if work.num_swapped_blocks:
            found["swapped blocks"] = work.num_swapped_blocks
        return found


def _bucket(step: str, buckets: Sequence[int], size: int) -> int:
    if size > buckets[-1]:
        raise ValueError(f"a {step} step of {size}: the executor's largest is {buckets[-1]}")
    return bucket_of(buckets, size)


@dataclass(frozen=True)
class Residuals:
    """Errors of predictions, relative to the measured times, over the fitted iterations."""

    num_iterations: int
    mean_relative: float  # signed: above 0 where more was predicted than measured
    median_absolute: float
    p90_absolute: float
    total_relative: float  # error of the sum of all iterations


@dataclass(frozen=True)
class CalibratedCost:
    """Seconds by feature; a feature that was never measured cannot be predicted."""

    buckets: StepBuckets
    seconds: Mapping[str, float]

    def step_s(self, work: StepWork) -> float:
        """ValueError for a step that the calibration has not seen."""
        features = self.buckets.features(work)
        if unknown := features.keys() - self.seconds.keys():
            raise ValueError(
                f"{', '.join(sorted(unknown))}: no such step was measured; calibrate with "
                "workloads that have some"
            )
        return sum(self.seconds[name] * value for name, value in features.items())

    def swap_s(self, num_blocks: int, block_size: int) -> float:
        """KeyError if no swap was measured."""
        return num_blocks * self.seconds["swapped blocks"]

    @classmethod
    def fit(cls, measured: Sequence[Measured], buckets: StepBuckets) -> Self:
        """Fit by least squares; ValueError if nothing was measured."""
        if not measured:
            raise ValueError("no iterations were measured, so there is nothing to fit")
        rows = [buckets.features(work) for work, _ in measured]
        names = sorted(set().union(*rows))
        matrix = np.array([[row.get(name, 0.0) for name in names] for row in rows])
        times = np.array([seconds for _, seconds in measured])
        if not (times > 0).all():
            raise ValueError(f"an iteration of {times.min()} s was measured; all must take time")
        scale = (matrix / times[:, None]).max(axis=0)  # so that slots and steps are of one size
        matrix /= scale
        expected, trust = times, np.ones(len(times))
        solution: NDArray[np.float64] = np.zeros(len(names))
        for _ in range(_NUM_ROUNDS):
            weights = np.sqrt(trust) / expected
            solution, _ = nnls(matrix * weights[:, None], times * weights)
            expected = np.maximum(matrix @ solution, times / 10)
            trust = np.minimum(1, _OUTLIER / np.maximum(np.abs(times / expected - 1), 1e-12))
        return cls(buckets, dict(zip(names, (solution / scale).tolist(), strict=True)))

    def residuals(self, measured: Sequence[Measured]) -> Residuals:
        times = np.array([seconds for _, seconds in measured])
        predicted = np.array([self.step_s(work) for work, _ in measured])
        relative = predicted / times - 1
        return Residuals(
            num_iterations=len(times),
            mean_relative=float(relative.mean()),
            median_absolute=float(np.median(np.abs(relative))),
            p90_absolute=float(np.percentile(np.abs(relative), 90)),
            total_relative=float(predicted.sum() / times.sum() - 1),
        )

    def save(self, path: str | Path, **facts: Any) -> None:
        """Write it as JSON, with `facts` about the measurement."""
        content = {"buckets": asdict(self.buckets), "seconds": dict(self.seconds), **facts}
        Path(path).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote; ValueError if it holds something else."""
        try:
            content = json.loads(Path(path).read_text())
            buckets = {name: tuple(sizes) for name, sizes in content["buckets"].items()}
            return cls(StepBuckets(**buckets), dict(content["seconds"]))
        except OSError as error:
            raise ValueError(f"cannot read the calibration {path}: {error.strerror}") from None
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no calibration: {error!r}") from None
