import gzip
import json
import math
import os
from pathlib import Path

import pytest

from paged_jax.workloads import (
    TracedRequest,
    VocabRange,
    mooncake_requests,
    prompt_requests,
    read_azure,
    read_burstgpt,
    read_mooncake,
    read_prompts,
    traced_requests,
)
from paged_jax.workloads.records import Skipped

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
    rows, notes = read_azure(write(AZURE))
    assert [(row.num_prompt_tokens, row.num_output_tokens) for row in rows] == [
        (374, 44),
        (396, 109),
        (7, 3),
    ]
    assert [row.arrival_s for row in rows] == pytest.approx([0, 4.314579, 60])
    assert notes == []


def test_azure_columns_may_come_in_any_order_and_with_others(write):
    text = "Id,GeneratedTokens,TIMESTAMP,ContextTokens\nx,2,2024-05-10 00:00:00.009930+00:00,9\n\n"
    (row,), _ = read_azure(write(text))
    assert (row.arrival_s, row.num_prompt_tokens, row.num_output_tokens) == (0, 9, 2)


def test_azure_requests_have_random_prompts_of_the_traced_lengths(write):
    rows, _ = read_azure(write(AZURE))
    requests = list(traced_requests(rows, vocab=VOCAB, seed=3))
    assert [request.num_prompt_tokens for request in requests] == [374, 396, 7]
    assert [request.max_tokens for request in requests] == [44, 109, 3]
    assert all(10 <= token < 1000 for request in requests for token in request.prompt_token_ids)
    assert requests == list(traced_requests(rows, vocab=VOCAB, seed=3))
    assert requests != list(traced_requests(rows, vocab=VOCAB, seed=4))
    assert requests[0].prompt_token_ids[:7] != requests[2].prompt_token_ids


QUOTED = '"TIMESTAMP","ContextTokens","GeneratedTokens"\n"2023-11-16 18:15:46","374","44"\n'


@pytest.mark.parametrize(
    "text",
    [
        QUOTED,
        QUOTED.replace("\n", "\r\n"),
        "\ufeff" + QUOTED,
        QUOTED.rstrip() + "\n\n  \n",
        QUOTED.replace('"', ""),
        QUOTED.replace('"', "").replace(",", " , "),
        QUOTED.lower(),
        ",TIMESTAMP,ContextTokens,GeneratedTokens\n0,2023-11-16 18:15:46,374.0,4.4e1\n",
        'ContextTokens,"Note",TIMESTAMP,GeneratedTokens\n374,"a, b",1700158546,44\n',
    ],
)
def test_a_csv_may_be_written_in_other_ways(write, text):
    assert read_azure(write(text)) == ([TracedRequest(0, 374, 44)], [])


TIMES = {
    "dates": ("2023-11-16 18:15:46", "2023-11-16 18:15:48.5"),
    "ISO dates": ("2023-11-16T18:15:46Z", "2023-11-16T18:15:48.5000000+00:00"),
    "time zones": ("2023-11-16 18:15:46+00:00", "2023-11-16 13:15:48.5-05:00"),
    "one without a zone is in UTC": ("2023-11-16 18:15:46", "2023-11-16T18:15:48.5Z"),
    "UTC": ("2023-11-16 18:15:46 UTC", "2023-11-16 18:15:48.500 UTC"),
    "seconds": ("0", "2.5"),
    "seconds since 1970": ("1700158546", "1700158548.5"),
    "milliseconds since 1970": ("1700158546000", "1700158548500"),
    "microseconds since 1970": ("1700158546000000", "1700158548500000.0"),
    "nanoseconds since 1970": ("1700158546000000000", "1700158548500000000"),
    "a date and seconds since 1970": ("2023-11-16 18:15:46", "1700158548.5"),
    "exponents": ("1.700158546e9", "1.7001585485E9"),
}


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_times_are_dates_or_numbers_and_requests_are_sorted_by_them(write, times):
    first, second = (f"{time},5,1\n" for time in times)
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    for lines in (first + second, second + first):
        rows, notes = read_azure(write(header + lines))
        assert [row.arrival_s for row in rows] == pytest.approx([0, 2.5])
        assert notes == []


