"""What the experiments on the paper's figures share: set-ups, systems, requests, searches."""

import re
from dataclasses import replace

import pytest
from absl import flags

from experiments.lib.options import define, from_flags
from experiments.paper import simulations
from experiments.paper.fig01_capacity import memory_shares, throughput_by_batch
from experiments.paper.fig14_parallel_and_beam import Config
from experiments.paper.fig18_block_size import Row, best_block_sizes, held_figures
from experiments.paper.requests import LENGTHS, draw, note_on_length, poisson_requests
from experiments.paper.setups import OPT_13B, SETUPS, SYSTEMS
from experiments.paper.simulations import Load, Point, find_sustained


def load(system: str = "paged", duration_s: float = 40.0, **options) -> Load:
    return Load(system, OPT_13B, options.pop("lengths", "alpaca"), duration_s, **options)


# Set-ups and systems


@pytest.mark.parametrize(
    ("model", "slots"), [("OPT-13B", "15.7"), ("OPT-66B", "9.7"), ("OPT-175B", "60.1")]
)
def test_the_papers_set_ups_hold_the_papers_slots(model, slots):
    assert f"{SETUPS[model].num_slots / 1000:.1f}" == slots


def test_memory_for_kv_is_that_of_the_papers_table_as_far_as_it_says():
    for setup in SETUPS.values():
        assert round(setup.kv_bytes / 2**30) == setup.kv_gib


def test_systems_differ_in_memory_and_batching_alone():
    configs = [system.config(OPT_13B, 16) for system in SYSTEMS.values()]
    first = configs[0]
    for config in configs[1:]:
        same = replace(
            config,
            memory_policy=first.memory_policy,
            scheduling_policy=first.scheduling_policy,
        )
        assert same == first
    assert len({(c.memory_policy, c.scheduling_policy) for c in configs}) == len(SYSTEMS)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--model=OPT-30B", "OPT-13B|OPT-66B|OPT-175B"),
        ("--systems=paged,orca_min", "--systems takes faster_transformer"),
        ("--duration_s=0", "not number >= 1"),
    ],
)
def test_flags_refuse_what_cannot_be_simulated(flag, message):
    values = flags.FlagValues()
    define(Config, values)

    def parse() -> Config:
        values(["fig14", flag])
        return from_flags(Config, values)

    with pytest.raises((ValueError, flags.Error), match=message):
        parse()


def test_only_paging_pays_for_blocks():
    paged, contiguous = (SYSTEMS[name].cost(OPT_13B) for name in ("paged", "orca_max"))
    assert paged.block_overhead_slots > 0
    assert contiguous == paged.contiguous


# Requests


@pytest.mark.parametrize("lengths", ["alpaca", "sharegpt_served", "shared_prefixes"])
def test_requests_are_the_same_at_any_rate_and_for_any_number(lengths):
    assert lengths in LENGTHS
    assert draw(lengths, 20, 2048, 3) == draw(lengths, 50, 2048, 3)[:20]
    assert draw(lengths, 20, 2048, 3) != draw(lengths, 20, 2048, 4)
    options = {"duration_s": 10.0, "max_model_len": 2048, "seed": 3}
    slow = poisson_requests(lengths, rate=2.0, **options)
    fast = poisson_requests(lengths, rate=8.0, **options)
    assert [r.prompt_token_ids for r in slow] == [r.prompt_token_ids for r in fast[: len(slow)]]
    assert [r.arrival_s for r in slow] == pytest.approx(
        [4 * r.arrival_s for r in fast[: len(slow)]]
    )
    assert fast[-1].arrival_s < 10.0
    assert all(r.num_prompt_tokens + r.max_tokens <= 2048 for r in fast)


def test_requests_that_do_not_fit_are_left_out_and_counted():
    assert max(r.num_prompt_tokens + r.max_tokens for r in draw("alpaca", 99, 100, 0)) <= 100
    note = note_on_length("alpaca", 100, 0)
    [percent] = re.findall(r"alpaca: ([\d.]+) % are longer than 100 tokens and left out", note)
    assert 15 < float(percent) < 40
    with pytest.raises(ValueError, match="too few of the requests fit in 30 tokens"):
        draw("alpaca", 99, 30, 0)


