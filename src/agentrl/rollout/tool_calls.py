"""Tool calls in a model's text: parsing, for the ways in which model families write them.

    <tool_call>
    {"name": "stock", "arguments": {"bin": "B7"}}
    </tool_call>

Text in, content and calls out. Parsing never raises: a call that cannot be read becomes a
`MalformedCall` whose message is for the model to read. Whether a tool exists is not known here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MAX_DEPTH = 32  # of nested arguments; BSON and most tools take no more than some 100
_MAX_INT = 2**63 - 1  # what MongoDB stores and most tools read


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call that can be made. `arguments` is a JSON object that MongoDB can store."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A call that cannot be made. `error` tells the model why, in one sentence."""

    error: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn of the model: the text outside its calls, and its calls in order."""

    content: str
    calls: tuple[ParsedCall | MalformedCall, ...] = ()


ToolCallParser = Callable[[str], ParsedTurn]


def parse_qwen(text: str) -> ParsedTurn:
    """Qwen 2.5 and 3: one JSON object in each `<tool_call>` element, several of them a turn."""
    if _OPEN not in text:
        return ParsedTurn(text.strip())
    content: list[str] = []
    calls: list[ParsedCall | MalformedCall] = []
    rest = text
    while True:
        before, found, rest = rest.partition(_OPEN)
        content.append(before)
        if not found:
            break
        body, closed, after = rest.partition(_CLOSE)
        if not closed:
            calls.append(MalformedCall(f"the tool call is not closed with {_CLOSE}"))
            break
        calls.append(_parse_call(body))
        rest = after
    return ParsedTurn("".join(content).strip(), tuple(calls))


def _parse_call(body: str) -> ParsedCall | MalformedCall:
    try:
        call = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return MalformedCall(f"the tool call is not valid JSON: {error}")
    if not isinstance(call, dict):
        return MalformedCall('the tool call is not a JSON object with "name" and "arguments"')
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall('the tool call has no "name"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return MalformedCall('the "arguments" of the tool call are not a JSON object')
    fault = _unusable(arguments, _MAX_DEPTH)
    if fault is not None:
        return MalformedCall(f'the "arguments" of the tool call hold {fault}')
    return ParsedCall(name, arguments)


def _unusable(value: object, depth: int) -> str | None:
    """What in a JSON value no database or tool can be given, or None."""
    if isinstance(value, int):
        return None if -_MAX_INT <= value <= _MAX_INT else "an integer of more than 64 bits"
    if not isinstance(value, dict | list):
        return None
    if depth == 0:
        return "too many levels of nesting"
    if isinstance(value, dict) and any("\0" in key for key in value):
        return "a key with a NUL character"
    items = value.values() if isinstance(value, dict) else value
    return next((fault for item in items if (fault := _unusable(item, depth - 1))), None)


_PARSERS: dict[str, ToolCallParser] = {"qwen25": parse_qwen, "qwen": parse_qwen}


def tool_call_parser(name: str) -> ToolCallParser:
    """The parser of a model family, by its name in `--tool_call_parser`.

    Raises ValueError with the known names.
    """
    parser = _PARSERS.get(name)
    if parser is None:
        raise ValueError(f"unknown tool call parser {name!r}; known: {', '.join(sorted(_PARSERS))}")
    return parser
