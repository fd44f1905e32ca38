import json
import os
from pathlib import Path

import pytest

from paged_jax.workloads import (
    VocabRange,
    mooncake_requests,
    prompt_requests,
    read_azure,
    read_burstgpt,
    read_mooncake,
    read_prompts,
    traced_requests,
)

VOCAB = VocabRange(10, 1000)

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:16:46.6805900,7,3"
)


BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "110.5,GPT-4,417,505,922,API log\n"
    "45,ChatGPT,1087,230,1317,Conversation log\n"
    "46,ChatGPT,9,0,9,Conversation log\n"
)


def mooncake_line(timestamp=0, input_length=1030, output_length=5, hash_ids=(0, 1, 2)) -> str:
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": input_length,
            "output_length": output_length,
            "hash_ids": list(hash_ids),
        }
    )


@pytest.fixture
def write(tmp_path):
    def write_file(text: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file


def test_azure_rows_keep_lengths_and_seconds_since_the_first(write):
    rows = read_azure(write(AZURE))
    assert [(row.num_prompt_tokens, row.num_output_tokens) for row in rows] == [
        (374, 44),
        (396, 109),
        (7, 3),
    ]
    assert [row.arrival_s for row in rows] == pytest.approx([0, 4.314579, 60])


def test_azure_columns_may_come_in_any_order_and_with_others(write):
    text = "Id,GeneratedTokens,TIMESTAMP,ContextTokens\nx,2,2024-05-10 00:00:00.009930+00:00,9\n\n"
    (row,) = read_azure(write(text))
    assert (row.arrival_s, row.num_prompt_tokens, row.num_output_tokens) == (0, 9, 2)


def test_azure_requests_have_random_prompts_of_the_traced_lengths(write):
    rows = read_azure(write(AZURE))
    requests = list(traced_requests(rows, vocab=VOCAB, seed=3))
    assert [request.num_prompt_tokens for request in requests] == [374, 396, 7]
    assert [request.max_tokens for request in requests] == [44, 109, 3]
    assert all(10 <= token < 1000 for request in requests for token in request.prompt_token_ids)
    assert requests == list(traced_requests(rows, vocab=VOCAB, seed=3))
    assert requests != list(traced_requests(rows, vocab=VOCAB, seed=4))
    assert requests[0].prompt_token_ids[:7] != requests[2].prompt_token_ids


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("396", "many", "line 3: ContextTokens must be a whole number, got 'many'"),
        ("396", "-4", "line 3: ContextTokens must be a whole number, got '-4'"),
        ("396", "1.5", "line 3: ContextTokens must be a whole number, got '1.5'"),
        ("396", "9" * 12, "line 3: ContextTokens must be at most 10000000, got 9999"),
        (",109", ",0", "line 3: GeneratedTokens must be at least 1, got 0"),
        (",109", "", "line 3: 3 fields expected, got 2"),
        (",109", ",109,1", "line 3: 3 fields expected, got 4"),
        ("2023-11-16 18:15:50.9951690", "noon", "line 3: Invalid isoformat string: 'noon'"),
        ("18:15:50", "18:15:40", "line 3: TIMESTAMP 2023-11-16 18:15:40.* before the line above"),
        ("50.9951690", "50.9+00:00", "line 3: can't subtract offset-naive and offset-aware"),
        ("ContextTokens", "Tokens", "line 1: no column ContextTokens in the header"),
    ],
)
def test_a_malformed_azure_line_is_named(write, old, new, message):
    with pytest.raises(ValueError, match=message):
        read_azure(write(AZURE.replace(old, new, 1)))


def test_burstgpt_rows_come_by_time_without_those_that_failed(write):
    rows, num_failed = read_burstgpt(write(BURSTGPT))
    assert [(row.arrival_s, row.num_prompt_tokens, row.num_output_tokens) for row in rows] == [
        (5, 472, 18),
        (45, 1087, 230),
        (110.5, 417, 505),
    ]
    assert num_failed == 1


def test_burstgpt_requests_have_random_prompts_of_the_traced_lengths(write):
    rows, _ = read_burstgpt(write(BURSTGPT))
    requests = list(traced_requests(rows, vocab=VOCAB, seed=3))
    assert [(r.num_prompt_tokens, r.max_tokens, r.arrival_s) for r in requests] == [
        (472, 18, 5),
        (1087, 230, 45),
        (417, 505, 110.5),
    ]
    assert requests == list(traced_requests(rows, vocab=VOCAB, seed=3))
    assert requests != list(traced_requests(rows, vocab=VOCAB, seed=4))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("110.5", "noon", "line 3: Timestamp must be seconds of at least 0, got 'noon'"),
        ("110.5", "inf", "line 3: Timestamp must be seconds of at least 0, got 'inf'"),
        ("110.5", "-1", "line 3: Timestamp must be seconds of at least 0, got '-1'"),
        ("417", "x", "line 3: Request tokens must be a whole number, got 'x'"),
        ("417", "0", "line 3: Request tokens must be at least 1, got 0"),
        (",505", ",5.5", "line 3: Response tokens must be a whole number, got '5.5'"),
        (",505", "", "line 3: 6 fields expected, got 5"),
        (",505", ',"505', "line 3: unexpected end of data"),
        ("Request tokens", "Prompt", "line 1: no column Request tokens in the header"),
    ],
)
def test_a_malformed_burstgpt_line_is_named(write, old, new, message):
    with pytest.raises(ValueError, match=message):
        read_burstgpt(write(BURSTGPT.replace(old, new, 1)))


