import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.workloads import (
    PUBLISHED_LENGTHS,
    SERVED_LENGTHS,
    Lengths,
    LogNormal,
    Uniform,
    VocabRange,
    WorkloadRequest,
    arrive_as_traced,
    arrive_gamma,
    arrive_poisson,
    build_workload,
    length_requests,
    limit_lengths,
    speedup_to,
)

VOCAB = VocabRange(3, 50)


def encode(text: str) -> list[int]:
    return list(text.encode())


def request(num_prompt_tokens: int, max_tokens: int, arrival_s: float = 0.0) -> WorkloadRequest:
    return WorkloadRequest(tuple(range(num_prompt_tokens)), max_tokens, arrival_s=arrival_s)


# Lengths


@pytest.mark.parametrize("name", PUBLISHED_LENGTHS)
def test_published_lengths_have_the_published_means(name):
    lengths = PUBLISHED_LENGTHS[name]
    rng = np.random.default_rng(0)
    for distribution in (lengths.prompt, lengths.output):
        drawn = distribution.draw(rng, 200_000)
        assert min(drawn) >= 1
        assert np.mean(drawn) == pytest.approx(distribution.mean, rel=0.02)


def test_served_lengths_keep_the_published_means_without_those_that_do_not_fit():
    """And running requests come to hold what they did in the paper's Figures 2 and 13."""
    lengths, rng = SERVED_LENGTHS["sharegpt_served"], np.random.default_rng(0)
    prompts = np.array(lengths.prompt.draw(rng, 300_000))
    outputs = np.array(lengths.output.draw(rng, 300_000))
    fits = prompts + outputs <= 2048
    prompts, outputs = prompts[fits], outputs[fits]
    assert 0.01 < 1 - np.mean(fits) < 0.03
    assert np.mean(prompts) == pytest.approx(161.31, rel=0.01)
    assert np.mean(outputs) == pytest.approx(337.99, rel=0.01)
    # A request runs about as long as its output is.
    in_the_end = np.average(prompts + outputs, weights=outputs)
    paper = [(20.4 + 13.3, 7.00), (26.8 + 17.9, 9.81), (38.2 + 25.2, 13.62)]
    of_systems = [15_728 * percent / 100 / batch_size for percent, batch_size in paper]
    assert in_the_end == pytest.approx(np.mean(of_systems), rel=0.01)


def test_uniform_lengths_reach_both_ends():
    assert set(Uniform(2, 5).draw(np.random.default_rng(0), 200)) == {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LogNormal(0.5, 1), "mean length .* got 0.5"),
        (lambda: LogNormal(math.nan, 1), "got nan"),
        (lambda: LogNormal(10, -1), "sigma .* got -1"),
        (lambda: Uniform(5, 4), r"low=5, high=4"),
        (lambda: Uniform(0, 4), r"low=0"),
        (lambda: VocabRange(4, 4), r"low=4, high=4"),
        (lambda: WorkloadRequest((), 1), "at least one prompt token"),
        (lambda: WorkloadRequest((1,), 0), "at least one output token, got 0"),
        (lambda: LogNormal(9e6, 3).draw(np.random.default_rng(0), 100), "lower its sigma"),
    ],
)
def test_impossible_distributions_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_lengths_and_prompts_depend_on_the_seed_alone():
    lengths = Lengths(Uniform(1, 40), Uniform(1, 40))
    first = list(length_requests(lengths, 20, vocab=VOCAB, seed=1))
    assert first == list(length_requests(lengths, 20, vocab=VOCAB, seed=1))
    assert first != list(length_requests(lengths, 20, vocab=VOCAB, seed=2))
    assert [r.num_prompt_tokens for r in first] != [r.max_tokens for r in first]
    assert all(3 <= token < 50 for r in first for token in r.prompt_token_ids)


# Arrivals


def test_poisson_arrivals_have_the_rate_and_scale_with_it():
    requests = [request(1, 1)] * 4000
    slow = [r.arrival_s for r in arrive_poisson(requests, rate=2.0, seed=0)]
    fast = [r.arrival_s for r in arrive_poisson(requests, rate=4.0, seed=0)]
    assert slow[-1] == pytest.approx(2000, rel=0.05)
    assert slow == sorted(slow)
    assert slow == pytest.approx([2 * arrival for arrival in fast])
    assert np.std(np.diff(slow)) == pytest.approx(0.5, rel=0.1)


