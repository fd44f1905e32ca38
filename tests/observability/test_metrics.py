"""What an engine's metrics say, and that Prometheus can scrape them."""

import urllib.error
import urllib.request
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paged_jax import Engine, SamplingParams
from paged_jax.observability.prometheus import start_metrics_server
from paged_jax.scheduling.checks import QueueFull
from tests.conftest import SMALL_LIMITS

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=30)


@pytest.fixture
def fresh_engine(tiny_model):
    """An engine that nobody has used; its steps are in memory from others of the same limits."""

    def build(**limits) -> Engine:
        return Engine(tiny_model, **SMALL_LIMITS | limits)

    return build


# What Prometheus 2 and 3 accept, as they send it.
ACCEPT = {
    2: "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;"
    "q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    3: "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
}


def scrape(port: int, accept: str) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return response.read().decode()


@pytest.mark.parametrize("version", ACCEPT)
def test_a_scrape_while_requests_run_gives_the_same_figures_as_the_engine(engine_with, version):
    engine = engine_with()
    ids = [engine.add_request(None, [5, 6, 7, n + 1], GREEDY) for n in range(6)]
    with closing(start_metrics_server(engine, 0)) as server:
        for _ in range(3):
            engine.step()
        text = scrape(server.port, ACCEPT[version])
        figures = engine.metrics()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    scraped = {}
    for family in families.values():
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == engine.config.name
            inside = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
            scraped[f"{sample.name}{{{inside}}}" if inside else sample.name] = sample.value
    assert scraped == pytest.approx(figures)
    assert figures["vllm:num_requests_running"] == 4
    assert figures["vllm:num_requests_waiting"] == 2
    assert 0 < figures["vllm:kv_cache_usage_perc"] < 1
    assert families["vllm:num_requests_running"].type == "gauge"
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    for request_id in ids:
        engine.abort(request_id)


def test_nothing_else_is_served(engine):
    with (
        closing(start_metrics_server(engine, 0)) as server,
        pytest.raises(urllib.error.HTTPError, match="404"),
    ):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=10)


def test_the_port_is_free_again_when_the_server_is_closed(engine):
    with closing(start_metrics_server(engine, 0)) as server:
        port = server.port
        with pytest.raises(ValueError, match=f"cannot serve metrics at 127.0.0.1:{port}: .*port"):
            start_metrics_server(engine, port)
    start_metrics_server(engine, port).close()
    with pytest.raises(ValueError, match="a port is between 0 and 65535, got 70000"):
        start_metrics_server(engine, 70000)


def test_every_request_and_token_is_counted_once(fresh_engine):
    engine = fresh_engine(num_blocks=3, enable_prefix_caching=False)  # overrun by four sequences
    prompts = [[n + 1] * (5 + 2 * n) for n in range(6)]
    outputs = engine.generate(prompts, GREEDY, progress=False)
    figures = engine.metrics()
    assert figures["vllm:prompt_tokens_total"] == sum(map(len, prompts))
    assert figures["vllm:generation_tokens_total"] == 6 * 8
    assert figures['vllm:request_success_total{finished_reason="length"}'] == 6
    assert figures["vllm:num_preemptions_total"] == sum(o.metrics.num_preemptions for o in outputs)
    assert figures["vllm:num_preemptions_total"] > 0
    assert figures["paged_jax:recomputed_tokens_total"] > 0
    assert figures["vllm:num_requests_running"] == figures["vllm:num_requests_waiting"] == 0
    assert figures["vllm:kv_cache_usage_perc"] == 0
    for name in ("e2e_request_latency", "request_queue_time", "time_to_first_token"):
        assert figures[f"vllm:{name}_seconds_count"] == 6


