"""What a row of demonstrations says, in the layouts that people have.

    {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}    OpenAI's; TRL's
    {"conversations": [{"from": "human", "value": ...}, ...]}             ShareGPT's
    {"prompt": [messages], "completion": [messages], "tools": [...]}      TRL's: the completion
    {"prompt": "text", "completion": "text"}                              without a chat template
    {"text": "text"}                                                      all of it is trained

The first of these that a row has is read. Every message of the assistant is trained, unless it
says that it is not (`messages`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.databases.task_file.file_rows import parse_inner
from agentrl.rollout.chat import Message, ToolSchema
from agentrl.rollout.demonstrations.messages import kind, read_message

LAYOUTS = "messages, prompt and completion, text, or conversations"


@dataclass(frozen=True)
class Demonstration:
    """A conversation.

    trained: for each message, whether the model learns to say it
    unread: fields of the messages that hold something and are none of a message's
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    trained: tuple[bool, ...]
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PlainText:
    """Text without a chat template. `prompt` may be empty; `completion` is trained."""

    prompt: str
    completion: str

    @property
    def unread(self) -> frozenset[str]:
        """As of a `Demonstration`: a text has no fields."""
        return frozenset()


def read_demonstration(fields: Mapping[str, Any]) -> Demonstration | PlainText:
    """Read a row. Raises `ValueError` with one sentence that continues after the row's place."""
    for name in ("messages", "conversations"):
        if isinstance(fields.get(name), list):
            return _conversation([], fields[name], fields)
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation(prompt, completion, fields)
    if isinstance(prompt, str) and isinstance(completion, str):
        return PlainText(prompt, completion)
    if isinstance(fields.get("text"), str):
        return PlainText("", fields["text"])
    raise ValueError(f"has none of {LAYOUTS}; its fields are {', '.join(map(repr, fields))}")


def _conversation(
    silent: Sequence[Any], said: Sequence[Any], fields: Mapping[str, Any]
) -> Demonstration:
    """The conversation of messages of which none is trained, and of those behind them."""
    given = [*silent, *said]
    read = [read_message(number, one) for number, one in enumerate(given, start=1)]
    n_silent = len(given) - len(said)
    trained = tuple(one.trained and at >= n_silent for at, one in enumerate(read))
    if not any(trained):
        raise ValueError("has no message of the assistant that is trained")
    return Demonstration(
        tuple(one.message for one in read),
        _tools(fields),
        trained,
        frozenset().union(*(one.unread for one in read)),
    )


def _tools(fields: Mapping[str, Any]) -> tuple[ToolSchema, ...]:
    """The schemas of the tools: a list, or its JSON, each in OpenAI's layout or without `type`."""
    tools = fields.get("tools") or fields.get("functions") or []
    if isinstance(tools, str):
        try:
            tools = parse_inner(tools) or []
        except ValueError:
            raise ValueError("has `tools` that are no JSON") from None
    if not isinstance(tools, list):
        raise ValueError(f"has `tools` that are no list of objects but {kind(tools)}")
    return tuple(map(_tool, tools))


def _tool(given: Any) -> ToolSchema:
    if not isinstance(given, dict):
        raise ValueError(f"has `tools` that are no list of objects but a list with {kind(given)}")
    tool = given if given.get("function") else {"type": "function", "function": given}
    function = tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("has a tool without a name")
    return tool
