import json

import numpy as np
import pytest

from paged_jax.workloads import (
    VocabRange,
    read_sharegpt,
    sharegpt_length_requests,
    sharegpt_lengths,
    sharegpt_requests,
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "sharegpt.json"
    texts = [("hello", "good day"), ("who", "me"), ("what is it", "this")]
    turns = [[{"from": "human", "value": p}, {"from": "gpt", "value": r}] for p, r in texts]
    path.write_text(json.dumps([{"conversations": turn} for turn in turns]))
    return path


class Counter:
    """Counts characters, and how often it was asked."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, texts):
        self.num_calls += 1
        return [len(text) for text in texts]


def test_lengths_are_counted_once_per_tokenizer_and_file(trace, tmp_path):
    count = Counter()

    def lengths(tokenizer_id="characters"):
        return sharegpt_lengths(
            trace, count_tokens=count, tokenizer_id=tokenizer_id, cache_dir=tmp_path / "kept"
        ).tolist()

    first = lengths()
    assert first == [[5, 8], [3, 2], [10, 4]]
    assert count.num_calls == 2
    assert lengths() == first
    assert count.num_calls == 2
    assert lengths("another tokenizer") == first
    assert count.num_calls == 4
    trace.write_text(trace.read_text().replace("who", "whoever"))
    assert lengths()[1] == [7, 2]
    assert count.num_calls == 6


def test_requests_have_the_lengths_of_those_drawn_from_the_text(trace):
    exchanges, _ = read_sharegpt(trace)

    def encode(text):
        return list(text.encode())

    drawn = list(sharegpt_requests(exchanges, encode=encode, encode_prompt=encode, seed=4))
    table = np.array([[len(e.prompt), len(e.reply)] for e in exchanges], np.int32)
    vocab = VocabRange(7, 9)
    requests = list(sharegpt_length_requests(table, vocab=vocab, seed=4))
    assert [(r.num_prompt_tokens, r.max_tokens) for r in requests] == [
        (r.num_prompt_tokens, r.max_tokens) for r in drawn
    ]
    assert {token for r in requests for token in r.prompt_token_ids} == {7, 8}
