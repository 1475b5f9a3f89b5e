"""What a row of demonstrations says, in the layouts that people have.

    {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}    OpenAI's; TRL's
    {"prompt": [messages], "completion": [messages], "tools": [...]}      TRL's: the completion
    {"prompt": "text", "completion": "text"}                              without a chat template
    {"text": "text"}                                                      all of it is trained
    {"conversations": [{"from": "human", "value": ...}, ...]}             ShareGPT's

Every message of the assistant is trained, unless it says `"train": false` (or OpenAI's
`"weight": 0`). Thoughts are in `reasoning_content`, calls in `tool_calls`; arguments of a call are
an object or its JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.rollout.chat import Message, ToolSchema
from agentrl.rollout.chat.turns import THOUGHT_FIELDS

LAYOUTS = "messages, prompt and completion, text, or conversations"
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHARE_GPT = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "function": "tool", "observation": "tool", "tool": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Demonstration:
    """A conversation. `trained`: for each message, whether the model learns to say it."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    trained: tuple[bool, ...]


@dataclass(frozen=True)
class PlainText:
    """Text without a chat template. `prompt` may be empty; `completion` is trained."""

    prompt: str
    completion: str


def read_demonstration(fields: Mapping[str, Any]) -> Demonstration | PlainText:
    """Read a row. Raises `ValueError` with one sentence that continues after the row's place."""
    if isinstance(fields.get("messages"), list):
        return _conversation(fields["messages"], fields)
    if isinstance(fields.get("conversations"), list):
        return _conversation([*map(_of_share_gpt, fields["conversations"])], fields)
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        silent = [{**_object(message), "train": False} for message in prompt]
        return _conversation([*silent, *completion], fields)
    if isinstance(prompt, str) and isinstance(completion, str):
        return PlainText(prompt, completion)
    if isinstance(fields.get("text"), str):
        return PlainText("", fields["text"])
    raise ValueError(f"has none of {LAYOUTS}; its fields are {', '.join(map(repr, fields))}")


def _conversation(messages: Sequence[Any], fields: Mapping[str, Any]) -> Demonstration:
    read = [_message(number, _object(one)) for number, one in enumerate(messages, start=1)]
    trained = tuple(train for _, train in read)
    if not any(trained):
        raise ValueError("has no message of the assistant that is trained")
    return Demonstration(tuple(message for message, _ in read), _tools(fields), trained)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"has a message that is not an object but {_kind(value)}")
    return value


def _message(number: int, given: Mapping[str, Any]) -> tuple[Message, bool]:
    """The message as chat templates know it, and whether it is trained."""
    role = given.get("role")
    if role not in _ROLES:
        raise ValueError(f"message {number}: role {role!r} is none of {', '.join(_ROLES)}")
    train = _train(number, given, default=role == "assistant")
    if train and role != "assistant" and ("train" in given or "weight" in given):
        raise ValueError(f"message {number}: only the assistant's messages are trained, not {role}")
    message: Message = {"role": role, "content": _content(number, given.get("content"))}
    if role == "assistant":
        thoughts = [given[name] for name in THOUGHT_FIELDS if given.get(name)]
        if thoughts:
            message["reasoning_content"] = str(thoughts[0])
        if given.get("tool_calls"):
            message["tool_calls"] = [_call(number, call) for call in given["tool_calls"]]
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            message[name] = str(given[name])
    return message, train and role == "assistant"


def _train(number: int, given: Mapping[str, Any], *, default: bool) -> bool:
    for name in ("train", "weight"):
        value = given.get(name)
        if value is None:
            continue
        if value not in (0, 1):
            raise ValueError(f"message {number}: `{name}` is {value!r}, and neither 0 nor 1")
        return bool(value)
    return default


def _content(number: int, content: Any) -> str:
    """The text of a content: a string, null, or OpenAI's list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise ValueError(f"message {number}: its content is no text ({_kind(content)})")


def _call(number: int, given: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object."""
    function = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"message {number}: a tool call has no name of a function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(
            f"message {number}: the arguments of {function['name']} are no JSON object"
        )
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**call, "id": str(given["id"])} if given.get("id") else call


def _tools(fields: Mapping[str, Any]) -> tuple[ToolSchema, ...]:
    """The schemas of the tools: a list, or its JSON, each in OpenAI's layout or without `type`."""
    tools = fields.get("tools") or fields.get("functions") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise ValueError("has `tools` that are no JSON") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"has `tools` that are no list of objects but {_kind(tools)}")
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    )


def _of_share_gpt(turn: Any) -> dict[str, Any]:
    given = _object(turn)
    if "role" in given:
        return given
    speaker = given.get("from")
    role = _SHARE_GPT.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise ValueError(f"has a turn `from` {speaker!r}, which is none of {', '.join(_SHARE_GPT)}")
    extra = {name: given[name] for name in ("train", "weight") if given.get(name) is not None}
    return {"role": role, "content": given.get("value"), **extra}


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
