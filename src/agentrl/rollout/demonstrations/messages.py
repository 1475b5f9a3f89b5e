"""A message of a demonstration, in the forms that people have.

    {"role": "assistant", "content": ..., "reasoning_content": ..., "tool_calls": [...]}
    {"role": "assistant", "function_call": {...}}, {"role": "function", ...}
    {"from": "gpt", "value": ...}
    {"from": "function_call", "value": the JSON of a call}

of OpenAI, of OpenAI before `tools`, of ShareGPT, and of LLaMA-Factory beside ShareGPT's.

The forms are read by one reader, so that what one of them may say any of them may say. A message
says something, or it is refused: to say nothing would be trained as ending the turn at once.
Messages may be a text with their JSON, as in tables that have no lists.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.databases.task_file.file_rows import parse_inner
from agentrl.rollout.chat import Message
from agentrl.rollout.chat.turns import THOUGHT_FIELDS

_CALLS = "function_call"  # LLaMA-Factory's speaker of calls, and the field of OpenAI's older form
_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", _CALLS: "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
    "tool_response": "tool",
}  # fmt: skip
# Whether a message is trained: as Axolotl, OpenAI, ms-swift and Megatron name it.
MARKS = ("train", "weight", "loss", "loss_mask")
# Other names of it, which are not followed: a turn that is not to be trained would be.
_OTHER_MARKS = ("training", "trainable", "loss_scale")
_NAMES = ("name", "tool_call_id")
_READ = {
    "role", "from", "content", "value", "tool_calls", _CALLS, *MARKS, *_NAMES, *THOUGHT_FIELDS,
}  # fmt: skip
# Fields of messages and of rows that hold something else than text.
NO_TEXT = dict.fromkeys(
    ("image", "images", "video", "videos", "audio", "audios"), "and only text is trained"
)
# Fields that change what a message says or what of it is trained, in a way that is not followed.
_NOT_FOLLOWED = {
    **NO_TEXT,
    "tools": "which stand beside the messages, for the whole row",
    "functions": "which stand beside the messages, for the whole row",
    "train_detail": "and a message is trained as a whole or not at all",
    "refusal": "which is no content: write what the assistant says in `content`",
}
# What makes an object in a text a message: an answer may well be other JSON with `from` or `role`.
_ENOUGH = ({"role", "content"}, {"role", "tool_calls"}, {"role", _CALLS}, {"from", "value"})
# A list of messages, as JSON or as Python writes it.
_LIKE_MESSAGES = re.compile(
    r"""\s*\[\s*\{.*?["'](role|from)["']\s*:\s*["'](system|user|human|assistant|gpt)["']""",
    re.DOTALL,
)
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_OF_CALL = ("id", "type", "index", "function")
_OF_FUNCTION = ("name", "arguments", "parameters")
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class ReadMessage:
    """A message as chat templates know it.

    `trained`: whether the model learns to say it. `unread`: its fields that hold something and are
    none of a message's.
    """

    message: Message
    trained: bool
    unread: frozenset[str]


def read_message(number: int, given: Any) -> ReadMessage:
    """Read message `number` of a row, counted from 1.

    Raises `ValueError` with one sentence that continues after the row's place.
    """
    with naming(number):
        return _read(given)


@contextmanager
def naming(number: int) -> Iterator[None]:
    """Errors within name the message, counted from 1."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"message {number}: {error}") from None


def _read(given: Any) -> ReadMessage:
    if not isinstance(given, dict):
        raise ValueError(f"is not an object but {kind(given)}")
    for name, why in _NOT_FOLLOWED.items():
        if says(given.get(name)):
            raise ValueError(f"has `{name}`, {why}")
    speaker, role = _speaker(given)
    message: Message = {"role": role}
    content = _content(given)
    raw_calls = _raw_calls(given, speaker, content)
    if speaker == _CALLS:
        content = None
    calls = [read_call(call) for call in raw_calls]
    if calls and role != "assistant":
        raise ValueError(f"only the assistant calls tools, not {role}")
    thought = _thought(given) if role == "assistant" else ""
    if not (content or thought or calls) and (content is None or role == "assistant"):
        raise ValueError(f"says nothing; its fields are {', '.join(given)}")
    message["content"] = content or ""
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    for name in _NAMES:
        if given.get(name) not in (None, ""):
            message[name] = str(given[name])
    # False and 0 are told too: they may say not to train it.
    known = _READ | _NOT_FOLLOWED.keys()
    unread = {name for name, value in given.items() if value not in _NOTHING and name not in known}
    unread |= {f"tool_calls.{name}" for call in raw_calls for name in _unread_of_call(call)}
    if role != "assistant":
        unread |= {name for name in THOUGHT_FIELDS if given.get(name)}
    return ReadMessage(message, _trained(given, role), frozenset(unread))


def read_json_messages(name: str, value: Any) -> Any:
    """What a field of a row holds: messages, or one message, if it is a text with their JSON.

    Other JSON stays a text. Raises `ValueError` if it begins like messages and is no JSON.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        read = parse_inner(value)
    except ValueError as error:
        if _LIKE_MESSAGES.match(value):
            raise ValueError(
                f"has `{name}` like messages in a text, but no JSON: {error}"
            ) from None
        return value
    holds_message = any(
        isinstance(one, dict) and any(names <= one.keys() for names in _ENOUGH)
        for one in (read if isinstance(read, list) else [read])
    )
    return read if holds_message else value


def says(value: Any) -> bool:
    """Whether a field holds something; the JSON of nothing, such as `[]`, is nothing too."""
    if isinstance(value, str) and (value.strip() == "null" or _of_json(value) in ([], {})):
        return False
    return bool(value)


def is_system(given: Any) -> bool:
    """Whether a message is a system prompt."""
    return isinstance(given, dict) and one_of(given, "role", "from") in ("system", "developer")


def _speaker(given: Mapping[str, Any]) -> tuple[str, str]:
    """Who speaks, by the form's own name, and the role that this is."""
    speaker = one_of(given, "role", "from")
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise ValueError(f"role {speaker!r} is none of {', '.join(_ROLES)}")
    return speaker, role


def one_of(given: Mapping[str, Any], *names: str) -> Any:
    """What the fields say, of which a form has one; None if none says anything."""
    said = {name: given[name] for name in names if given.get(name) is not None}
    values = list(said.values())
    if any(value != values[0] for value in values[1:]):
        raise ValueError(f"has {' and '.join(f'`{name}`' for name in said)}, which differ")
    return values[0] if values else None


def _trained(given: Mapping[str, Any], role: str) -> bool:
    for name in _OTHER_MARKS:
        if role == "assistant" and given.get(name) not in (None, 1):
            raise ValueError(
                f"has `{name}` {given[name]!r}, which is not followed: name it `{MARKS[0]}`, "
                "with true or false"
            )
    trained = marked(given, *MARKS)
    if role != "assistant" and trained:
        raise ValueError(f"only the assistant's messages are trained, not {role}")
    return role == "assistant" and trained is not False


def marked(given: Mapping[str, Any], *marks: str) -> bool | None:
    """Whether it is trained, by its marks; None if it has none of them.

    Raises `ValueError` if one is neither 0 nor 1, or if they differ.
    """
    for name in marks:
        if given.get(name) not in (None, 0, 1):
            raise ValueError(f"`{name}` is {given[name]!r}, and neither 0 nor 1")
    mark = one_of(given, *marks)
    return None if mark is None else bool(mark)


def _content(given: Mapping[str, Any]) -> str | None:
    """The text of a message: a string, or OpenAI's list of parts; None if it has none."""
    content = one_of(given, "content", "value")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"its content is no text ({kind(content)})")
    return "".join(map(_text, content))


def _text(part: Any) -> str:
    """The text of a part of a content."""
    if not isinstance(part, dict):
        raise ValueError(f"its content is no text (a list with {kind(part)})")
    if part.get("type", "text") not in _TEXT_PARTS:
        raise ValueError(f"its content is no text (a part of type {part['type']!r})")
    if not isinstance(part.get("text"), str):
        raise ValueError("its content is no text (a part without `text`)")
    return str(part["text"])


def _thought(given: Mapping[str, Any]) -> str:
    thought = one_of({k: v for k, v in given.items() if v}, *THOUGHT_FIELDS)
    if not isinstance(thought, str | None):
        raise ValueError(f"its thought is no text ({kind(thought)})")
    return thought or ""


def _raw_calls(given: Mapping[str, Any], speaker: str, text: str | None) -> list[Any]:
    """The calls of a message as they are written, in whichever form."""
    forms = {name: given[name] for name in ("tool_calls", _CALLS) if says(given.get(name))}
    forms = {name: form for name, form in forms.items() if not _is_absent(form)}
    if speaker == _CALLS:
        forms["value"] = text
    if len(forms) > 1:
        raise ValueError(f"has calls both in {' and in '.join(f'`{name}`' for name in forms)}")
    for name, form in forms.items():
        calls = _of_json(form) if isinstance(form, str) else form
        if isinstance(calls, dict):
            calls = [calls]
        if not isinstance(calls, list) or not calls:
            raise ValueError(f"`{name}` is no call and no list of calls ({kind(form)})")
        return [call for call in calls if not _is_absent(call)]
    return []


def _is_absent(call: Any) -> bool:
    """Whether a call, or each of a list, says nothing: a table has null for all that it lacks."""
    if isinstance(call, list):
        return all(map(_is_absent, call))
    if isinstance(call, dict):
        return bool(call) and all(each == {} or _is_absent(each) for each in call.values())
    return call is None


def read_call(given: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object. Raises `ValueError`."""
    function = (given.get("function") or given) if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ValueError("a tool call has no name of a function")
    written = one_of(function, "arguments", "parameters")
    others = ", ".join(f"`{key}`" for key in sorted(_unread_of_call(given)))
    if written in (None, "") and others:
        raise ValueError(f"a call of {name} has no arguments, but {others}, which is not read")
    called = {"name": name, "arguments": _arguments(name, written)}
    call = {"type": "function", "function": called}
    return call if given.get("id") in (None, "") else {**call, "id": str(given["id"])}


def _arguments(name: str, given: Any) -> dict[str, Any]:
    """An object or its JSON. None, null and an empty text are no arguments."""
    arguments = given
    if isinstance(given, str) and given:
        try:
            arguments = parse_inner(given)
        except ValueError as error:
            raise ValueError(f"the arguments of {name} are no JSON object: {error}") from None
    if arguments in (None, ""):
        return {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are no JSON object but {kind(arguments)}")
    return arguments


def _unread_of_call(call: Mapping[str, Any]) -> set[str]:
    """The fields of a call that hold something and are none of a call's."""
    function = call.get("function") or {}
    around = _OF_CALL if function else (*_OF_CALL, *_OF_FUNCTION)
    unread = {key for key, value in call.items() if value and key not in around}
    return unread | {key for key, value in function.items() if value and key not in _OF_FUNCTION}


def _of_json(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return parse_inner(text)
    except ValueError:
        return None


def kind(value: Any) -> str:
    """The kind of a value, for a sentence."""
    return f"a {type(value).__name__}"
