"""A chat completion of OpenAI's form, read from the bytes of an answer.

Servers that call themselves compatible leave out what they have not and write the rest in their own
ways. What has one plain meaning is read; anything else is `NoTurn`, never another error. A call
that cannot be understood stays a call, with its fault: a turn without calls is an answer.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agentrl.foreign_text import utf8_text

_SHOWN = 120  # characters of an answer that is none
_LARGEST_COUNT = 2**53
_TEXTS = frozenset({"text", "output_text"})
_THOUGHTS = frozenset({"thinking", "reasoning"})


class NoTurn(ValueError):
    """The answer is no chat completion. The message is one sentence.

    `status`: that of HTTP which the answer names in its `error`, as routers of APIs do, with 200.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class EndpointCall:
    """A tool call as the model wrote it.

    `id`: empty if it has none. `arguments`: text that should be a JSON object. `fault`: why it is
    no call of a function, in one sentence for the model.
    """

    id: str
    name: str
    arguments: str
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class EndpointTurn:
    """One answer. Token counts are 0 if the API does not give them.

    `answered_at`: None in one that was read from a stored turn.
    """

    content: str
    reasoning: str
    calls: tuple[EndpointCall, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    latency_s: float
    answered_at: datetime | None = None


def read_turn(body: bytes, latency_s: float = 0.0) -> EndpointTurn:
    """The turn in the body of an answer. Raises `NoTurn`."""
    status = None
    try:
        return _turn(json.loads(body), latency_s)
    except RecursionError:
        why = "it is nested too deeply"
    except NoTurn as error:
        why, status = str(error), error.status
    except ValueError:  # no JSON, no UTF-8, or a number of thousands of digits
        why = "it is no JSON"
    begin = " ".join(body[: 4 * _SHOWN].decode(errors="replace").split())[:_SHOWN]
    raise NoTurn(
        f"no chat completion of OpenAI's form (is the URL right?), because {why}: it begins "
        f"{begin!r}",
        status,
    )


def _turn(answer: object, latency_s: float) -> EndpointTurn:
    choices = _fields(answer).get("choices")
    if not isinstance(choices, list) or not choices:
        code = _fields(_fields(answer).get("error")).get("code")
        raise NoTurn("it has no choices", code if isinstance(code, int) else None)
    choice = _fields(choices[0])
    message = choice.get("message")
    if not isinstance(message, dict):
        raise NoTurn("its first choice has no message")
    content, thoughts = _texts(message.get("content"))
    told = message.get("reasoning_content") or message.get("reasoning")
    reason, usage = choice.get("finish_reason"), _fields(_fields(answer).get("usage"))
    return EndpointTurn(
        content=content,
        reasoning=utf8_text(told) if isinstance(told, str) else thoughts,
        calls=_calls(message),
        finish_reason=utf8_text(reason) if isinstance(reason, str) and reason else "stop",
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(_fields(usage.get("prompt_tokens_details")).get("cached_tokens")),
        latency_s=latency_s,
        answered_at=datetime.now(UTC),
    )


def _fields(value: object) -> dict[str, Any]:
    """A JSON object; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def _texts(content: object) -> tuple[str, str]:
    """Text and thoughts of a message's content: a text, a part, or a list of parts.

    An object that is no part is an answer in JSON that the server has read.
    """
    if content is None:
        return "", ""
    if isinstance(content, dict) and not isinstance(content.get("text"), str):
        return _dumped(content), ""
    texts, thoughts = [], []
    for part in content if isinstance(content, list) else [content]:
        fields = {"text": part} if isinstance(part, str) else _fields(part)
        kind, text = str(fields.get("type", "text")), fields.get("text")
        if kind in _THOUGHTS:
            thoughts.append("".join(_texts(fields.get(kind, text))))
        elif kind in _TEXTS and isinstance(text, str):
            texts.append(utf8_text(text))
        else:
            raise NoTurn("its content is neither a text nor a list of texts")
    return "".join(texts), "".join(thoughts)


def _calls(message: dict[str, Any]) -> tuple[EndpointCall, ...]:
    """The message's calls; `function_call` is the older form of a single one."""
    calls, older = message.get("tool_calls"), message.get("function_call")
    if not calls:
        return (_call("", older, older),) if older else ()
    if not isinstance(calls, list):
        raise NoTurn("its tool_calls are no list")
    return tuple(_call(_fields(c).get("id"), _fields(c).get("function"), c) for c in calls)


def _call(id: object, function: object, whole: object) -> EndpointCall:
    """A call by its `function`, whatever its type is said to be. `whole`: all that came of it."""
    known = utf8_text(id) if isinstance(id, str) else ""
    name = _fields(function).get("name")
    if not isinstance(name, str) or not name:
        fault = 'a tool call must have a "function" with a "name" and "arguments"'
        return EndpointCall(known, "", _dumped(whole), fault)
    arguments = _fields(function).get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else _dumped(arguments)
    return EndpointCall(known, utf8_text(name), utf8_text(arguments))


def _dumped(value: object) -> str:
    return utf8_text(json.dumps(value, ensure_ascii=False))


def _count(value: object) -> int:
    """A number of tokens; 0 if it is none."""
    if not isinstance(value, int | float) or not 0 < value < _LARGEST_COUNT:
        return 0
    return int(value)
