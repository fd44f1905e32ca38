"""Structured outputs against brute force: all token sequences of a small vocabulary."""

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.constraints.build import Constraints
from paged_jax.constraints.grammar import MAX_CACHED_GRAMMARS
from paged_jax.loading import build_byte_tokenizer, load_tokenizer
from paged_jax.sampling_params import SamplingParams
from paged_jax.structured_outputs import StructuredOutputsParams
from tests.constraints.small_vocabulary import (
    CONSTRAINTS,
    END,
    PAD,
    TEXTS,
    TOKENIZER,
    VOCAB_SIZE,
    allowed,
)
from tests.loading.test_detokenizer import SENTENCEPIECE

LONGEST = 6
WORDS = ["".join(w) for n in range(LONGEST + 1) for w in itertools.product("abc", repeat=n)]


def structured(constraints=CONSTRAINTS, **form):
    params = {name: form.pop(name) for name in ("ignore_eos", "stop_token_ids") if name in form}
    return constraints.of(SamplingParams(structured_outputs=form, **params))


def text_of(output) -> str:
    return "".join(TEXTS[token] for token in output)


def paths(rule, output=()):
    """All outputs of text tokens that the constraint lets grow, and what it then allows."""
    tokens = allowed(rule, output)
    yield output, tokens
    for token in tokens & set(range(len(TEXTS))):
        yield from paths(rule.branch(), (*output, token))


def finite_regexes():
    """Regular expressions, each with all of its texts."""

    def joined(*parts):
        return {"".join(texts) for texts in itertools.product(*(texts for _, texts in parts))}

    return st.recursive(
        st.sampled_from([("a", {"a"}), ("b", {"b"}), ("[ac]", {"a", "c"}), ("ab", {"ab"})]),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda p: (f"{p[0][0]}{p[1][0]}", joined(*p))),
            st.tuples(inner, inner).map(lambda p: (f"({p[0][0]}|{p[1][0]})", p[0][1] | p[1][1])),
            inner.map(lambda p: (f"({p[0]})?", p[1] | {""})),
            inner.map(lambda p: (f"({p[0]}){{1,2}}", p[1] | joined(p, p))),
        ),
        max_leaves=4,
    ).filter(lambda p: len(p[1]) <= 50 and max(map(len, p[1])) <= LONGEST)


def check_against_brute_force(rule, language):
    """What is allowed keeps to the language, and each of its texts can come out."""
    ended = set()
    for output, tokens in paths(rule):
        text = text_of(output)
        assert (END in tokens) == (text in language)
        if END in tokens:
            ended.add(text)
        for token in tokens - {END}:
            assert token < len(TEXTS), "neither a special token nor padding is text"
            assert any(word.startswith(text + TEXTS[token]) for word in language)
        assert tokens, "a text that has begun can always be completed"
    assert ended == language


@given(finite_regexes())
@settings(max_examples=60, deadline=None)
def test_texts_are_those_that_the_regular_expression_matches(case):
    regex, language = case
    assert language == {word for word in WORDS if re.fullmatch(regex, word)}
    check_against_brute_force(structured(regex=regex), language)


@given(st.sets(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_texts_are_the_choices(choices):
    check_against_brute_force(structured(choice=choices), choices)


def test_texts_are_those_of_the_grammar():
    lark = 'start: pair+\npair: "a" start? "b"'
    nested = structured(grammar=lark)
    assert allowed(nested, []) == {0, 3}
    assert END not in allowed(nested, [0])
    ended = structured(grammar=lark)
    assert END in allowed(ended, [0, 3, 1])
    gbnf = structured(grammar='root ::= "a" ("b" | "c")')
    check_against_brute_force(gbnf, {"ab", "ac"})


def test_with_a_token_for_each_byte_exactly_the_right_tokens_are_left():
    tokenizer = build_byte_tokenizer()
    rule = structured(Constraints(tokenizer, 300, [257]), regex=r'"[a-c]{2}é"|x+y?')
    language_begins = {"": '"x', '"': "abc", '"a': "abc", '"ab': b"\xc3", "x": "xy\0", "xy": "\0"}
    for text, following in language_begins.items():
        raw = following.encode() if isinstance(following, str) else following
        wanted = {257 if byte == 0 else byte for byte in raw}
        assert allowed(rule.branch(), list(text.encode()), 300) == wanted


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ["-7", "0"], ["07", "1.5", "x"]),
        ({"enum": ["é😀", 'a"b', 3]}, ['"é😀"', '"a\\"b"', "3"], ['"é"', "4"]),
        (
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            ['{"a":true}', '{"a" : false, "b": [1, null]}'],
            ["{}", '{"a":1}', ' {"a":true}'],
        ),
    ],
)
def test_texts_follow_the_json_schema(schema, good, bad):
    constraints = Constraints(build_byte_tokenizer(), 259, [257])

    def accepts(text: str, form) -> bool:
        rule, output = structured(constraints, json=form), []
        for byte in text.encode():
            if byte not in allowed(rule, output, 259):
                return False
            output.append(byte)
        return 257 in allowed(rule, output, 259)

    for form in (schema, json.dumps(schema)):
        assert [accepts(text, form) for text in good + bad] == [True] * len(good) + [False] * len(
            bad
        )


