"""Random requests in a pool far too small; `pytest tests/engine/test_soak.py --soak=10000`: many.

Priorities, timeouts, aborts, refusals, preemption by swap and by recompute, samples and beams, all
at once: invariants hold after each step, everybody ends, and what they get is what they would have
got alone.
"""

from collections import Counter

import pytest

from tests.conftest import assert_idle
from tests.engine.mixed_requests import essence
from tests.engine.soak import Soak

NUM_COMPARED = 60  # requests of a run, at most: those of the model alone take as long


@pytest.mark.parametrize(
    "pipelined",
    [pytest.param(False, id="in turn", marks=pytest.mark.slow), pytest.param(True, id="pipelined")],
)
def test_random_requests_under_pressure_get_what_they_would_get_alone(
    engine_with, monkeypatch, request, pipelined
):
    num_requests = request.config.getoption("--soak")
    engine = engine_with(
        block_size=4,
        num_blocks=56,
        max_num_seqs=8,
        max_num_waiting=8,
        preemption_mode="swap",
        swap_space_blocks=24,
        scheduling_policy="priority",
        pipelined=pipelined,
    )
    soak = Soak(engine, seed=num_requests)
    monkeypatch.setattr(engine.core, "clock", lambda: soak.now)
    soak.run(num_requests)
    assert_idle(engine)

    scheduler = engine.core.scheduler
    assert soak.outputs.keys() == soak.callers.keys()
    assert scheduler.counters.num_preemptions_by_swap > num_requests / 20
    assert (
        scheduler.counters.num_preemptions - scheduler.counters.num_preemptions_by_swap
        > num_requests / 50
    )
    assert soak.num_refused > 0
    reasons = Counter(
        out.finish_reason for output in soak.outputs.values() for out in output.outputs
    )
    assert reasons.keys() == {"stop", "length", "abort", "timeout"}
    assert all(output.error is None for output in soak.outputs.values())

    alone = engine_with()
    compared = list(soak.outputs)[:: max(1, num_requests // NUM_COMPARED)]
    for name in compared:
        caller, output = soak.callers[name], soak.outputs[name]
        [whole] = alone.generate([caller.prompt], caller.params, progress=False)
        ended_early = {"abort", "timeout"} & {out.finish_reason for out in output.outputs}
        if not ended_early:
            assert essence(output) == essence(whole), caller
        elif caller.can_stream:  # beams, and the best of several, may become others
            for out, complete in zip(output.outputs, whole.outputs, strict=True):
                assert complete.token_ids[: len(out.token_ids)] == out.token_ids, caller