BAD_AZURE = [
    ("396", "many", "ContextTokens must be a whole number, got 'many'"),
    ("396", "-4", "ContextTokens must be at least 1, got -4"),
    ("396", "1.5", "ContextTokens must be a whole number, got '1.5'"),
    ("396", "nan", "ContextTokens must be a whole number, got 'nan'"),
    ("396", "inf", "ContextTokens must be a whole number, got 'inf'"),
    ("396", "True", "ContextTokens must be a whole number, got 'True'"),
    ("396", "", "ContextTokens must be a whole number, got ''"),
    ("396", "9" * 12, f"ContextTokens must be at most 10000000, got {'9' * 12}"),
    ("396", "9" * 5000, f"ContextTokens must be a whole number, got '{'9' * 79}"),
    (",109", ",0", "GeneratedTokens must be at least 1, got 0"),
    (",109", ",0.0", "GeneratedTokens must be at least 1, got 0"),
    (",109", "", "3 fields expected, got 2 in '2023-11-16 18:15:50.9951690,396'"),
    (",109", ",109,1", "3 fields expected, got 4 in '2023-11-16 18:15:50.9951690,396,109,1'"),
    (",109", ',"109', "unexpected end of data"),
    ("396", "\0", "ContextTokens must be a whole number, got '\\x00'"),
    ("2023-11-16 18:15:50.9951690", "noon", "TIMESTAMP must be a date or a number, got 'noon'"),
    ("2023-11-16 18:15:50.9951690", "", "TIMESTAMP must be a date or a number, got ''"),
    ("2023-11-16 18:15:50.9951690", "nan", "TIMESTAMP must be a date or a number, got 'nan'"),
    (
        "2023-11-16 18:15:50.9951690",
        "-1",
        "TIMESTAMP must be a date or a number of at least 0, got '-1'",
    ),
    (
        "2023-11-16 18:15:50.9951690",
        "1e40",
        "TIMESTAMP must be a date or a number of at least 0, got '1e40'",
    ),
]


@pytest.mark.parametrize(("old", "new", "reason"), BAD_AZURE)
def test_a_bad_azure_line_costs_itself_and_is_named(write, old, new, reason):
    good, _ = read_azure(write(AZURE))
    rows, [note] = read_azure(write(AZURE.replace(old, new, 1)))
    assert rows == [good[0], good[2]]
    assert note == f"skipped 1 of 3 records: {reason} (line 3)"


def test_bytes_that_are_not_utf_8_cost_their_line_where_they_are_read(write):
    rows, [note] = read_azure(write(AZURE.encode().replace(b"396", b"3\xff6")))
    assert len(rows) == 2
    assert note.endswith(r"ContextTokens must be a whole number, got '3\udcff6' (line 3)")
    other = b"Gr\xf6\xdfe,TIMESTAMP,ContextTokens,GeneratedTokens\n\xf6,5,374,44\n"
    assert read_azure(write(other)) == ([TracedRequest(0, 374, 44)], [])


@pytest.mark.parametrize("text", [AZURE.replace("\n", "\r"), f"{'x' * 200_000},{AZURE}"])
def test_a_header_that_is_no_csv_is_refused_in_one_line(write, text):
    with pytest.raises(ValueError, match=r"trace, line 1: .* is no header of a CSV: .") as error:
        read_azure(write(text))
    assert len(str(error.value)) < 400


def test_a_header_without_a_column_is_refused(write):
    with pytest.raises(
        ValueError, match="line 1: no column ContextTokens in the header 'TIMESTAMP"
    ):
        read_azure(write(AZURE.replace("ContextTokens", "Tokens")))


