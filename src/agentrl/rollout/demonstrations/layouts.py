"""What a row of demonstrations says, in the layouts that people have.

    {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}    OpenAI's; TRL's
    {"conversations": [{"from": "human", "value": ...}, ...]}             ShareGPT's
    {"prompt": [messages], "completion": [messages], "tools": [...]}      TRL's: the completion
    {"prompt": "text", "completion": "text"}                              without a chat template
    {"text": "text"}                                                      all of it is trained

The first of these that a row has is read; another one beside it may only repeat it. Messages may be
a text with their JSON. Every message of the assistant is trained, unless it says that it is not
(`messages`). `system` beside messages stands before them (LLaMA-Factory's).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.databases.task_file.file_rows import parse_inner
from agentrl.rollout.chat import Message, ToolSchema
from agentrl.rollout.demonstrations.joined_calls import with_joined_calls
from agentrl.rollout.demonstrations.messages import (
    NO_TEXT,
    is_system,
    kind,
    marked,
    one_of,
    read_json_messages,
    read_message,
    says,
)

LAYOUTS = "messages, prompt and completion, text, or conversations"
_OF_MESSAGES = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
_SYSTEM_FIELDS = ("system", "system_prompt")
_JUDGEMENTS = ("label", "kto_tag")  # TRL's and ms-swift's, LLaMA-Factory's
_FALSE = ("false", "0", "0.0", "-1", "-1.0", "rejected", "undesirable")
_MARKS = ("train", "weight")  # of a row, as those of a message
_LAYOUTS = (("messages",), ("conversations",), ("prompt", "completion"), ("text",))
READ_FIELDS = frozenset(
    {*_OF_MESSAGES, *_SYSTEM_FIELDS, *_MARKS, "text", "tools", "functions"}
)  # of a row
# What a row holds beside its text that a training on text would lose.
_NOT_FOLLOWED = {
    **NO_TEXT,
    "chat_template_kwargs": "which are given for the whole file, by --chat_template_kwargs",
}


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
    fields = read_fields(fields)
    _refuse_judged(fields)
    for layout in _LAYOUTS:
        shown = _shown(layout, fields)
        if shown is not None:
            _refuse_others(layout, shown, fields)
            return shown
    raise ValueError(f"has none of {LAYOUTS}; {its_fields(fields)}")


def _shown(layout: Sequence[str], fields: Mapping[str, Any]) -> Demonstration | PlainText | None:
    """What a row says in a layout; None if it has not its fields."""
    first, *answer = (fields.get(name) for name in layout)
    if answer:
        return read_answer(first, answer[0], fields) if is_answer(first, answer[0]) else None
    if layout == ("text",):
        return PlainText("", first) if isinstance(first, str) else None
    return _conversation([], first, fields) if isinstance(first, list) else None


def _refuse_others(
    layout: Sequence[str], shown: Demonstration | PlainText, fields: Mapping[str, Any]
) -> None:
    """Raise `ValueError` if a field of another layout says something else than what is read."""
    for name in (name for other in _LAYOUTS if other != layout for name in other):
        if fields.get(name) and not _says_too(name, fields[name], shown):
            read = " and ".join(f"`{each}`" for each in layout)
            raise ValueError(f"has `{name}` that says something else than {read}: leave one out")


def _says_too(name: str, given: Any, shown: Demonstration | PlainText) -> bool:
    """Whether all that a field says is in what is read; `text` may hold all of that in its form."""
    if isinstance(given, str):
        if isinstance(shown, PlainText):
            texts = [shown.prompt.strip(), shown.completion.strip()]
        else:
            texts = [message["content"].strip() for message in shown.messages]
        repeats = any(given.strip() in text for text in texts)
        return repeats or (name == "text" and all(text in given for text in texts))
    messages = [given] if isinstance(given, dict) else given
    if not isinstance(messages, list):
        return True  # a number, say, is no text of a layout
    try:
        read = [read_message(number, one).message for number, one in enumerate(messages, start=1)]
    except ValueError:
        return False
    return isinstance(shown, Demonstration) and all(one in shown.messages for one in read)


def read_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a row, with messages for texts that hold their JSON.

    Raises `ValueError` if the row says that it is not trained, or holds more than text or options
    of its own.
    """
    if marked(fields, *_MARKS) is False:
        raise ValueError("says that it is not to be trained (`train` or `weight`)")
    for name, why in _NOT_FOLLOWED.items():
        if says(fields.get(name)):
            raise ValueError(f"has `{name}`, {why}")
    read = {name: read_json_messages(name, fields[name]) for name in _OF_MESSAGES if name in fields}
    joined = {name: with_joined_calls(v) if isinstance(v, list) else v for name, v in read.items()}
    return {**fields, **joined}