def test_poisson_arrivals_do_not_depend_on_how_many_follow():
    few = arrive_poisson([request(1, 1)] * 5, rate=1.0, seed=7)
    many = arrive_poisson([request(1, 1)] * 50, rate=1.0, seed=7)
    assert few == many[:5]
    assert few != arrive_poisson([request(1, 1)] * 5, rate=1.0, seed=8)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_arrivals_have_the_rate_and_the_spread(cv):
    requests = [request(1, 1)] * 20_000
    times = np.array([r.arrival_s for r in arrive_gamma(requests, rate=2.0, cv=cv, seed=0)])
    gaps = np.diff(times, prepend=0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.5, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_gamma_arrivals_scale_with_the_rate_and_are_poissons_at_a_cv_of_1():
    requests = [request(1, 1)] * 50
    slow = [r.arrival_s for r in arrive_gamma(requests, rate=1.0, cv=3.0, seed=7)]
    fast = [r.arrival_s for r in arrive_gamma(requests[:9], rate=4.0, cv=3.0, seed=7)]
    assert fast == pytest.approx([arrival / 4 for arrival in slow[:9]])
    poisson = arrive_poisson(requests, rate=2.0, seed=7)
    assert arrive_gamma(requests, rate=2.0, cv=1.0, seed=7) == poisson


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, 1e-9, 1e9])
def test_an_impossible_spread_of_arrivals_is_refused(bad):
    with pytest.raises(ValueError, match=f"cv must lie between 0.01 and 100.0, got {bad}"):
        arrive_gamma([request(1, 1)], rate=1.0, cv=bad, seed=0)


def test_a_trace_is_scaled_to_a_rate():
    requests = [request(1, 1, arrival_s) for arrival_s in (5.0, 7.0, 15.0)]
    arrivals = [r.arrival_s for r in arrive_as_traced(requests, speedup=speedup_to(requests, 4.0))]
    assert arrivals == pytest.approx([0, 0.1, 0.5])
    with pytest.raises(ValueError, match="1 requests within 0 s have no rate"):
        speedup_to(requests[:1], 4.0)


def test_traced_arrivals_start_at_zero_and_are_sped_up():
    requests = [request(1, 1, arrival_s) for arrival_s in (5.0, 7.0, 15.0)]
    assert [r.arrival_s for r in arrive_as_traced(requests, speedup=2)] == [0, 1, 5]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_impossible_rates_are_refused(bad):
    with pytest.raises(ValueError, match=f"above 0, got {bad}"):
        arrive_poisson([request(1, 1)], rate=bad, seed=0)
    with pytest.raises(ValueError, match=f"above 0, got {bad}"):
        arrive_as_traced([request(1, 1)], speedup=bad)


# Limits


def test_requests_over_the_limit_are_dropped_and_counted():
    requests = [request(6, 4), request(7, 4), request(1, 1), request(20, 1)]
    kept, report = limit_lengths(requests, 10, overflow="drop")
    assert kept == [requests[0], requests[2]]
    assert (report.dropped, report.clipped_prompts, report.clipped_outputs) == (2, 0, 0)


def test_dropped_requests_are_replaced_by_later_ones():
    kept, report = limit_lengths(
        [request(9, 9), request(1, 1), request(2, 1), request(9, 9)],
        10,
        overflow="drop",
        num_requests=2,
    )
    assert [r.num_prompt_tokens for r in kept] == [1, 2]
    assert report.dropped == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((6, 4), (6, 4)),
        ((4, 9), (4, 6)),  # the output gives way first
        ((9, 2), (8, 2)),  # a prompt gives way to an output of at most half the limit
        ((50, 50), (5, 5)),
    ],
)
def test_clipping_cuts_output_then_prompt(before, after):
    (kept,), report = limit_lengths([request(*before)], 10, overflow="clip")
    assert (kept.num_prompt_tokens, kept.max_tokens) == after
    assert kept.prompt_token_ids == tuple(range(after[0]))
    assert report.clipped_prompts == (before[0] != after[0])
    assert report.clipped_outputs == (before[1] != after[1])


@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 40))
def test_clipped_requests_fit_and_use_the_whole_limit(num_prompt_tokens, max_tokens, limit):
    (kept,), _ = limit_lengths([request(num_prompt_tokens, max_tokens)], limit, overflow="clip")
    assert kept.num_prompt_tokens >= 1
    assert kept.max_tokens >= 1
    assert kept.num_prompt_tokens + kept.max_tokens == min(num_prompt_tokens + max_tokens, limit)


# build_workload


def test_sharegpt_reports_what_it_skipped(tmp_path):
    path = tmp_path / "chats.json"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "good day"}]
    records = [{"conversations": turns}, {"conversations": []}, {"conversations": turns}]
    path.write_text(json.dumps(records)[:-20])
    requests, notes = build_workload(
        "sharegpt",
        trace=path,
        encode=encode,
        encode_prompt=lambda text: [1, *encode(text)],
        max_model_len=100,
        num_requests=4,
    )
    assert requests == [WorkloadRequest((1, *b"hello"), 8, prompt="hello")]
    assert notes == [
        "sharegpt: skipped 2 of 3 records: a conversation without turns (record 1 in line 1); "
        "the file ends in it (record 2 in line 1)",
        "sharegpt: 1 requests, not the 4 asked for",
    ]


def test_azure_keeps_its_arrivals_or_takes_others(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-01-01 00:00:00,500,4\n2023-01-01 00:00:02,5,4\n2023-01-01 00:00:08,6,90\n"
    )

    def arrivals(**options) -> list[float]:
        requests, notes = build_workload(
            "azure", trace=path, vocab=VOCAB, max_model_len=100, **options
        )
        assert notes == ["azure: dropped 1 requests longer than 100 tokens"]
        return [r.arrival_s for r in requests]

    assert arrivals(arrivals="trace", speedup=3.0) == [0, 2]
    assert arrivals() == [0, 0]
    assert arrivals(arrivals="poisson", rate=1.0)[0] > 0


