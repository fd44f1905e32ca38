"""Chats render as transformers renders them; what a template cannot render is refused."""

import numpy as np
import pytest

from paged_jax import SamplingParams
from paged_jax.engine.prompts import encode
from paged_jax.loading import build_byte_tokenizer, load_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=4)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a class?"},
]
ANSWERED = [*CHAT, {"role": "assistant", "content": "A class is"}]

# Tools as Qwen's and Llama's templates write them; a value of its own; content in parts.
WITH_TOOLS = """
{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>' }}
{%- endif %}
{%- for message in messages %}{{ '<' + message.role + '>' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message['content'] %}{{ '[' + part.text + ']' }}{% endfor %}{% endif %}
{%- for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ '</>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}"""

SCHEMA = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of today.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}


def weather(city: str):
    """The weather of today.

    Args:
        city: Where.
    """
    return city


def undescribed(city):
    return city


def tokenizer_of(kind):
    if kind == "smollm2":
        return load_tokenizer("smollm2")
    tokenizer = build_byte_tokenizer()
    if kind == "tools":
        tokenizer.chat_template = WITH_TOOLS
    return tokenizer


@pytest.fixture(scope="module", params=["tiny", "smollm2", "tools"])
def tokenizer(request):
    return tokenizer_of(request.param)


@pytest.fixture(scope="module")
def with_tools():
    return tokenizer_of("tools")


def rendered(tokenizer, chat):
    return encode(chat, tokenizer, len(tokenizer))


def wanted(tokenizer, messages, **options):
    options = {"add_generation_prompt": True, **options}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    ids = tokenizer.apply_chat_template(messages, return_dict=False, **options)
    return text, tuple(ids)


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (CHAT, {}),
        (CHAT, {"add_generation_prompt": False}),
        (ANSWERED, {"add_generation_prompt": False, "continue_final_message": True}),
        (CHAT, {"chat_template": "{{ messages[-1].content }}?"}),
    ],
)
def test_a_chat_renders_as_transformers_renders_it(tokenizer, messages, options):
    same = wanted(tokenizer, messages, **options)
    assert rendered(tokenizer, {"messages": messages, **options}) == same
    if not options:
        assert rendered(tokenizer, messages) == same
    if options.get("continue_final_message"):
        assert same[0].endswith("A class is")


def test_tools_are_schemas_or_functions(with_tools):
    text, ids = wanted(with_tools, CHAT, tools=[SCHEMA])
    assert '"name": "weather"' in text
    for tools in ([SCHEMA], [weather], (weather,)):
        assert rendered(with_tools, {"messages": CHAT, "tools": tools}) == (text, ids)


def test_a_call_of_a_tool_has_no_content(with_tools):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    bare = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [*CHAT, bare, {"role": "tool", "name": "weather", "content": "Sun."}]
    text, _ = rendered(with_tools, {"messages": messages, "tools": [SCHEMA]})
    assert text == wanted(with_tools, messages, tools=[SCHEMA])[0]
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in text


def test_values_of_a_template_reach_it(with_tools):
    chat = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": np.False_}}
    assert rendered(with_tools, chat) == wanted(with_tools, CHAT, enable_thinking=False)
    assert rendered(with_tools, chat)[0].endswith("<assistant><think></think>")


def test_one_of_several_templates_is_named():
    tokenizer = tokenizer_of("tiny")
    tokenizer.chat_template = {
        "default": "{{ 'plain' }}",
        "tool_use": "{{ tools }}",
        "x": "{{ 7 }}",
    }
    assert rendered(tokenizer, CHAT)[0] == "plain"
    assert "weather" in rendered(tokenizer, {"messages": CHAT, "tools": [SCHEMA]})[0]
    assert rendered(tokenizer, {"messages": CHAT, "chat_template": "x"})[0] == "7"


def test_parts_of_text_go_to_a_template_that_takes_them_and_are_joined_for_others(
    tokenizer, with_tools
):
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    chat = [{"role": "user", "content": parts}]
    joined = [{"role": "user", "content": "One.\nTwo."}]
    takes_parts = tokenizer.chat_template == with_tools.chat_template
    assert rendered(tokenizer, chat) == wanted(tokenizer, chat if takes_parts else joined)
    assert rendered(tokenizer, [{"role": "user", "content": ("One.", "Two.")}]) == rendered(
        tokenizer, chat
    )


def test_messages_come_in_any_iterable_and_stay_as_they_were(tokenizer):
    same = wanted(tokenizer, CHAT)
    for messages in (tuple(CHAT), np.array(CHAT, object), iter(CHAT)):
        assert rendered(tokenizer, {"messages": messages}) == same
    named = [{key: np.str_(value) for key, value in message.items()} for message in CHAT]
    assert rendered(tokenizer, named) == same
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    rendered(tokenizer, parts)
    assert parts == [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]


