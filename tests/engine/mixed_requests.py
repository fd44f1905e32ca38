"""32 requests of every kind, over text that the tiny model knows."""

from pydoc_data.topics import topics

from paged_jax import Engine, RequestOutput, SamplingParams

# Paragraphs of prose.
TEXT = "\n\n".join(
    paragraph
    for name in ("function", "class", "exceptions", "attribute-access")
    for paragraph in topics[name].split("\n\n")
    if paragraph[:1].isupper()
)
BOS = 256

# What the requests take turns with; two in three are greedy.
KINDS = (
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0, "stop": "the "},
    {"temperature": 0, "repetition_penalty": 1.3, "ignore_eos": True},
    {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5, "n": 2},
    {"temperature": 0, "stop_token_ids": [ord("."), ord("a")], "min_tokens": 5},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.2, "min_p": 0.1, "logprobs": 0},
    {"temperature": 0, "stop": ["\n", " of the"], "include_stop_str_in_output": True},
)


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 300 tokens, 1 to 60 to generate."""
    requests = []
    for i in range(32):
        length = 1 + (i * i * 97) % 300
        prompt = [BOS, *TEXT[100 * i :].encode()[: length - 1]]
        params = SamplingParams(
            seed=i, max_tokens=1 + (i * 23) % 60, **KINDS[i % len(KINDS)] if i % 11 else {}
        )
        requests.append((prompt, params))
    return requests


def essence(output: RequestOutput) -> list[tuple]:
    """What must not depend on how a request was served."""
    return [
        (out.index, out.token_ids, out.text, out.finish_reason, out.stop_reason)
        for out in output.outputs
    ]


def serve(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[list[tuple]]:
    """All at once; their essences."""
    prompts, params = zip(*requests, strict=True)
    return [essence(out) for out in engine.generate(prompts, list(params), progress=False)]