@pytest.mark.parametrize("pipelined", [False, True])
def test_latencies_are_those_of_the_outputs(fresh_engine, pipelined):
    engine = fresh_engine(num_blocks=3, enable_prefix_caching=False, pipelined=pipelined)
    outputs = engine.generate([[n + 1] * 9 for n in range(5)], GREEDY, progress=False)
    metrics = [output.metrics for output in outputs]
    gaps = np.concatenate([np.diff(each.token_times_s[0]) for each in metrics])
    expected = {
        "time_to_first_token": [each.first_token_s - each.arrival_s for each in metrics],
        "inter_token_latency": gaps,
        "request_queue_time": [each.first_scheduled_s - each.arrival_s for each in metrics],
        "request_prefill_time": [each.first_token_s - each.first_scheduled_s for each in metrics],
        "request_decode_time": [each.last_token_s - each.first_token_s for each in metrics],
        "e2e_request_latency": [each.last_token_s - each.arrival_s for each in metrics],
    }
    figures = engine.metrics()
    for name, values in expected.items():
        assert figures[f"vllm:{name}_seconds_count"] == len(values)
        assert figures[f"vllm:{name}_seconds_sum"] == pytest.approx(sum(values))
        below = sum(value <= 10 for value in values)
        assert figures[f'vllm:{name}_seconds_bucket{{le="10.0"}}'] == below


def test_samples_and_beams_are_one_request_each(fresh_engine):
    engine = fresh_engine()
    samples = SamplingParams(n=2, best_of=3, max_tokens=6, ignore_eos=True, seed=3)
    beams = SamplingParams(beam_width=3, n=2, max_tokens=6, ignore_eos=True)
    [sampled] = engine.generate([5] * 20, samples, progress=False)
    before = engine.metrics()
    assert before["vllm:generation_tokens_total"] == 3 * 6
    assert before["vllm:inter_token_latency_seconds_count"] == 3 * 5
    assert before["vllm:request_time_per_output_token_seconds_count"] == 3
    assert sampled.metrics.first_token_s is not None
    engine.generate([7] * 20, beams, progress=False)
    after = engine.metrics()
    assert after["vllm:inter_token_latency_seconds_count"] == 3 * 5 + 5
    assert after["vllm:time_to_first_token_seconds_count"] == 2
    assert after["vllm:request_params_n_sum"] == 4


def test_what_was_found_in_the_cache_is_counted(fresh_engine):
    engine = fresh_engine()
    for _ in range(2):
        engine.generate([3] * 33, GREEDY, progress=False)
    figures = engine.metrics()
    assert figures["vllm:prompt_tokens_cached_total"] == 32
    assert figures["vllm:prefix_cache_hits_total"] == 32
    assert figures["vllm:prefix_cache_queries_total"] == 66
    assert figures["paged_jax:num_cached_blocks"] > 0


def test_refusals_timeouts_and_aborts_are_counted_by_reason(fresh_engine):
    engine = fresh_engine(max_num_waiting=2)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.add_request(None, [100_000], GREEDY)
    with pytest.raises(ValueError, match="params must be"):
        engine.add_request(None, [5], "greedy")
    ids = [engine.add_request(None, [5, n + 1], GREEDY) for n in range(2)]
    with pytest.raises(QueueFull):
        engine.add_request(None, [5], GREEDY)
    engine.abort(ids[0])
    engine.add_request("late", [6], GREEDY, timeout_s=1e-9)
    while engine.has_work:
        engine.step()
    figures = engine.metrics()
    assert figures['vllm:admission_rejections_total{reason="invalid_request"}'] == 2
    assert figures['vllm:admission_rejections_total{reason="max_num_waiting"}'] == 1
    ended = {
        reason: figures[f'vllm:request_success_total{{finished_reason="{reason}"}}']
        for reason in ("stop", "length", "abort", "timeout", "error")
    }
    assert ended == {"stop": 0, "length": 1, "abort": 1, "timeout": 1, "error": 0}
    assert figures["vllm:e2e_request_latency_seconds_count"] == 1