def test_every_way_into_an_engine_takes_the_same_chat(engine):
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = "system: Be brief.\nuser: What is a class?\nassistant: A class is"
    [answer] = engine.chat(ANSWERED, GREEDY, progress=False, **options)
    assert answer.prompt == text
    chat = {"messages": ANSWERED, **options}
    [generated] = engine.generate(chat, GREEDY, progress=False)
    *_, streamed = engine.stream(chat, GREEDY)
    engine.add_request("r", chat, GREEDY)
    while engine.has_work:
        [added] = engine.step() or [None]
    [plain] = engine.generate(text, GREEDY, progress=False)
    for output in (generated, streamed, added, plain):
        assert output.prompt_token_ids == answer.prompt_token_ids
        assert output.outputs[0].text == answer.outputs[0].text


def test_several_chats_come_in_any_iterable_with_parameters_of_each(engine):
    params = (SamplingParams(temperature=0, max_tokens=length) for length in (2, 1))
    outputs = engine.chat((chat for chat in [CHAT, iter(CHAT)]), params, progress=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 1]
    assert outputs[0].prompt == outputs[1].prompt
    assert engine.chat([], GREEDY, progress=False) == []
    mixed = [{"messages": CHAT}, CHAT, "text", np.array([65])]
    prompts = [output.prompt for output in engine.generate(mixed, GREEDY, progress=False)]
    assert prompts == [outputs[0].prompt, outputs[0].prompt, "text", None]


def parts_of(part):
    return [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]


IMAGE = {"type": "image_url", "image_url": {"url": "cat.png"}}
BAD_CHATS = {
    "both ends": ({"continue_final_message": True}, "do not go together: give add_generation_prom"),
    "a number for a flag": (
        {"add_generation_prompt": 1},
        "add_generation_prompt must be True or F",
    ),
    "text for a flag": ({"continue_final_message": "no"}, "continue_final_message must be .*'no'"),
    "an unknown option": ({"documents": []}, "a chat has the keys .*tools.*; got documents"),
    "a template's file": ({"chat_template": "chat.jinja"}, "text of a Jinja template.*chat.jinja"),
    "a template that is no text": ({"chat_template": 7}, "text of a Jinja template, got 7"),
    "a broken template": ({"chat_template": "{% if %}"}, "the chat template fails"),
    "a value that is not read": (
        {"chat_template_kwargs": {"enable_thinkin": False}},
        "the chat template does not read enable_thinkin",
    ),
    "an option among the values": (
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        "add_generation_prompt stands beside chat_template_kwargs",
    ),
    "values without names": ({"chat_template_kwargs": [1]}, r"a dict of names, got \[1\]"),
    "one tool": (
        {"tools": SCHEMA},
        "tools must be a list of JSON schemas or functions, got {'type",
    ),
    "an iterator of tools": ({"tools": iter([weather])}, "tools must be a list of JSON schemas"),
    "a tool's name": ({"tools": ["weather"]}, "a tool is a JSON schema .* got 'weather'"),
    "a tool without docstring": (
        {"tools": [undescribed]},
        "a tool cannot be described: .*docstring",
    ),
    "no messages": (
        {"messages": []},
        r"a chat is a list of messages with role and content; got \[\]",
    ),
    "text for messages": ({"messages": "hello"}, "a chat is a list of messages .*got 'hello'"),
    "one message": ({"messages": CHAT[0]}, "a chat is a list of messages .*got {'role'"),
    "no role": ({"messages": [{"content": "x"}]}, "a chat is a list of messages"),
    "a role that is no text": ({"messages": [{"role": 7}]}, "the role of message 0 .* got 7"),
    "a number": (
        {"messages": [{"role": "user", "content": 7}]},
        "the content of message 0 .* got 7",
    ),
    "bytes": ({"messages": [{"role": "user", "content": b"x"}]}, "the content of message 0 .*b'x'"),
    "an image": (
        {"messages": parts_of(IMAGE)},
        "message 0 may hold parts .* alone, got .*image_url",
    ),
    "a part without text": (
        {"messages": parts_of({"type": "text"})},
        "alone, got {'type': 'text'}",
    ),
    "a lone surrogate": (
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        "not valid Unicode",
    ),
    "nothing to go on with": (
        {
            "messages": [{"role": "assistant"}],
            "chat_template": "{{ messages[0].content }}",
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        "the chat template fails on these messages: .*final message",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD_CHATS.values(), ids=BAD_CHATS)
def test_a_chat_that_cannot_be_rendered_is_refused_in_one_line(with_tools, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        rendered(with_tools, {"messages": CHAT, **changes})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_tools_for_a_template_without_any_are_refused(engine):
    with pytest.raises(ValueError, match="prompt 0: the chat template does not read tools"):
        engine.chat(CHAT, GREEDY, tools=[SCHEMA], progress=False)
    assert not engine.has_work


def test_a_model_without_a_template_takes_one_with_the_chat():
    tokenizer = tokenizer_of("tiny")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="this model has no chat template; give the prompt as"):
        rendered(tokenizer, CHAT)
    chat = {"messages": CHAT, "chat_template": "{{ messages[1].content }}"}
    assert rendered(tokenizer, chat)[0] == "What is a class?"
