"""A request of a program and its answer, as values without the form of an API.

Messages are in the layout of Chat Completions, with contents that are texts and arguments that are
objects. The modules of the APIs read and write them.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from agentrl.rollout.agents.shown_answers import call_message
from agentrl.rollout.chat import Message, ToolSchema
from agentrl.rollout.chat.said import Said

MODEL = "policy"
"""The name of the run's model. A program may use any other name: there is one model."""


class BadRequest(ValueError):
    """A request that cannot be answered. The message names the field and says what to do."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a program asks.

    `stop`: texts that end the answer. `n`: number of answers. `max_new_tokens`: a limit beside
    the run's. `logprobs`: whether the answers have their tokens. `agent`: the program's agent that
    asks (`agents_of_program.py`). `streamed`: whether the client wants the answer as it is made.
    `json_schema`: of the answer, as JSON text. Such an answer is not trained.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: bool = False
    model: str = MODEL
    agent: str = ""
    streamed: bool = False
    json_schema: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an answer. `id`: unique in the session."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_json(self) -> str:
        """The arguments as clients get them."""
        return json.dumps(self.arguments, ensure_ascii=False)


class Tool(NamedTuple):
    """A tool of a request, not checked."""

    name: object
    description: object
    parameters: object


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answer of the model.

    `content`: its text without calls, control tokens and thought. `stopped_by`: the one of the
    request's `stop` that ended it. `cut_off`: whether a limit ended it. `tokens`: text and logprob
    of each sampled token, if they were asked for. `turn`: its number in the Record.
    """

    content: str
    thought: str = ""
    calls: tuple[Call, ...] = ()
    stopped_by: str | None = None
    cut_off: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    tokens: Sequence[tuple[str, float]] = field(default=(), repr=False)
    turn: int = 0

    @property
    def said(self) -> Said:
        """What it says beside its calls."""
        return Said(self.thought, self.content)


Event = tuple[str | None, str]  # the name of a server-sent event, if it has one, and its data


class Events(Protocol):
    """The answers to a request as the events of an API."""

    def so_far(self, said: Sequence[Said], prompt_tokens: int) -> Iterable[Event]:
        """Those of what was said since the last call."""

    def end(self, answers: Sequence[ChatAnswer]) -> Iterable[Event]:
        """Those of all that is missing: the rest of what is said, calls, reason and usage."""


def added_to(before: str, now: str) -> str:
    """What a text has more than its beginning, which has left already."""
    assert now.startswith(before), f"{before[-40:]!r} was told, and the answer does not begin so"
    return now[len(before) :]


def text_of_content(content: object, where: str) -> str:
    """The text of a message's content: a string, or parts of type text.

    Raises `BadRequest` for images and other parts. `where`: the field, for the message.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text or a list of parts")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict):
            raise BadRequest(f"{where} must be a text or a list of parts")
        kind = part.get("type")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise BadRequest(f"{where} has a part of type {kind!r}: the model reads text only")
        text: object = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise BadRequest(f"{where} has a part of type {kind!r} without a text")
        texts.append(text)
    return "".join(texts)


def arguments_of(given: object, where: str) -> dict[str, Any]:
    """The arguments of a call that a client sends: a JSON object, or the text of one."""
    arguments = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given or "{}")
        except ValueError:
            raise BadRequest(f"{where} is not valid JSON: {given[:80]!r}") from None
        except RecursionError:
            raise BadRequest(f"{where} is nested too deeply: {given[:80]!r}") from None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where} must be a JSON object")
    try:
        orjson.dumps(arguments)  # as they are stored and compared
    except orjson.JSONEncodeError as error:
        raise BadRequest(f"{where} cannot be kept as JSON: {error}") from None
    return arguments


def sent_call(id: object, name: object, arguments: object, where: str) -> Message:
    """A call in the messages of a request."""
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where} has no name")
    return call_message(str(id), name, arguments_of(arguments, f"{where}.arguments"))


def spoken_message(answer: ChatAnswer) -> Message:
    """The answer as a message of the conversation that a later request continues."""
    said: Message = {"role": "assistant", "content": answer.content}
    calls = [call_message(call.id, call.name, dict(call.arguments)) for call in answer.calls]
    return {**said, "tool_calls": calls} if calls else said


def tool_schemas(tools: object, read: Callable[[Mapping[str, Any], str], Tool]) -> list[ToolSchema]:
    """The tools of a request as chat templates expect them, with a description and parameters.

    `read`: from a tool in an API's form, and its place for messages.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list")
    schemas: list[ToolSchema] = []
    for number, sent in enumerate(tools):
        where = f"tools[{number}]"
        if not isinstance(sent, dict):
            raise BadRequest(f"{where} must be an object")
        tool = read(sent, where)
        if not isinstance(tool.name, str):
            raise BadRequest(f"{where} has no name")
        function = {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.parameters or {"type": "object", "properties": {}},
        }
        schemas.append({"type": "function", "function": function})
    return schemas


def schema_of(form: object, where: str) -> str | None:
    """The JSON schema of an answer's form: `{"type": "text" | "json_object" | "json_schema"}`.

    A schema stands in the form, or in its `json_schema`. None for a text.
    """
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(form, dict) or kind not in ("text", "json_object", "json_schema"):
        raise BadRequest(f"{where}.type must be text, json_object or json_schema, got {kind!r:.40}")
    if kind == "text":
        return None
    holder = form.get("json_schema", form)
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if kind == "json_object":
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise BadRequest(f"{where} has no schema")
    return json.dumps(schema, ensure_ascii=False)


def positive(value: object, name: str) -> int | None:
    """A number of tokens or answers that may be left out."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequest(f"{name} must be a whole number of at least 1, got {value!r:.40}")
    return value


def finite(value: object, name: str) -> float:
    """A number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} must be a number, got {value!r:.40}")
    if not math.isfinite(value):
        raise BadRequest(f"{name} must be finite, got {value}")
    return float(value)


def texts(value: object, name: str) -> tuple[str, ...]:
    """A text, or a list of texts, that may be left out."""
    given = [value] if isinstance(value, str) else value or []
    if not isinstance(given, list) or not all(isinstance(text, str) and text for text in given):
        raise BadRequest(f"{name} must be a text or a list of texts, none of them empty")
    return tuple(given)