def _refuse_judged(fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a row is of a training on judged answers, and holds one to unlearn."""
    if isinstance(fields.get("chosen"), dict) and isinstance(fields.get("rejected"), dict):
        raise ValueError("is a pair of answers to its messages, which `agentrl dpo` trains")
    for name in _JUDGEMENTS:
        if str(fields.get(name)).strip().lower() in _FALSE:
            raise ValueError(
                f"has `{name}` {fields[name]!r}: it is an answer to unlearn, in KTO's layout"
            )


def is_answer(prompt: Any, answer: Any) -> bool:
    """Whether an answer is in a form that `read_answer` reads behind this prompt."""
    if isinstance(prompt, list):
        return isinstance(answer, list | dict | str)
    return isinstance(prompt, str) and isinstance(answer, str)


def read_answer(prompt: Any, answer: Any, fields: Mapping[str, Any]) -> Demonstration | PlainText:
    """A prompt and its answer (`is_answer`), of which the answer is trained.

    Behind messages a text is a message of the assistant. `fields`: of the row, for `tools` and
    `system`. Raises `ValueError` as `read_demonstration` does.
    """
    if isinstance(prompt, list):
        if isinstance(answer, str):
            answer = {"role": "assistant", "content": answer}
        said = [answer] if isinstance(answer, dict) else _without_prompt(prompt, answer)
        return _conversation(prompt, said, fields)
    for name in (*_SYSTEM_FIELDS, "tools", "functions", "history"):
        if says(fields.get(name)):
            raise ValueError(
                f"has `{name}` beside a prompt that is a text without a chat template: write the "
                "prompt as a list of messages"
            )
    return PlainText(prompt, answer)


def _without_prompt(prompt: Sequence[Any], answer: Sequence[Any]) -> Sequence[Any]:
    """The messages of an answer without those of the prompt, which it may repeat at its beginning.

    A system message may be missing there.
    """
    asked = [one for one in prompt if not is_system(one)]
    for repeated in (prompt, asked):
        if repeated and begins_with(answer, repeated):
            return answer[len(repeated) :]
    return answer


def begins_with(messages: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether messages begin with others, in whatever forms both are; not if one is no message."""
    if len(messages) < len(others):
        return False
    try:
        return all(
            read_message(number, one).message == read_message(number, other).message
            for number, (one, other) in enumerate(zip(messages, others, strict=False), start=1)
        )
    except ValueError:
        return False


def its_fields(fields: Mapping[str, Any]) -> str:
    """The row's fields with their kinds, for a sentence."""
    named = (f"{name!r} ({kind(value)})" for name, value in fields.items())
    return f"its fields are {', '.join(named)}"


def _conversation(
    silent: Sequence[Any], said: Sequence[Any], fields: Mapping[str, Any]
) -> Demonstration:
    """The conversation of messages of which none is trained, and of those behind them."""
    if fields.get("history"):
        raise ValueError("has `history` beside messages, which is not read: write it as messages")
    given = [*_system(fields, [*silent, *said]), *silent, *said]
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


def _system(fields: Mapping[str, Any], messages: Sequence[Any]) -> list[Message]:
    """The system prompt that stands beside the messages, unless they have it: one message or none.

    Raises `ValueError` if they have another one.
    """
    system = one_of({name: value for name, value in fields.items() if value}, *_SYSTEM_FIELDS)
    if system is None:
        return []
    if not isinstance(system, str):
        raise ValueError(f"has a system prompt that is no text but {kind(system)}")
    own = [
        read_message(number, one).message["content"]
        for number, one in enumerate(messages, start=1)
        if is_system(one)
    ]
    if own and system not in own:
        raise ValueError("has a system prompt beside a system message that says something else")
    return [] if own else [{"role": "system", "content": system}]


def _tools(fields: Mapping[str, Any]) -> tuple[ToolSchema, ...]:
    """The schemas of the tools: a list, or its JSON, each in OpenAI's layout or without `type`."""
    names = ("tools", "functions")
    return (
        one_of({name: _schemas(fields[name]) for name in names if says(fields.get(name))}, *names)
        or ()
    )


def _schemas(tools: Any) -> tuple[ToolSchema, ...]:
    tools = _parsed(tools)
    if not isinstance(tools, list):
        raise ValueError(f"has `tools` that are no list of objects but {kind(tools)}")
    return tuple(map(_tool, map(_parsed, tools)))


def _parsed(given: Any) -> Any:
    """The value of a text with JSON, which tools may be, or each of them."""
    try:
        return parse_inner(given) if isinstance(given, str) else given
    except ValueError:
        raise ValueError("has `tools` that are no JSON") from None


def _tool(given: Any) -> ToolSchema:
    if not isinstance(given, dict):
        raise ValueError(f"has `tools` that are no list of objects but a list with {kind(given)}")
    tool = given if given.get("function") else {"type": "function", "function": given}
    function = tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("has a tool without a name")
    return tool
