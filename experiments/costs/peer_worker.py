"""Serves a workload with a peer, in the peer's own interpreter; `costs.peers` starts it.

    PYTHON peer_worker.py vllm|transformers HF_DIRECTORY DTYPE MAX_NUM_SEQS WORKLOAD.json
    PYTHON peer_worker.py convert MODEL.gguf HF_DIRECTORY

It imports nothing of this project. Once the model is loaded it prints a line of facts as JSON. Then
it serves the workload for each line on its standard input, and answers with a line of JSON:
{"seconds", "num_tokens", "first_token_s": [of each request]}. `convert` needs transformers: it
writes a GGUF file's model and tokenizer as the directory, in float32, that both peers take.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Workload = list[dict[str, Any]]  # of {"prompt": token ids, "max_tokens": int}
Serve = Callable[[], dict[str, Any]]


def vllm(model: str, dtype: str, max_num_seqs: int, workload: Workload) -> tuple[str, Serve]:
    """(version, a function that serves the workload): all requests at once, no prefix cache."""
    import vllm as peer

    longest = max(len(each["prompt"]) + each["max_tokens"] for each in workload)
    engine = peer.LLM(
        model,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=longest,
        max_num_batched_tokens=max(1024, longest),
        enable_prefix_caching=False,
    ).llm_engine
    rounds = iter(range(sys.maxsize))

    def serve() -> dict[str, Any]:
        number, start = next(rounds), time.perf_counter()
        for index, each in enumerate(workload):
            params = peer.SamplingParams(
                temperature=0, max_tokens=each["max_tokens"], ignore_eos=True, detokenize=False
            )
            prompt = {"prompt_token_ids": each["prompt"]}
            engine.add_request(f"{number}-{index}", prompt, params)
        first: dict[str, float] = {}
        num_tokens = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                first.setdefault(output.request_id, time.perf_counter() - start)
                if output.finished:
                    num_tokens += len(output.outputs[0].token_ids)
        return _result(start, num_tokens, list(first.values()))

    return peer.__version__, serve


def transformers(
    model: str, dtype: str, max_num_seqs: int, workload: Workload
) -> tuple[str, Serve]:
    """(version, a function that serves the workload): static batches, padded on the left."""
    import torch
    import transformers as peer

    decoder = peer.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    # Batches of like output lengths waste the least.
    order = sorted(workload, key=lambda each: each["max_tokens"])
    batches = [order[at : at + max_num_seqs] for at in range(0, len(order), max_num_seqs)]

    class FirstToken(peer.StoppingCriteria):
        """Notes when a batch has its first tokens; stops nothing."""

        def __init__(self) -> None:
            self.time_s: float | None = None

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            self.time_s = self.time_s or time.perf_counter()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def serve() -> dict[str, Any]:
        start = time.perf_counter()
        num_tokens, first = 0, []
        for batch in batches:
            width = max(len(each["prompt"]) for each in batch)
            pads = [width - len(each["prompt"]) for each in batch]
            ids = [[0] * pad + each["prompt"] for pad, each in zip(pads, batch, strict=True)]
            mask = [[0] * pad + [1] * (width - pad) for pad in pads]
            most, criterion = max(each["max_tokens"] for each in batch), FirstToken()
            with torch.inference_mode():
                decoder.generate(
                    torch.tensor(ids),
                    attention_mask=torch.tensor(mask),
                    do_sample=False,
                    min_new_tokens=most,
                    max_new_tokens=most,
                    stopping_criteria=[criterion],
                    pad_token_id=0,
                )
            # Tokens beyond a request's own length are waste.
            num_tokens += sum(each["max_tokens"] for each in batch)
            first += [(criterion.time_s or time.perf_counter()) - start] * len(batch)
        return _result(start, num_tokens, first)

    return peer.__version__, serve


def _result(start: float, num_tokens: int, first_token_s: list[float]) -> dict[str, Any]:
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "num_tokens": num_tokens, "first_token_s": first_token_s}


def convert(gguf_file: str, directory: str) -> None:
    """Write a GGUF file's model and tokenizer as a Hugging Face directory, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(gguf_file)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # a model that was quantised cannot be saved
    plain = type(model)(type(model.config)(**config)).to(torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


def main(arguments: list[str]) -> None:
    name, *rest = arguments
    if name == "convert":
        convert(*rest)
        return
    model, dtype, max_num_seqs, path = rest
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the peer prints is no answer
    workload = json.loads(Path(path).read_text())
    load = {"vllm": vllm, "transformers": transformers}[name]
    version, serve = load(model, dtype, int(max_num_seqs), workload)
    print(json.dumps({"version": version}), file=answers)
    for _ in sys.stdin:
        print(json.dumps(serve()), file=answers)


if __name__ == "__main__":
    main(sys.argv[1:])