def test_some_requests_begin_alike_where_prefixes_are_shared():
    requests = draw("shared_prefixes", 60, 2048, 0)
    beginnings = [request.prompt_token_ids[:16] for request in requests]
    assert 2 <= len(set(beginnings)) <= 16
    assert len({request.prompt_token_ids for request in requests}) == len(requests)


# Simulated runs


def test_a_run_to_its_end_leaves_out_nobody_and_a_cut_one_says_whom():
    overload = 30.0
    whole, cut = (load("orca_max", 5.0).simulate(overload, cut=cut) for cut in (False, True))
    assert whole.num_unfinished == 0
    assert cut.num_unfinished > 0
    assert len(whole.requests) == len(cut.requests)
    assert whole.normalised_latency_s > cut.normalised_latency_s
    shares = [share for name, share in whole.memory_shares.items() if name != "free"]
    assert 0 < sum(shares) <= 1


def test_a_load_does_not_depend_on_what_ran_before():
    first = load("orca_oracle", 8.0).simulate(10.0)
    load("paged", 8.0).simulate(10.0)
    assert load("orca_oracle", 8.0).simulate(10.0) == first


def fake_point(rate: float, latency: float) -> Point:
    return Point(rate, latency, 1.0, 0.5, 0)


@pytest.mark.parametrize("knee", [0.3, 7.0, 150.0])
def test_the_search_finds_where_latency_passes_the_objective(monkeypatch, knee):
    rates = []

    def fake(load, rate):
        rates.append(rate)
        return fake_point(rate, 0.05 * (rate / knee) ** 3)

    monkeypatch.setattr(simulations, "serve_at", fake)
    found = find_sustained(load(), 0.05, precision=0.02, fractions=(0.5,))
    assert knee / 1.02 <= found.rate <= knee
    assert len(rates) == len(set(rates)), "a rate is run once"
    assert [point.rate for point in found.points] == sorted(rates)
    assert 0.5 * found.rate in rates


def test_an_objective_that_is_never_met_has_no_rate(monkeypatch):
    monkeypatch.setattr(simulations, "serve_at", lambda load, rate: fake_point(rate, 9.0))
    found = find_sustained(load(), 0.05)
    assert found.rate is None
    assert found.points


def test_paging_batches_more_than_orca_which_batches_by_what_it_reserves():
    points = {
        name: load(name, 30.0, lengths="sharegpt_served").simulate(4.0, cut=True)
        for name in ("orca_max", "orca_pow2", "orca_oracle", "paged")
    }
    sizes = [points[name].mean_batch_size for name in points]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 1.5 * sizes[-2]
    # 15.7K slots hold seven reservations of 2048.
    assert points["orca_max"].mean_batch_size <= 7


# Figures


def test_waste_and_tables_are_shares_of_what_is_held():
    waste, tables = held_figures(
        block_size=16,
        num_slots=2000,
        shares={"token_states": 0.4, "reserved": 0.05, "internal": 0.05, "free": 0.5},
        num_seqs=2.0,
        max_model_len=100,
        token_bytes=50,
    )
    assert waste == pytest.approx(10)
    # Two tables of seven entries of four bytes.
    assert tables == pytest.approx(100 * 56 / 50_000)


def test_the_best_block_sizes_are_those_of_low_latency():
    def row(size: int, latency: float | None) -> Row:
        return Row("real", "alpaca", size, 1.0, latency, 0.0, 0.0, None, 0)

    rows = [row(1, 200.0), row(16, 100.0), row(32, 104.0), row(64, 106.0), row(256, None)]
    assert best_block_sizes(rows) == [16, 32]


def test_figure_1_fills_the_memory_and_batching_pays():
    shares = memory_shares(OPT_13B)
    assert sum(shares.values()) == pytest.approx(100)
    assert shares["weights"] == pytest.approx(60, abs=1)
    points = throughput_by_batch(OPT_13B, 400, 16, 40)
    speeds = [point.tokens_per_s for point in points]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 10 * speeds[0]
