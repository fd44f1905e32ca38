"""Bad input is refused in one clear line before anything runs, and harms nobody else."""

import math

import numpy as np
import pytest

from paged_jax import Engine, SamplingParams
from paged_jax.executor.compilation import count_compilations
from paged_jax.loading import LoadedModel
from tests.conftest import SMALL_LIMITS

PROMPT = "A function definition is an "
GREEDY = SamplingParams(temperature=0, max_tokens=12)

BAD_PROMPTS = {
    "empty text": ("", "the prompt is empty"),
    "no tokens": ([], "the prompt is empty"),
    "no tokens in a dict": ({"prompt_token_ids": []}, "the prompt is empty"),
    "token beyond the vocabulary": ([5, 259, 5], "token id 259 is outside the vocabulary of 259"),
    "negative token": ([5, -1], "token id -1 is outside the vocabulary of 259"),
    "huge token": ([2**40], f"token id {2**40} is outside the vocabulary"),
    "a float": ([1.5, 2], "a prompt is text, a list of token ids.*1.5"),
    "a bool": ([True, 2], "a prompt is text, a list of token ids.*True"),
    "None": (None, "a prompt is text, a list of token ids.*None"),
    "a number": (7, "a prompt is text, a list of token ids.*7"),
    "bytes": (b"text", "a prompt is text"),
    "unknown key": ({"text": "x"}, r"'prompt' or 'prompt_token_ids'; got \['text'\]"),
    "both keys": ({"prompt": "x", "prompt_token_ids": [1]}, "one key"),
    "dict of a dict": ({"prompt": {"prompt": "x"}}, "a prompt is text"),
    "lone surrogate": ("a\ud800b", "not valid Unicode"),
    "message without content": ([{"role": "user"}], "chat template"),
    "message without role": ([{"content": "hello"}], "a prompt is text"),
    "as long as the model": ([1] * 512, "512 tokens leaves no room.*max_model_len 512"),
}


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_the_others_go_on(engine, prompt, message):
    engine.add_request("good", PROMPT, GREEDY)
    engine.step()
    with pytest.raises(ValueError, match=message) as error:
        engine.add_request("bad", prompt, GREEDY)
    assert "\n" not in str(error.value)
    while engine.has_work:
        [output] = engine.step() or [None]
    assert output.request_id == "good"
    assert len(output.outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop_token_ids=[300]), "stop token 300 is outside the vocabulary of 259"),
        (
            SamplingParams(
                stop_token_ids=range(256), min_tokens=1, logit_bias=dict.fromkeys(range(256), 1.0)
            ),
            "256 tokens in logit_bias and 257 end tokens .* are more than 512",
        ),
        ({"temprature": 0}, "unknown key of params 'temprature'; did you mean 'temperature'"),
        ("greedy", "params must be SamplingParams or a dict of its fields, got 'greedy'"),
        (SamplingParams(allowed_token_ids=[259]), "allowed token 259 is outside the vocabulary of"),
        (
            SamplingParams(logit_bias={"999": 1}),
            "logit_bias of token 999 is outside the vocabulary",
        ),
        (
            SamplingParams(structured_outputs={"regex": "("}),
            "structured_outputs: .* unclosed group",
        ),
        (
            SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True),
            "needs a token that ends the text, and ignore_eos is set",
        ),
        (
            SamplingParams(truncate_prompt_tokens=-1, max_tokens=512),
            "-1: max_tokens 512 leaves no room for a prompt within max_model_len 512",
        ),
        (
            SamplingParams(truncate_prompt_tokens=-1, max_tokens=None, min_tokens=512),
            "-1: min_tokens 512 leaves no room for a prompt within max_model_len 512; lower",
        ),
    ],
    ids=str,
)
def test_bad_parameters_are_refused(engine, params, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request(None, PROMPT, params)
    with pytest.raises(ValueError, match=message):
        engine.generate([PROMPT], [params], progress=False)


def test_a_name_in_use_is_refused(engine):
    engine.add_request("r", PROMPT, GREEDY)
    with pytest.raises(ValueError, match="request 'r' is running already"):
        engine.add_request("r", PROMPT, GREEDY)
    assert engine.abort("r").outputs[0].finish_reason == "abort"
    engine.add_request("r", PROMPT, GREEDY)
    assert engine.abort("r") is not None


def test_a_request_that_can_never_fit_the_pool_is_refused_with_the_numbers(engine_with):
    engine = engine_with(block_size=4, num_blocks=96)
    with pytest.raises(ValueError, match="can need 103 blocks of 4 slots, the pool has 96"):
        engine.generate([[1] * 300], SamplingParams(max_tokens=110), progress=False)


def test_generate_with_one_bad_prompt_runs_nothing(engine):
    iterations = engine.core.num_iterations
    with pytest.raises(ValueError, match="prompt 2: token id 999"):
        engine.generate([PROMPT, PROMPT, [999], PROMPT], GREEDY, progress=False)
    assert engine.core.num_iterations == iterations
    assert not engine.has_work
    with pytest.raises(ValueError, match="2 prompts, but 3 sampling parameters"):
        engine.generate([PROMPT] * 2, [GREEDY] * 3, progress=False)
    assert not engine.has_work


@pytest.mark.parametrize("prompts", [None, 5, 1.5])
def test_generate_refuses_what_is_no_prompt(engine, prompts):
    with pytest.raises(ValueError, match="a prompt is text"):
        engine.generate(prompts, GREEDY, progress=False)


@pytest.mark.parametrize("chat", ["hello", [1, 2], None, ["hello"], [[{"content": "x"}]]], ids=str)
def test_chat_takes_messages_alone(engine, chat):
    with pytest.raises(ValueError, match="a chat is a list of messages with role and content"):
        engine.chat(chat, GREEDY, progress=False)


def test_stream_refuses_a_bad_prompt_before_anyone_reads(engine):
    with pytest.raises(ValueError, match="token id 999 is outside the vocabulary"):
        engine.stream([999], GREEDY)
    with pytest.raises(ValueError, match="best_of do not stream"):
        engine.stream(PROMPT, SamplingParams(n=1, best_of=2))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"priority": 1.5}, "priority must be an integer, got 1.5"),
        ({"priority": True}, "priority must be an integer, got True"),
        ({"timeout_s": 0}, "timeout_s must be a number of seconds above 0, got 0"),
        ({"timeout_s": -1.0}, "timeout_s .* got -1.0"),
        ({"timeout_s": math.nan}, "timeout_s .* got nan"),
        ({"timeout_s": "1"}, "timeout_s .* got '1'"),
        ({"on_output": 7}, "on_output must be callable, got 7"),
        ({"arrival_time": math.nan}, "arrival_time must be a finite number of seconds, got nan"),
        ({"arrival_time": "now"}, "arrival_time must be a finite number of seconds, got 'now'"),
        ({"stream": "yes"}, "stream must be True or False, got 'yes'"),
    ],
    ids=str,
)
def test_arguments_of_a_request_that_mean_nothing_are_refused(engine, arguments, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request(None, PROMPT, GREEDY, **arguments)
    assert not engine.has_work


def test_numbers_of_numpy_are_numbers(engine):
    times = {"arrival_time": np.float32(engine.core.clock()), "timeout_s": np.float32(60)}
    engine.add_request("r", PROMPT, GREEDY, priority=np.int64(1), **times)
    while engine.has_work:
        [output] = engine.step() or [None]
    assert output.outputs[0].finish_reason == "length"


def test_a_bad_prompt_among_good_ones_leaves_running_requests_alone(engine):
    [wanted] = engine.generate(PROMPT, GREEDY, progress=False)
    engine.add_request("mine", PROMPT, GREEDY)
    engine.step()
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        engine.generate([PROMPT, ""], GREEDY, progress=False)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [out.request_id for out in outputs] == ["mine"]
    assert outputs[0].outputs[0].text == wanted.outputs[0].text


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("when", ["before the step", "after the step"])
@pytest.mark.parametrize("iteration", [0, 1, 2, 5, 9])
def test_an_engine_interrupted_in_a_step_can_be_used_again(engine, monkeypatch, when, iteration):
    """As by Ctrl-C: generate gives its requests up, those added before lose nothing."""
    prompts = [PROMPT, list(b"x" * 70), PROMPT]
    wanted = engine.generate(prompts, GREEDY, progress=False)
    [mine] = engine.generate(PROMPT, GREEDY, progress=False)
    execute, calls = engine.executor.execute, iter(range(1000))

    def interrupted(batch):
        interrupts = next(calls) == iteration
        if interrupts and when == "before the step":
            raise Interrupted
        result = execute(batch)
        if interrupts:
            raise Interrupted
        return result

    engine.add_request("mine", PROMPT, GREEDY)
    monkeypatch.setattr(engine.executor, "execute", interrupted)
    with pytest.raises(Interrupted):
        engine.generate(prompts, GREEDY, progress=False)
    again = engine.generate(prompts, GREEDY, progress=False)
    assert [out.outputs[0].text for out in again] == [out.outputs[0].text for out in wanted]
    [output] = engine.step()
    assert output.request_id == "mine"
    assert output.outputs[0].text == mine.outputs[0].text


EXTREME = [
    {"temperature": 1e-300},
    {"temperature": 1e-40},
    {"temperature": 1.2e-38},
    {"temperature": 1e-5},
    {"temperature": 1e300},
    {"top_k": 2**62},
    {"top_p": 1e-300},
    {"min_p": 1.0},
    {"repetition_penalty": 1e300},
    {"repetition_penalty": 1e-300},
    {"seed": 2**80 + 3},
    {"temperature": 1e300, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1e300},
]


def test_extreme_parameters_that_are_allowed_work_and_disturb_nobody(engine):
    [alone] = engine.generate(PROMPT, GREEDY, progress=False)
    params = [SamplingParams(**{"max_tokens": 6, "seed": 1} | extreme) for extreme in EXTREME]
    *outputs, greedy = engine.generate(
        [PROMPT] * len(params) + [PROMPT], [*params, GREEDY], progress=False
    )
    assert greedy.outputs[0].text == alone.outputs[0].text
    for output in outputs:
        assert all(0 <= token < 259 for token in output.outputs[0].token_ids)
    # Without randomness left, the most likely tokens come.
    for i in (0, 1, 2, 3, 6, 7):
        assert outputs[i].outputs[0].text == alone.outputs[0].text[:6], EXTREME[i]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"block_size": -16}, "block_size .* got -16"),
        ({"block_size": 1.5}, "block_size .* got 1.5"),
        ({"num_blocks": 0}, "num_blocks must be an integer of at least 1, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs .* got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens .* got 0"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens 3 is less than max_num_seqs 4"),
        ({"max_prefill_seqs": 0}, "max_prefill_seqs .* got 0"),
        ({"max_prefill_seqs": 2.5}, "max_prefill_seqs .* got 2.5"),
        ({"max_model_len": 1}, "max_model_len must be between 2 and 1024.*got 1"),
        ({"max_model_len": 2000}, "max_model_len must be between 2 and 1024.*got 2000"),
        ({"max_model_len": 99.5}, "max_model_len .* got 99.5"),
        ({"watermark": math.nan}, "watermark .* got nan"),
        ({"watermark": 1.0}, "watermark .* got 1.0"),
        ({"dtype": "float7"}, "dtype.*float7"),
        ({"dtype": "int8"}, "dtype.*int8"),
        ({"attention": "flash"}, "unknown attention 'flash'"),
        ({"seed": -1}, "seed .* got -1"),
        ({"max_num_waiting": 0}, "max_num_waiting must be an integer of at least 1, got 0"),
        ({"swap_space_blocks": -1}, "swap_space_blocks must be an integer of at least 0, got -1"),
        ({"swap_space_blocks": 10**12}, r"swap_space_blocks 10{12}: .* bytes of host memory"),
        ({"preemption_mode": "wait"}, "preemption_mode must be one of .* got 'wait'"),
        ({"scheduling_policy": "lifo"}, "policy 'lifo' is unknown; choose one of fcfs"),
        ({"target_inter_token_s": 0}, "target_inter_token_s must be above 0 .* got 0"),
        (
            {"enable_chunked_prefill": False},
            "max_num_batched_tokens 32 is less than max_model_len 512: without chunked prefill",
        ),
        ({"seed": 1.5}, "seed .* got 1.5"),
        ({"enable_prefix_caching": "off"}, "enable_prefix_caching must be True or False, .*'off'"),
        ({"enable_chunked_prefill": None}, "enable_chunked_prefill must be True or False, .*None"),
        ({"pipelined": "no"}, "pipelined must be True or False, got 'no'"),
        ({"watermark": "1%"}, "watermark must be a number, got '1%'"),
        ({"watermark": None}, "watermark must be a number, got None"),
        ({"target_inter_token_s": "0.1"}, "target_inter_token_s must be a number, got '0.1'"),
        ({"scheduling_policy": ["fcfs"]}, "policy .* is unknown; choose one of fcfs"),
    ],
    ids=str,
)
def test_limits_that_cannot_work_are_refused(tiny_model, limits, message):
    with pytest.raises(ValueError, match=message) as error:
        Engine(tiny_model, **SMALL_LIMITS | limits)
    assert "\n" not in str(error.value)