def test_a_note_counts_the_records_of_each_reason_and_names_the_first(write):
    times = [f"{second},{second % 9},{second % 5}\n" for second in range(90)]
    rows, [note] = read_azure(write("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(times)))
    assert len(rows) == 64
    assert note == (
        "skipped 26 of 90 records: "
        "GeneratedTokens must be at least 1, got 0 (line 7, line 12, line 17 and 13 more); "
        "ContextTokens must be at least 1, got 0 (line 2, line 11, line 20 and 7 more)"
    )
    skipped = Skipped("x")
    for place, reason in enumerate("abcddee"):
        skipped.add(f"line {place}", reason)
    assert str(skipped) == "d (line 3, line 4); e (line 5, line 6); a (line 0); 2 for other reasons"


def test_a_file_without_a_usable_record_is_refused_with_the_reasons(write):
    message = r"trace: no usable record: GeneratedTokens must be at least 1, got 0 \(line 2\)$"
    with pytest.raises(ValueError, match=message):
        read_azure(write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-01-01,5,0\n"))


def test_burstgpt_rows_come_by_time_without_those_that_failed(write):
    rows, notes = read_burstgpt(write(BURSTGPT))
    assert [(row.arrival_s, row.num_prompt_tokens, row.num_output_tokens) for row in rows] == [
        (5, 472, 18),
        (45, 1087, 230),
        (110.5, 417, 505),
    ]
    assert notes == ["skipped 1 of 4 records: Response tokens must be at least 1, got 0 (line 5)"]


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
    ("old", "new", "reason"),
    [
        ("110.5", "noon", "Timestamp must be a date or a number, got 'noon'"),
        ("110.5", "inf", "Timestamp must be a date or a number of at least 0, got 'inf'"),
        ("110.5", "-1", "Timestamp must be a date or a number of at least 0, got '-1'"),
        ("417", "x", "Request tokens must be a whole number, got 'x'"),
        ("417", "0", "Request tokens must be at least 1, got 0"),
        (",505", ",5.5", "Response tokens must be a whole number, got '5.5'"),
        (",505", "", "6 fields expected, got 5 in '110.5,GPT-4,417,922,API log'"),
        (",505", ',"505', "unexpected end of data"),
    ],
)
def test_a_bad_burstgpt_line_costs_itself_and_is_named(write, old, new, reason):
    text = BURSTGPT.replace("46,ChatGPT,9,0,9,Conversation log\n", "").replace(old, new, 1)
    rows, [note] = read_burstgpt(write(text))
    assert [row.arrival_s for row in rows] == [5, 45]
    assert note == f"skipped 1 of 3 records: {reason} (line 3)"


@pytest.mark.parametrize("read", [read_azure, read_burstgpt, read_mooncake, read_prompts])
def test_files_that_hold_nothing_or_no_text_are_refused(tmp_path, write, read):
    with pytest.raises(ValueError, match="trace"):
        read(write(""))
    with pytest.raises(ValueError, match=r"trace: no usable record: not UTF-8|no column"):
        read(write(b"\xff"))
    with pytest.raises(ValueError, match="trace is not UTF-8 but UTF-16"):
        read(write(AZURE.encode("utf-16")))
    with pytest.raises(ValueError, match="trace is compressed with gzip; unpack it first"):
        read(write(gzip.compress(AZURE.encode())))
    with pytest.raises(ValueError, match="not a file"):
        read(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize("read", [read_azure, read_burstgpt])
def test_a_csv_of_a_header_alone_is_refused(write, read):
    for header in (AZURE.splitlines()[0], BURSTGPT.splitlines()[0]):
        with pytest.raises(ValueError, match=r"no usable record$|no column"):
            read(write(header))


def test_mooncake_rows_keep_their_hash_ids_and_seconds(write):
    rows, notes = read_mooncake(write(f"{mooncake_line()}\n{mooncake_line(timestamp=2500)}\n"))
    assert notes == []
    assert [row.arrival_s for row in rows] == [0, 2.5]
    assert rows[0].hash_ids == (0, 1, 2)


def test_equal_hash_ids_give_equal_blocks_of_512_tokens_and_others_differ(write):
    lines = [
        mooncake_line(hash_ids=(0, 1, 2)),
        mooncake_line(hash_ids=(0, 1, 3)),
        mooncake_line(input_length=520, hash_ids=(4, 2)),
    ]
    rows, _ = read_mooncake(write("\n".join(lines)))
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
    ("line", "reason"),
    [
        ('{"timestamp": 1', "not JSON: Expecting ',' delimiter, column 16"),
        ("[1]", "a JSON object expected, got [1]"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ('{"timestamp": 1, "hash_ids": []}', "no input_length, output_length"),
        (
            mooncake_line(input_length=1024),
            "input_length 1024 makes 2 blocks of 512, got 3 hash_ids",
        ),
        (
            mooncake_line(input_length=0, hash_ids=()),
            "input_length must be at least 1, got 0",
        ),
        (mooncake_line(output_length=0), "output_length must be at least 1, got 0"),
        (mooncake_line(output_length=None), "output_length must be a whole number, got None"),
        (mooncake_line(output_length=True), "output_length must be a whole number, got True"),
        (mooncake_line(output_length=math.nan), "output_length must be a whole number, got nan"),
        (mooncake_line(output_length=[5]), "output_length must be a whole number, got [5]"),
        (mooncake_line(hash_ids=(0, 1, -2)), "a hash id must be at least 0, got -2"),
        (mooncake_line().replace("[0, 1, 2]", "7"), "hash_ids must be a list, got 7"),
        (mooncake_line(timestamp=None), "timestamp must be a date or a number, got None"),
        (
            mooncake_line(timestamp=-3),
            "timestamp must be a date or a number of at least 0, got -3",
        ),
        (
            mooncake_line(timestamp=math.inf),
            "timestamp must be a date or a number of at least 0, got inf",
        ),
        (mooncake_line(timestamp=10**400), "int too large to convert to float"),
    ],
)
def test_a_bad_mooncake_line_costs_itself_and_is_named(write, line, reason):
    rows, [note] = read_mooncake(write(f"{mooncake_line()}\n{line}\n\n{mooncake_line()}\n"))
    assert len(rows) == 2
    assert note.startswith(f"skipped 1 of 3 records: {reason}")
    assert note.endswith("(line 2)")


def test_mooncake_numbers_may_be_floats_and_text_and_times_unsorted_or_since_1970(write):
    lines = [
        mooncake_line(2500.5, 1030.0, "5", [0, 0, "2"]),
        mooncake_line("1.0", "1030", "5.0", [0.0, 1, 2]),
        mooncake_line("1970-01-01T00:00:04+00:00"),
    ]
    rows, notes = read_mooncake(write("\ufeff" + "\r\n".join(lines)))
    assert [row.arrival_s for row in rows] == [0.001, 2.5005, 4]
    assert [row.hash_ids for row in rows] == [(0, 1, 2), (0, 0, 2), (0, 1, 2)]
    assert {(row.num_prompt_tokens, row.num_output_tokens) for row in rows} == {(1030, 5)}
    assert notes == []
    rows, _ = read_mooncake(write(mooncake_line(1700158546500)))
    assert rows[0].arrival_s == 1700158546.5


@pytest.mark.parametrize("size", [1, 16, 64, 512, 1024])
def test_the_size_of_mooncake_blocks_is_that_of_most_rows(write, size):
    lengths = [size, size + 1, 3 * size, 3 * size + 1]
    lines = [
        mooncake_line(input_length=n, hash_ids=range(10, 10 + math.ceil(n / size))) for n in lengths
    ]
    bad = mooncake_line(input_length=4 * size, hash_ids=[1])
    rows, [note] = read_mooncake(write("\n".join([bad, *lines])))
    assert [row.num_prompt_tokens for row in rows] == lengths
    assert note.endswith(f"makes 4 blocks of {size}, got 1 hash_ids (line 1)")
    requests = list(mooncake_requests(rows, vocab=VOCAB, seed=0))
    assert [request.num_prompt_tokens for request in requests] == lengths
    assert requests[0].prompt_token_ids == requests[3].prompt_token_ids[:size]


def test_mooncake_blocks_are_of_512_tokens_where_rows_do_not_tell(write):
    rows, _ = read_mooncake(write(mooncake_line(input_length=100, hash_ids=[4])))
    assert rows[0].block_tokens == 512


def test_prompts_are_lines_and_those_that_are_blank_or_no_text_are_named(write):
    prompts, [note] = read_prompts(write(b"\xef\xbb\xbffirst one\n\n  \n\xff\nsecond\r\n"))
    assert prompts == ["first one", "second"]
    assert note == (
        "skipped 3 of 5 records: a blank line (line 2, line 3); "
        "not UTF-8 (invalid start byte) (line 4)"
    )


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
    rows, notes = read_azure(published("azure_llm_2023_conv.csv"))
    assert (len(rows), notes) == (19366, [])
    assert round(sum(row.num_prompt_tokens for row in rows) / len(rows)) == 1155
    assert round(sum(row.num_output_tokens for row in rows) / len(rows)) == 211


def test_the_published_mooncake_trace_has_its_known_size():
    rows, notes = read_mooncake(published("mooncake_conversation.jsonl"))
    assert (len(rows), notes) == (12031, [])
    assert rows[-1].arrival_s == pytest.approx(3536.999)
