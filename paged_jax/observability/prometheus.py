"""The metrics endpoint, which Prometheus scrapes."""

from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from paged_jax.models.config import ModelConfig
from paged_jax.observability.metrics import Metrics


class MeasuredEngine(Protocol):
    """What the endpoint asks of an engine."""

    config: ModelConfig
    metrics_observer: Metrics


class MetricsCollector(Collector):
    """Gives Prometheus' client an engine's figures, labelled with the model's name as vLLM's."""

    def __init__(self, metrics: Metrics, model_name: str):
        self._metrics = metrics
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        for family in self._metrics.families():
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, {**self._labels, **sample.labels}, sample.value)
            yield metric


class MetricsServer:
    """Serves `http://host:port/metrics` from a thread of its own until it is closed."""

    def __init__(self, server: ThreadingHTTPServer):
        self._server = server
        serve = partial(server.serve_forever, poll_interval=0.05)  # seconds until it sees `close`
        self._thread = Thread(target=serve, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_metrics_server(
    engine: MeasuredEngine, port: int, *, host: str = "127.0.0.1"
) -> MetricsServer:
    """Serve an engine's metrics to Prometheus; port 0 takes a free one.

    Only this machine can reach it unless `host` says otherwise; "0.0.0.0" opens it to every network
    of the machine. ValueError for an address that is not free.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"a port is between 0 and 65535, got {port}")
    registry = CollectorRegistry()
    registry.register(MetricsCollector(engine.metrics_observer, engine.config.name))
    try:
        return MetricsServer(ThreadingHTTPServer((host, port), _handler(registry)))
    except OSError as error:
        raise ValueError(
            f"cannot serve metrics at {host}:{port}: {error.strerror}; give another port"
        ) from None


def _handler(registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    """Answers in the text format, whatever else a scrape accepts.

    All versions of Prometheus take the text format. In OpenMetrics, prometheus-client 0.26 replaces
    the colon of vLLM's names unless it is asked not to.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404, "the metrics are at /metrics")
                return
            text = generate_latest(registry)
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """A scrape every few seconds is no news."""

    return Handler
