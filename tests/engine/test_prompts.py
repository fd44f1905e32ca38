"""Prompts come as text, ids, arrays and dicts, alone or in any iterable; others are refused."""

import array
from enum import StrEnum

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import SamplingParams

PROMPT = "A function definition is an "
IDS = list(PROMPT.encode())
GREEDY = SamplingParams(temperature=0, max_tokens=4)


class Column:
    """Stands for a data frame's column: it has keys, a type and `tolist`."""

    ndim = 1

    def __init__(self, values, dtype=object):
        self.values, self.dtype = values, np.dtype(dtype)

    def keys(self):
        return range(len(self.values))

    def tolist(self):
        return list(self.values)


class Frame:
    """Stands for a data frame: it iterates over the names of its columns."""

    def keys(self):
        return ["prompt", "answer"]

    def __iter__(self):
        return iter(self.keys())


class Name(StrEnum):
    PROMPT = PROMPT


ONE_PROMPT = {
    "text": PROMPT,
    "numpy's text": np.str_(PROMPT),
    "an enumeration's text": Name.PROMPT,
    "ids": IDS,
    "a tuple": tuple(IDS),
    "numpy's integers": [np.int16(token) for token in IDS],
    "0-d arrays": [jnp.int32(token) for token in IDS],
    "int64": np.array(IDS),
    "uint8": np.array(IDS, np.uint8),
    "objects": np.array(IDS, object),
    "a view": np.array(IDS).repeat(2)[::2],
    "jax": jnp.array(IDS),
    "array": array.array("i", IDS),
    "a column": Column(IDS, int),
    "a range": range(40, 50),
    "a generator": (token for token in IDS),
    "text in a dict": {"prompt": np.str_(PROMPT)},
    "an array in a dict": {"prompt_token_ids": np.array(IDS)},
    "jax in a dict": {"prompt_token_ids": jnp.array(IDS)},
}

MANY_PROMPTS = {
    "numpy arrays": [np.array(IDS), np.array(IDS[:3])],
    "jax arrays": (jnp.array(IDS), jnp.array(IDS[:3])),
    "arrays and text": [np.array(IDS), PROMPT[:3]],
    "an array of lists": np.array([IDS, IDS[:3]], object),
    "an array of text": np.array([PROMPT, PROMPT[:3]]),
    "numpy's strings": np.array([PROMPT, PROMPT[:3]], np.dtypes.StringDType()),
    "a column": Column([PROMPT, PROMPT[:3]]),
    "a generator": (PROMPT[:length] for length in (len(PROMPT), 3)),
    "a map of arrays": map(np.array, [IDS, IDS[:3]]),
    "keys": {PROMPT: 0, PROMPT[:3]: 0}.keys(),
    "values": {"a": PROMPT, "b": IDS[:3]}.values(),
    "dicts": [{"prompt": PROMPT}, {"prompt_token_ids": np.array(IDS[:3])}],
}

REFUSED = {
    "an array of floats": (np.array([65.0, 66.0]), r"1-D array of integers.*got .*\[65\."),
    "an array of bools": (np.array([True, False]), r"1-D array of integers.*got .*\[ ?True"),
    "jax's floats": (jnp.array([65.0]), r"1-D array of integers.*got .*\[65\."),
    "jax's bools": (jnp.array([True]), r"1-D array of integers.*got .*\[ ?True"),
    "a 0-d array": (np.array(65), r"1-D array of integers.*got .*65"),
    "a 0-d jax array": (jnp.array(65), r"1-D array of integers.*got .*65"),
    "an array without numbers": (np.array([], np.int32), "the prompt is empty"),
    "an array of three dimensions": (np.ones((1, 2, 2), int), "1-D array of integers"),
    "a masked array": (np.ma.array([65, 66], mask=[0, 1]), "1-D array of integers.*got .*65"),
    "an array beyond the vocabulary": (np.array([65, 300]), "token id 300 is outside"),
    "a negative array": (jnp.array([65, -1]), "token id -1 is outside"),
    "a large unsigned array": (np.array([2**63], np.uint64), f"token id {2**63} is outside"),
    "bytes": (b"text", "a prompt is text.*got b'text'"),
    "a bytearray": (bytearray(b"text"), "a prompt is text.*got bytearray"),
    "a memoryview": (memoryview(b"text"), "a prompt is text.*got <memory"),
    "an array of bytes": (np.array([b"text"]), "a prompt is text.*got .*b'text'"),
    "a set of ids": ({65, 66}, "a prompt is text"),
    "a data frame": (Frame(), "a prompt is text.*Frame"),
    "text as ids": ({"prompt_token_ids": "65 66"}, "prompt_token_ids must be a list .*got '65 66'"),
    "a tokenizer's output": (
        {"input_ids": [65], "attention_mask": [1]},
        r"'prompt_token_ids'; got \['attention_mask', 'input_ids'\]",
    ),
    "two dimensions in a dict": ({"prompt_token_ids": np.ones((2, 2), int)}, "1-D array of int"),
}


