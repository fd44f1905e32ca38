"""Chats: messages and tools, made into text by a chat template."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from paged_jax.loading.tokenizer import Tokenizer, import_transformers
from paged_jax.values import flag, one_line

Message = Mapping[str, Any]

# A template that takes a list of parts as a message's content goes through it.
_GOES_THROUGH_PARTS = re.compile(r"""for\s+\w+\s+in\s+[\w.\[\]'"]*content\b""")


class ChatOptions(TypedDict, total=False):
    """What goes with a chat's messages; each may be left out. Names are vLLM's.

    tools: JSON schemas as dicts, or Python functions with type hints and a docstring.
    add_generation_prompt: end with the beginning of an answer (the default).
    continue_final_message: leave the last message open, for the model to go on with it; goes with
        `add_generation_prompt=False`.
    chat_template: a Jinja template, or the name of one of the tokenizer's; None: the model's own.
    chat_template_kwargs: further values that the template reads, such as `enable_thinking`.
    """

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatPrompt(ChatOptions):
    """A chat as a prompt: messages, each a dict with a role and a content, and options.

    The content is text or a list of parts {"type": "text", "text": ...}, which are joined by line
    ends for a template that takes text alone.
    """

    messages: Iterable[Message]


def is_chat(prompt: Any) -> bool:
    """Whether it is a list of messages with roles."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def render(chat: Mapping[str, Any], messages: Sequence[Message], tokenizer: Tokenizer) -> str:
    """The text of a `ChatPrompt` and its messages; equals transformers' `apply_chat_template`.

    ValueError, in one line, for what no template can render, and for tools and values that the
    template does not read.
    """
    if unknown := chat.keys() - ChatPrompt.__annotations__.keys():
        raise ValueError(
            f"a chat has the keys {', '.join(ChatPrompt.__annotations__)}; "
            f"got {', '.join(sorted(map(str, unknown)))}"
        )
    starts = flag("add_generation_prompt", chat.get("add_generation_prompt", True))
    goes_on = flag("continue_final_message", chat.get("continue_final_message", False))
    if starts and goes_on:
        raise ValueError(
            "continue_final_message and add_generation_prompt do not go together: "
            "give add_generation_prompt=False to go on with the last message"
        )
    tools = _schemas(chat.get("tools"))
    values = {} if chat.get("chat_template_kwargs") is None else chat["chat_template_kwargs"]
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"chat_template_kwargs must be a dict of names, got {shown(values)}")
    if own := values.keys() & ChatPrompt.__annotations__.keys():
        raise ValueError(f"{own.pop()} stands beside chat_template_kwargs, not in it")
    template = _template(chat.get("chat_template"), tools, tokenizer)
    given = [*(["tools"] if tools else []), *values]
    if unread := [name for name in given if not re.search(rf"\b{re.escape(name)}\b", template)]:
        raise ValueError(f"the chat template does not read {', '.join(unread)}")
    takes_parts = bool(_GOES_THROUGH_PARTS.search(template))
    plain = [_plain(index, message, takes_parts) for index, message in enumerate(messages)]
    try:
        return str(
            tokenizer.apply_chat_template(
                plain,
                tools=tools,
                chat_template=template,
                add_generation_prompt=starts,
                continue_final_message=goes_on,
                tokenize=False,
                **values,
            )
        )
    except Exception as error:  # a template is a program, and may fail in any way
        raise ValueError(
            f"the chat template fails on these messages: {one_line(error)[:300]}"
        ) from error


def shown(value: Any) -> str:
    """The beginning of its repr, in one line."""
    return one_line(repr(value))[:80]


def _schemas(tools: Any) -> list[dict[str, Any]] | None:
    """Each tool as a JSON schema; a function is described by its type hints and docstring."""
    if tools is None:
        return None
    if isinstance(tools, str) or not isinstance(tools, Sequence):  # an iterator serves one chat
        raise ValueError(f"tools must be a list of JSON schemas or functions, got {shown(tools)}")
    return [_schema(tool) for tool in tools]


def _schema(tool: Any) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        return dict(tool)
    if not callable(tool):
        raise ValueError(f"a tool is a JSON schema (a dict) or a function, got {shown(tool)}")
    try:
        return dict(import_transformers().utils.get_json_schema(tool))
    except Exception as error:  # transformers raises exceptions of its own
        raise ValueError(f"a tool cannot be described: {one_line(error)[:300]}") from error


def _template(given: Any, tools: Any, tokenizer: Tokenizer) -> str:
    if given is None and not tokenizer.chat_template:
        raise ValueError(
            "this model has no chat template; give the prompt as text, or a chat_template"
        )
    if given is None or isinstance(given, str):
        try:
            template = str(tokenizer.get_chat_template(given, tools))
        except ValueError as error:  # none of several templates is the default
            raise ValueError(one_line(error)[:300]) from error
        if "{" in template:
            return template
    raise ValueError(f"chat_template must be the text of a Jinja template, got {shown(given)}")


def _plain(index: int, message: Message, takes_parts: bool) -> dict[str, Any]:
    """The message as a dict without None values, its content as the template takes it."""
    plain = {key: value for key, value in message.items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise ValueError(f"the role of message {index} must be text, got {shown(message['role'])}")
    content = plain.get("content", "")
    if isinstance(content, str):
        return plain
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(
            f"the content of message {index} must be text or a list of text parts, "
            f"got {shown(content)}"
        )
    texts = [_text(index, part) for part in content]
    parts = [{"type": "text", "text": text} for text in texts]
    return plain | {"content": parts if takes_parts else "\n".join(texts)}


def _text(index: int, part: Any) -> str:
    match part:
        case str():
            return part
        case {"type": "text", "text": str(text)}:
            return text
    raise ValueError(
        f'message {index} may hold parts {{"type": "text", "text": ...}} alone, got {shown(part)}'
    )