def test_any_json_object_is_an_object():
    rule = structured(Constraints(build_byte_tokenizer(), 259, [257]), json_object=True)
    assert allowed(rule, [], 259) == {ord("{")}
    assert 257 in allowed(rule, list(b'{"a":[1,{"b":null}]}'), 259)


@pytest.mark.parametrize(
    ("tokenizer", "eos"),
    [(load_tokenizer("smollm2"), 2), (SENTENCEPIECE, 2)],
    ids=["gpt2", "llama"],
)
def test_texts_of_real_tokenizers_match(tokenizer, eos):
    """A random walk: what is decoded is what the grammar has seen."""
    rng = np.random.default_rng(0)
    size = len(tokenizer) + 5
    constraints = Constraints(tokenizer, size, [eos])
    regex = r"(name|città|日本): [a-zé]{1,8} (😀|[0-9]{2}){1,3}\."
    for _ in range(20):
        rule, output = structured(constraints, regex=regex), []
        while tokens := sorted(allowed(rule, output, size) - {eos}):
            output.append(int(rng.choice(tokens)))
        assert eos in allowed(rule, output, size)
        assert re.fullmatch(regex, tokenizer.decode(output)), output


def test_a_grammar_that_is_complete_ends_by_the_tokens_that_end_the_sequence():
    rule = structured(regex="a", stop_token_ids=[1, 39])
    assert allowed(rule, []) == {0}
    assert allowed(rule, [0]) == {END, 1, 39}
    ignoring = structured(regex="a", stop_token_ids=[PAD], ignore_eos=True)
    assert allowed(ignoring, [0]) == {PAD}
    named = structured(regex="a", stop_token_ids=[END], ignore_eos=True)
    assert allowed(named, [0]) == {END}


def test_a_stop_token_that_is_text_may_end_the_text_early():
    rule = structured(regex="ac|b", stop_token_ids=[0])
    assert allowed(rule, []) == {0, 1}, "as a stop string may"


def test_without_a_token_to_end_with_the_request_is_refused():
    with pytest.raises(ValueError, match="needs a token that ends the text, and ignore_eos is set"):
        structured(regex="a", ignore_eos=True)
    without = Constraints(TOKENIZER, VOCAB_SIZE, [])
    with pytest.raises(ValueError, match="and the model has no EOS; give one in stop_token_ids"):
        structured(without, regex="a")
    assert allowed(structured(without, regex="a", stop_token_ids=[END]), [0]) == {END}


def test_an_eos_that_the_tokenizer_takes_for_text_does_not_end_a_text_early():
    """Some files do not mark it as special."""
    constraints = Constraints(TOKENIZER, VOCAB_SIZE, [2])
    rule = structured(constraints, regex="a[bc]?")
    assert allowed(rule, []) == {0, 3}
    assert allowed(rule, [0]) == {1, 2}
    assert allowed(rule, [0, 1]) == {2}
    assert allowed(structured(constraints, regex="ac"), [0]) == set(), "it can never be spelt"


def test_a_grammar_may_name_special_tokens():
    rule = structured(grammar='start: "a" <pad> | "b" <end>')
    assert allowed(rule, []) == {0, 1}
    assert allowed(rule.branch(), [0]) == {PAD}
    assert allowed(rule.branch(), [1]) == {END}