@pytest.mark.parametrize("prompt", ONE_PROMPT.values(), ids=ONE_PROMPT)
def test_one_prompt_may_be(engine, prompt):
    wanted = bytes(range(40, 50)).decode() if isinstance(prompt, range) else PROMPT
    [output] = engine.generate(prompt, GREEDY, progress=False)
    assert output.prompt_token_ids == tuple(wanted.encode())
    assert all(type(token) is int for token in output.prompt_token_ids)
    assert output.prompt is None or type(output.prompt) is str


@pytest.mark.parametrize("prompts", MANY_PROMPTS.values(), ids=MANY_PROMPTS)
def test_many_prompts_may_be(engine, prompts):
    outputs = engine.generate(prompts, GREEDY, progress=False)
    assert [output.prompt_token_ids for output in outputs] == [tuple(IDS), tuple(IDS[:3])]


def test_the_rows_of_an_array_are_prompts(engine):
    for rows in (np.array([IDS[:5], IDS[1:6]]), jnp.array([IDS[:5], IDS[1:6]])):
        outputs = engine.generate(rows, GREEDY, progress=False)
        assert [output.prompt_token_ids for output in outputs] == [tuple(IDS[:5]), tuple(IDS[1:6])]
        with pytest.raises(ValueError, match="1-D array of integers"):
            engine.add_request(None, rows, GREEDY)


def test_a_set_of_prompts_is_served_in_its_own_order(engine):
    prompts = {PROMPT, PROMPT[:3]}
    outputs = engine.generate(prompts, GREEDY, progress=False)
    assert [output.prompt for output in outputs] == list(prompts)


@pytest.mark.parametrize("none", [[], (), {}.values(), iter(()), np.array([], object)])
def test_no_prompt_is_no_request(engine, none):
    assert engine.generate(none, GREEDY, progress=False) == []


def test_a_request_and_a_stream_take_arrays_and_iterators(engine):
    [wanted] = engine.generate(PROMPT, GREEDY, progress=False)
    for prompt in (np.array(IDS), jnp.array(IDS), iter(IDS), {"prompt_token_ids": np.array(IDS)}):
        *_, output = engine.stream(prompt, GREEDY)
        assert output.outputs[0].text == wanted.outputs[0].text
    engine.add_request("r", (token for token in IDS), GREEDY)
    while engine.has_work:
        [output] = engine.step() or [None]
    assert output.outputs[0].text == wanted.outputs[0].text


def test_an_array_is_pinned_as_its_ids(engine):
    prefix = list(b"x" * 40)
    assert engine.pin_prefix(np.array(prefix)) == 32
    engine.unpin_prefix(jnp.array(prefix))


@pytest.mark.parametrize("of_each", [list, tuple, iter, lambda params: np.array(params, object)])
def test_parameters_of_each_prompt_come_in_any_iterable(engine, of_each):
    params = [SamplingParams(temperature=0, max_tokens=length) for length in (3, 1)]
    outputs = engine.generate((p for p in [PROMPT, IDS]), of_each(params), progress=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1]
    with pytest.raises(ValueError, match="3 prompts, but 2 sampling parameters"):
        engine.generate([PROMPT] * 3, of_each(params), progress=False)


@pytest.mark.parametrize(("prompt", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_prompt_is_refused_with_the_right_form_and_the_others_go_on(
    engine, prompt, message
):
    engine.add_request("good", PROMPT, GREEDY)
    engine.step()
    for ask in (
        lambda: engine.add_request(None, prompt, GREEDY),
        lambda: engine.generate([PROMPT, prompt], GREEDY, progress=False),
        lambda: engine.generate(prompt, GREEDY, progress=False),
    ):
        with pytest.raises(ValueError, match=message) as error:
            ask()
        assert "\n" not in str(error.value)
    while engine.has_work:
        [output] = engine.step() or [None]
    assert (output.request_id, len(output.outputs[0].token_ids)) == ("good", 4)


def test_a_generator_that_fails_loses_no_other_request(engine):
    def broken():
        yield PROMPT
        raise OSError("the file is gone")

    engine.add_request("good", PROMPT, GREEDY)
    with pytest.raises(OSError, match="the file is gone"):
        engine.generate(broken(), GREEDY, progress=False)
    with pytest.raises(OSError, match="the file is gone"):
        engine.add_request(None, broken(), GREEDY)
    while engine.has_work:
        [output] = engine.step() or [None]
    assert output.request_id == "good"
