"""Requests that have much in common: repeated prompts, common beginnings, samples, salts."""

from paged_jax import SamplingParams
from tests.engine.mixed_requests import BOS, TEXT

SYSTEM = [BOS, *TEXT[40:].encode()[:47]]  # 48 tokens: whole blocks of any size up to 16
QUESTIONS = [list(TEXT[900 + 130 * i :].encode()[: 3 + 37 * i]) for i in range(4)]
SALTS = (None, None, None, "tenant")


def shared_requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 155 tokens, 4 to 60 to generate; some are given several times.

    Two in three are greedy, the rest are sampled from seeds of their own.
    """
    beginnings = [SYSTEM[:16], SYSTEM[:32], SYSTEM, SYSTEM[:41], [], list(reversed(SYSTEM))]
    kinds = (
        {"temperature": 0},
        {"temperature": 0, "stop": "the "},
        {"temperature": 0.9, "n": 3},
        {"temperature": 0, "logprobs": 1, "ignore_eos": True},
        {"temperature": 0, "repetition_penalty": 1.2, "n": 2},
        {"temperature": 1.1, "top_k": 12, "n": 2, "best_of": 3},
    )
    requests = []
    for i in range(36):
        beginning = beginnings[(i * i) % len(beginnings)]
        question = QUESTIONS[i % 4] if i % 5 else []
        prompt = [*beginning, *question] or [BOS]
        params = SamplingParams(
            seed=i % 7,
            max_tokens=4 + (i * 17) % 57,
            cache_salt=SALTS[(i // 2) % 4],
            **kinds[(i // 3) % len(kinds)],
        )
        requests.append((prompt, params))
    return requests