@pytest.mark.parametrize("read", [read_azure, read_burstgpt, read_mooncake, read_prompts])
def test_files_that_hold_nothing_or_no_text_are_refused(tmp_path, write, read):
    with pytest.raises(ValueError, match="trace"):
        read(write(""))
    with pytest.raises(ValueError, match="line 1: not UTF-8"):
        read(write(b"\xff\xfe"))
    with pytest.raises(ValueError, match="not a file"):
        read(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        read(tmp_path / "nowhere")


def test_an_azure_trace_without_requests_is_refused(write):
    with pytest.raises(ValueError, match="no request under the header"):
        read_azure(write("TIMESTAMP,ContextTokens,GeneratedTokens\n"))


def test_a_burstgpt_trace_of_failures_alone_is_refused(write):
    with pytest.raises(ValueError, match="no request with a response under the header"):
        read_burstgpt(write("Timestamp,Request tokens,Response tokens\n1,5,0\n"))


def test_mooncake_rows_keep_their_hash_ids_and_seconds(write):
    rows = read_mooncake(write(f"{mooncake_line()}\n{mooncake_line(timestamp=2500)}\n"))
    assert [row.arrival_s for row in rows] == [0, 2.5]
    assert rows[0].hash_ids == (0, 1, 2)


def test_equal_hash_ids_give_equal_blocks_of_512_tokens_and_others_differ(write):
    lines = [
        mooncake_line(hash_ids=(0, 1, 2)),
        mooncake_line(hash_ids=(0, 1, 3)),
        mooncake_line(input_length=520, hash_ids=(4, 2)),
    ]
    rows = read_mooncake(write("\n".join(lines)))
    first, second, third = (
        r.prompt_token_ids for r in mooncake_requests(rows, vocab=VOCAB, seed=0)
    )
    assert (len(first), len(second), len(third)) == (1030, 1030, 520)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]
    assert first[:512] != first[512:1024]
    assert third[512:518] == first[1024:1030]
    again = list(mooncake_requests(rows[1:], vocab=VOCAB, seed=0))
    assert again[0].prompt_token_ids == second
    other = next(mooncake_requests(rows, vocab=VOCAB, seed=1))
    assert other.prompt_token_ids != first


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1', "line 2: not JSON: Expecting ',' delimiter, column 16"),
        ("[1]", "line 2: a JSON object expected"),
        ('{"timestamp": 1, "hash_ids": []}', "line 2: no input_length, output_length"),
        (mooncake_line(input_length=1024), "line 2: input_length 1024 makes 2 blocks.* got 3"),
        (mooncake_line(input_length=0, hash_ids=()), "line 2: input_length must be at least 1"),
        (mooncake_line(output_length=None), "line 2: output_length must be a whole number"),
        (mooncake_line(output_length=True), "line 2: output_length must be a whole number"),
        (mooncake_line(hash_ids=(0, 1, -2)), "line 2: a hash id must be at least 0, got -2"),
        (mooncake_line().replace("[0, 1, 2]", "7"), "line 2: hash_ids must be a list, got 7"),
        (mooncake_line(timestamp=3), "line 2: timestamp 3 lies before the line above"),
    ],
)
def test_a_malformed_mooncake_line_is_named(write, line, message):
    with pytest.raises(ValueError, match=message):
        read_mooncake(write(f"{mooncake_line(timestamp=9)}\n{line}\n"))


def test_prompts_are_lines_and_blank_ones_are_counted(write):
    prompts, num_blank = read_prompts(write("\ufefffirst one\n\n  \nsecond\r\n"))
    assert prompts == ["first one", "second"]
    assert num_blank == 2


def test_prompts_run_to_the_end_of_text_unless_told_otherwise():
    def encode(text: str) -> list[int]:
        return list(text.encode())

    (request,) = prompt_requests(["hey"], encode=encode, max_tokens=4)
    assert request.prompt_token_ids == tuple(b"hey")
    assert (request.prompt, request.max_tokens, request.ignore_eos) == ("hey", 4, False)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        list(prompt_requests(["hey", " "], encode=encode, max_tokens=4))


def published(name: str) -> Path:
    folder = os.environ.get("PAGED_JAX_TRACES")
    if not folder:
        pytest.skip("PAGED_JAX_TRACES names no folder of published traces")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


def test_the_published_azure_trace_has_its_known_size_and_means():
    rows = read_azure(published("azure_llm_2023_conv.csv"))
    assert len(rows) == 19366
    assert round(sum(row.num_prompt_tokens for row in rows) / len(rows)) == 1155
    assert round(sum(row.num_output_tokens for row in rows) / len(rows)) == 211


def test_the_published_mooncake_trace_has_its_known_size():
    rows = read_mooncake(published("mooncake_conversation.jsonl"))
    assert len(rows) == 12031
    assert rows[-1].arrival_s == pytest.approx(3536.999)