def test_a_model_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no model at '/no/such/path'"):
        Engine("/no/such/path", **SMALL_LIMITS)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
def test_a_dtype_other_than_that_of_loaded_weights_is_applied(tiny_model, max_num_seqs):
    limits = {"dtype": "bfloat16", "max_num_seqs": max_num_seqs, "warm_up": True}
    engine = Engine(tiny_model, **SMALL_LIMITS | limits)
    engine.warm_up(progress=False)
    # XLA's CPU products of a single row in bfloat16 are slow: no step has one.
    steps = [name.split() for name in engine.executor.lowerings()]
    assert min(int(size) for name, size in steps if name in ("decode", "head")) == 2
    with count_compilations() as count:
        outputs = engine.generate([PROMPT] * 2, GREEDY, progress=False)
    assert count.programs == 0
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 12]
    assert engine.executor.cache.k[0].dtype == "bfloat16"


def test_tokens_without_a_text_are_left_out_of_it(tiny_model):
    """Vocabularies are often padded beyond the tokenizer's."""
    config, weights = tiny_model.config, dict(tiny_model.weights)
    from dataclasses import replace

    padded = np.concatenate([weights["embed.embedding"], weights["embed.embedding"][:61]])
    weights["embed.embedding"] = padded
    model = LoadedModel(replace(config, vocab_size=320), weights, tiny_model.tokenizer)
    engine = Engine(model, **SMALL_LIMITS)
    params = SamplingParams(temperature=5.0, max_tokens=40, seed=0)
    [output] = engine.generate(PROMPT, params, progress=False)
    tokens = output.outputs[0].token_ids
    assert max(tokens) > 259
    *_, last = engine.stream(PROMPT, params)
    assert last.outputs[0].token_ids == tokens
    assert last.outputs[0].text == output.outputs[0].text
