"""What a parser gives: the content of a turn, its calls, and the calls that cannot be made."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MAX_DEPTH = 32  # levels of nested arguments; BSON and most tools allow about 100
_MAX_INT = 2**63 - 1  # the limit of MongoDB and most tools

Tools = Sequence[Mapping[str, Any]]  # {"type": "function", "function": {...}}, OpenAI's format


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call that can be made. `arguments` is a JSON object that MongoDB can store."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A call that cannot be made. `error` tells the model why, in one sentence."""

    error: str


Call = ParsedCall | MalformedCall


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn of the model: the text outside its calls, and the calls in order."""

    content: str
    calls: tuple[Call, ...] = ()


class ToolCallParser(Protocol):
    """Parses a turn's text. `tools`: schemas that give types to arguments written without."""

    def __call__(self, text: str, tools: Tools = ()) -> ParsedTurn: ...


def make_call(name: object, arguments: object) -> Call:
    """A call of tool `name`; a `MalformedCall` if MongoDB or tools cannot take its arguments."""
    if not isinstance(name, str) or not name:
        return MalformedCall('the tool call has no "name"')
    if not isinstance(arguments, dict):
        return MalformedCall('the "arguments" of the tool call are not a JSON object')
    if _is_broken(name):
        return MalformedCall('the "name" of the tool call holds half a character')
    fault = _unusable(arguments, MAX_DEPTH)
    if fault is not None:
        return MalformedCall(f'the "arguments" of the tool call hold {fault}')
    return ParsedCall(name, arguments)


def tool_names(tools: Tools) -> frozenset[str]:
    """The names of the tools."""
    functions = (tool.get("function") for tool in tools)
    names = (function.get("name") for function in functions if isinstance(function, Mapping))
    return frozenset(name for name in names if isinstance(name, str))


def quote(text: str, limit: int = 40) -> str:
    """The beginning of a text in quotes, for an error."""
    return repr(text if len(text) <= limit else f"{text[:limit]}...")


def _unusable(value: object, depth: int) -> str | None:
    """The first part of a JSON value that databases or tools cannot take, in words; else None."""
    if isinstance(value, str):
        return "half a character" if _is_broken(value) else None
    if isinstance(value, int):
        return None if -_MAX_INT <= value <= _MAX_INT else "an integer of more than 64 bits"
    if isinstance(value, float):
        return None if math.isfinite(value) else "a number that is too large"
    if not isinstance(value, dict | list):
        return None
    if depth == 0:
        return "too many levels of nesting"
    if isinstance(value, dict):
        if any("\0" in key for key in value):
            return "a key with a NUL character"
        if any(_is_broken(key) for key in value):
            return "half a character"
    items = value.values() if isinstance(value, dict) else value
    return next((fault for item in items if (fault := _unusable(item, depth - 1))), None)


def _is_broken(text: str) -> bool:
    """Whether a text contains a lone surrogate, which has no UTF-8 encoding."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
