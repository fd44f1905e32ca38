"""Other engines beside this one; the peers here only look like their namesakes."""

import json
import stat
import sys
from pathlib import Path

import pytest

from tests.experiments.experiment_runs import SMALL_ENGINE, results_of, run_experiment

WORKLOAD = [
    *(SMALL_ENGINE[0], "--quick", "--max_length=24", "--num_requests=3"),
    *("--input_mean=10", "--output_mean=10"),
]

VLLM = '''
"""vLLM's engine, as the worker uses it: one token a step."""
from types import SimpleNamespace

__version__ = "0.fake"


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, *, dtype, **options):
        assert model == "the model" and dtype == "float32"
        print("noise on stdout")
        self.llm_engine = self
        self.running = {}

    def add_request(self, request_id, prompt, params):
        assert params.ignore_eos and params.temperature == 0 and prompt["prompt_token_ids"]
        self.running[request_id] = [params.max_tokens, []]

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        done = []
        for name, (most, tokens) in list(self.running.items()):
            tokens.append(0)
            if len(tokens) == most:
                del self.running[name]
            outputs = [SimpleNamespace(token_ids=tokens)]
            done.append(SimpleNamespace(
                request_id=name, finished=len(tokens) == most, outputs=outputs
            ))
        return done
'''

LLAMA = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "--version" in sys.argv:
    print("version: 0 (fake)", file=sys.stderr)
    sys.exit()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"] and asked["prompt"] and not asked["cache_prompt"]
        self.send_response(200)
        self.end_headers()
        for number in range(asked["n_predict"]):
            self.wfile.write(b'data: {"content": "a"}\\n\\n')
        last = {"stop": True, "tokens_predicted": asked["n_predict"]}
        self.wfile.write(b"data: " + json.dumps(last).encode() + b"\\n\\n")

    def log_message(self, *arguments):
        pass


port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def vllm_python(tmp_path):
    (tmp_path / "vllm.py").write_text(VLLM)
    return program(
        tmp_path / "python", f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n'
    )


@pytest.mark.slow  # a whole experiment
def test_engines_serve_the_same_workload_in_turns(tmp_path, vllm_python):
    llama = program(tmp_path / "llama-server", f"#!{sys.executable}\n{LLAMA}")
    results, stdout = results_of(
        "costs.peers",
        tmp_path,
        *WORKLOAD,
        *(f"--vllm_python={vllm_python}", "--hf_model=the model"),
        *(f"--llama_server={llama}", "--llama_model=the model.gguf"),
    )
    ours, vllm, llama_cpp = results["cases"]
    workload = json.loads((tmp_path / "workload.json").read_text())
    num_tokens = sum(request["max_tokens"] for request in workload)
    for case in results["cases"]:
        assert case["num_tokens"] == num_tokens
        assert 0 < case["low"] <= case["tokens_per_s"] <= case["high"]
        assert case["first_token_p50_s"] > 0
    assert (ours["engine"], ours["ratio"]) == ("paged_jax", 1)
    assert (vllm["engine"], vllm["dtype"], vllm["version"]) == ("vllm", "float32", "0.fake")
    assert (llama_cpp["engine"], llama_cpp["dtype"]) == ("llama.cpp", "the model.gguf")
    assert llama_cpp["version"] == "version: 0 (fake)"
    assert vllm["ratio"] > 1  # it computes nothing
    assert results["machine"]["copy_gb_per_s"] > 0
    assert "GFLOP/s" in stdout


@pytest.mark.slow  # a whole experiment
def test_what_is_not_installed_is_said_with_how_to_get_it(tmp_path):
    result = run_experiment("costs.peers", tmp_path, *WORKLOAD)
    assert result.returncode == 0, result.stderr
    for name in ("llama.cpp", "vllm", "transformers"):
        assert f"{name} is left out; to take part it needs --" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vllm_python=python"], "vllm takes a Hugging Face directory: give --hf_model"),
        (["--llama_server=llama"], "llama.cpp takes a GGUF file: give --llama_model"),
        (
            ["--llama_server=/no/llama", "--llama_model=m"],
            "cannot start /no/llama: No such file or directory",
        ),
        (
            [f"--transformers_python={sys.executable}", "--hf_model=/no/model"],
            "transformers has ended, exit code 1; {}/transformers-float32.log says why",
        ),
    ],
)
def test_a_peer_that_cannot_start_is_refused_in_one_line(tmp_path, flags, message):
    result = run_experiment("costs.peers", tmp_path, *WORKLOAD, *flags)
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1] == f"error: {message.format(tmp_path)}"