@pytest.mark.parametrize("vocab_size", [3, 6, 7, 8, 9, 31, 32, 33, 64, 65])
def test_a_vocabulary_may_be_larger_or_smaller_than_the_tokenizer(vocab_size):
    rule = structured(Constraints(TOKENIZER, vocab_size, [END]), regex="ab?|c")
    assert allowed(rule, [], vocab_size) == {t for t in (0, 2, 3) if t < vocab_size}
    ends = {1, END} & set(range(vocab_size))
    assert allowed(rule, [0], vocab_size) == ends


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "\ud800"}, "surrogates not allowed"),
        ({"choice": ["a", "\ud800"]}, "."),
        ({"json": {"const": "\ud800"}}, "."),
        ({"grammar": "start: other"}, 'unknown name: "other"'),
        ({"grammar": 'root ::= "a" b c ::='}, "."),
        ({"json": {"type": "nothing"}}, "Invalid type: nothing"),
        ({"json": {"not": {"type": "integer"}}}, "Unimplemented keys"),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable schema"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
    ],
    ids=str,
)
def test_a_grammar_that_does_not_compile_is_refused_with_the_reason(form, message):
    with pytest.raises(ValueError, match=f"^structured_outputs: .*{message}") as error:
        structured(**form)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


def chain(num_rules: int) -> str:
    rules = (f"r{n}: r{n + 1}" for n in range(num_rules))
    return "\n".join(["start: r0", *rules, f'r{num_rules}: "a"'])


def references(num: int) -> dict:
    definitions = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{num}": {"type": "string"}}}


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_a_chain_of_rules_however_long_ends_no_process():
    assert allowed(structured(grammar=chain(20_000)), []) == {0}
    structured(json=references(10_000))


@pytest.mark.parametrize(
    "form",
    [{"grammar": chain(50_000)}, {"json": {"const": "a" * 500_000}}],
    ids=["grammar", "json"],
)
def test_a_grammar_too_long_for_the_stack_is_refused(form):
    with pytest.raises(ValueError, match=r"at most 500000 characters, got [0-9]{6}$"):
        structured(**form)


@pytest.mark.parametrize(
    "schema", ['{"items":' * 99_999 + "{}" + "}" * 99_999, nested(99_999)], ids=["text", "dict"]
)
def test_a_schema_nested_too_deeply_is_refused(schema):
    with pytest.raises(ValueError, match=r"must be a JSON schema.*recursion") as error:
        StructuredOutputsParams(json=schema)
    assert "\n" not in str(error.value)


def test_of_thousands_of_choices_one_comes_out():
    rule = structured(choice=["".join(word) for word in itertools.product("abc", repeat=7)])
    assert allowed(rule, []) == {0, 1, 2, 3, 4, 5}
    assert allowed(rule, [5, 5]) == {0, 1, 2}
    assert allowed(rule, [5, 5, 2]) == {END}


def test_what_is_compiled_is_kept_and_the_tokenizer_read_once(monkeypatch):
    constraints = Constraints(TOKENIZER, VOCAB_SIZE, [END])
    compiler = constraints._grammars
    for _ in range(3):
        structured(constraints, json={"type": "object"})
        structured(constraints, regex="a")
    assert compiler._matcher.cache_info().misses == 2
    for n in range(MAX_CACHED_GRAMMARS + 5):
        structured(constraints, regex=f"a{{{n}}}")
    assert compiler._matcher.cache_info().currsize == MAX_CACHED_GRAMMARS


def test_each_sequence_has_its_own_state_and_is_asked_as_often_as_one_likes():
    first = structured(regex="(ab|ca)(b|c)")
    assert allowed(first, []) == allowed(first, []) == {0, 2, 3, 5}
    assert allowed(first, [0]) == {1, 4}
    second, third = first.branch(), first.branch()
    assert allowed(second, [0, 1]) == {1, 2}
    assert allowed(third, [0]) == {1, 4}
    assert allowed(third, [0, 4]) == {END}, "several tokens at once, as after a recompute"
    assert allowed(first, [0, 1, 2]) == {END}


def test_a_request_made_of_a_cached_grammar_begins_at_its_beginning():
    assert allowed(structured(regex="(ab){1,2}"), [3]) == {0, 3, END}
    assert allowed(structured(regex="(ab){1,2}"), []) == {3}


def test_what_llguidance_gives_up_raises_and_stays_so():
    rule = structured(regex="(a|ab|abc){3,9}")
    with pytest.raises(ValueError, match=r"structured_outputs: .*satisfy the grammar") as error:
        allowed(rule, [2])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="structured_outputs: "):
        allowed(rule.branch(), [2])