def test_burstgpt_is_scaled_to_a_rate_and_says_what_failed(tmp_path):
    path = tmp_path / "burstgpt.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "100,ChatGPT,5,4,9,API log\n101,ChatGPT,5,0,5,API log\n120,GPT-4,6,4,10,API log\n"
    )
    requests, notes = build_workload(
        "burstgpt", trace=path, vocab=VOCAB, max_model_len=100, arrivals="trace", rate=2.0
    )
    assert notes == [
        "burstgpt: skipped 1 of 3 records: Response tokens must be at least 1, got 0 (line 3)"
    ]
    assert [(r.num_prompt_tokens, r.arrival_s) for r in requests] == [(5, 0), (6, 0.5)]


def test_gamma_arrivals_by_name():
    requests, _ = build_workload(
        "lengths", num_requests=9, vocab=VOCAB, max_model_len=2048, arrivals="gamma", rate=2.0, cv=4
    )
    expected = arrive_gamma(requests, rate=2.0, cv=4, seed=0)
    assert requests == expected


def test_mooncake_is_clipped_where_asked_and_its_prefix_stays_shared(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, other]}
        for other in (1, 2)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    requests, notes = build_workload(
        "mooncake", trace=path, vocab=VOCAB, max_model_len=100, overflow="clip"
    )
    assert notes == ["mooncake: clipped 2 prompts and 0 outputs of requests longer than 100 tokens"]
    assert requests[0].prompt_token_ids == requests[1].prompt_token_ids
    assert (requests[0].num_prompt_tokens, requests[0].max_tokens) == (91, 9)


def test_max_tokens_caps_outputs():
    requests, _ = build_workload(
        "lengths",
        lengths=Lengths(Uniform(4, 4), Uniform(1, 30)),
        num_requests=50,
        vocab=VOCAB,
        max_tokens=10,
        max_model_len=14,
    )
    assert len(requests) == 50
    assert max(r.max_tokens for r in requests) == 10
    assert min(r.max_tokens for r in requests) < 10


def test_prompts_come_from_a_list_or_a_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    from_file, notes = build_workload(
        "prompts", trace=path, encode=encode, max_tokens=5, max_model_len=20
    )
    from_list, _ = build_workload(
        "prompts", prompts=["one", "two"], encode=encode, max_tokens=5, max_model_len=20
    )
    assert from_file == from_list
    assert not from_file[0].ignore_eos
    assert notes == ["prompts: skipped 1 of 3 records: a blank line (line 2)"]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("shargpt", {}, "unknown workload 'shargpt'; one of sharegpt, azure"),
        ("lengths", {"arrivals": "later"}, "unknown arrivals 'later'"),
        ("lengths", {"overflow": "ignore"}, "unknown overflow 'ignore'"),
        ("lengths", {"lengths": "opt"}, "unknown lengths 'opt'; one of sharegpt, alpaca"),
        ("lengths", {"num_requests": None}, "lengths workload needs num_requests"),
        ("lengths", {"num_requests": 0}, "num_requests must be at least 1, got 0"),
        ("lengths", {"vocab": None}, "lengths workload needs vocab"),
        ("lengths", {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ("lengths", {"max_model_len": 1}, "max_model_len must .* got 1"),
        ("lengths", {"trace": "x"}, "lengths workload reads no trace, got 'x'"),
        ("lengths", {"rate": 2.0}, "a rate goes with poisson arrivals"),
        ("lengths", {"arrivals": "poisson"}, "a rate goes with poisson arrivals"),
        ("lengths", {"arrivals": "gamma", "cv": 2.0}, "a rate goes with poisson arrivals, gamma"),
        ("lengths", {"arrivals": "gamma", "rate": 2.0}, "a cv goes with gamma arrivals"),
        ("lengths", {"cv": 2.0}, "a cv goes with gamma arrivals"),
        ("lengths", {"arrivals": "trace", "rate": 1.0, "speedup": 2.0}, "in place of a speed-up"),
        ("lengths", {"speedup": 2.0}, "a speed-up goes with trace arrivals"),
        ("lengths", {"arrivals": "trace"}, "lengths workload has no arrival times"),
        ("azure", {}, "azure workload needs trace"),
        ("mooncake", {"trace": "/no/such/file"}, "/no/such/file: no such file"),
        ("prompts", {}, "prompts workload needs prompts or trace"),
        ("prompts", {"prompts": ["a"]}, "prompts workload needs encode"),
        ("prompts", {"prompts": ["a"], "encode": encode}, "prompts workload needs max_tokens"),
        ("prompts", {"prompts": ["a"], "trace": "x"}, "from a list or from a file, got both"),
        ("lengths", {"prompts": ["a"]}, "prompts go with the prompts workload"),
        (
            "lengths",
            {"lengths": Lengths(Uniform(99, 99), Uniform(9, 9))},
            "no request left; 3 longer than max_model_len=64 dropped",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        build_workload(kind, **{"num_requests": 3, "vocab": VOCAB, "max_model_len": 64, **options})