@pytest.mark.parametrize("samples", [{"n": 2}, {"n": 1, "best_of": 2}], ids=str)
@pytest.mark.parametrize("reason", ["abort", "timeout"])
def test_a_request_is_cut_short_if_any_of_its_sequences_is(
    fresh_engine, monkeypatch, samples, reason
):
    engine = fresh_engine()
    params = SamplingParams(max_tokens=30, seed=0, ignore_eos=True, **samples)
    engine.add_request("r", [5, 6], params, timeout_s=1000.0)
    for _ in range(3):
        engine.step()
    scheduler = engine.core.scheduler
    scheduler.finish(scheduler.queues.decoding[0], "stop")
    for _ in range(6):
        engine.step()
    if reason == "abort":
        output = engine.abort("r")
    else:
        later = engine.core.clock() + 2000.0
        monkeypatch.setattr(engine.core, "clock", lambda: later)
        [output] = engine.step()
    assert output.outputs[0].finish_reason == "stop"
    assert output.finish_reason == reason
    figures = engine.metrics()
    assert figures['vllm:request_success_total{finished_reason="stop"}'] == 0
    assert figures[f'vllm:request_success_total{{finished_reason="{reason}"}}'] == 1
    assert figures["vllm:e2e_request_latency_seconds_count"] == 0


def test_a_request_that_fails_has_neither_a_first_token_nor_a_latency(fresh_engine, monkeypatch):
    engine = fresh_engine()

    def broken(batch):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.executor, "execute", broken)
    engine.add_request("r", [5, 6], GREEDY)
    with pytest.warns(RuntimeWarning, match="failed"):
        [output] = engine.step()
    assert output.error is not None
    figures = engine.metrics()
    assert figures["paged_jax:failed_steps_total"] == 2
    assert figures['vllm:request_success_total{finished_reason="error"}'] == 1
    assert figures["vllm:time_to_first_token_seconds_count"] == 0
    assert figures["vllm:e2e_request_latency_seconds_count"] == 0
    assert figures["vllm:prompt_tokens_total"] == figures["vllm:generation_tokens_total"] == 0
    assert figures["vllm:num_requests_running"] == 0


def test_a_first_token_that_means_nothing_is_none(fresh_engine, monkeypatch):
    engine = fresh_engine()
    execute = engine.executor.execute

    def not_finite(batch):
        result = execute(batch)
        return replace(result, failed=dict.fromkeys(range(len(result.tokens)), "not finite"))

    monkeypatch.setattr(engine.executor, "execute", not_finite)
    [output] = engine.generate([5, 6], GREEDY, progress=False)
    assert "not finite" in output.error
    figures = engine.metrics()
    assert figures["vllm:time_to_first_token_seconds_count"] == 0
    assert figures["vllm:prompt_tokens_total"] == figures["vllm:generation_tokens_total"] == 0


def test_nothing_is_kept_of_a_request_that_ends_while_it_is_preempted(fresh_engine):
    engine = fresh_engine(num_blocks=3, enable_prefix_caching=False)
    ids = [engine.add_request(None, [n + 1] * 9, LONG) for n in range(3)]
    while not engine.core.scheduler.counters.num_preemptions:
        engine.step()
    engine.step()
    assert engine.metrics_observer._gaps._last_s
    for request_id in ids:
        engine.abort(request_id)
    engine.generate([1, 2], SamplingParams(max_tokens=1), progress=False)
    assert not engine.metrics_observer._gaps._last_s


def test_nothing_of_a_request_is_kept_when_it_has_ended(fresh_engine):
    engine = fresh_engine(num_blocks=3, enable_prefix_caching=False)
    engine.generate([[n + 1] * 9 for n in range(5)], GREEDY, progress=False)
    metrics = engine.metrics_observer
    assert not metrics._phases.requests
    assert not metrics._arrival_s
    engine.generate([1, 2], SamplingParams(max_tokens=1), progress=False)
    assert not metrics._gaps._last_s
