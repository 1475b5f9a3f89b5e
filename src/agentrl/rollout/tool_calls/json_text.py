"""Calls that are JSON objects, and the place where a JSON value in a text ends."""

import re

import orjson

from agentrl.rollout.tool_calls.calls import Call, MalformedCall, make_call

# A string (an unclosed one ends with the text) or a bracket. Without the `?`, an unclosed string
# would be searched again from each of its escaped quotes.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*"?|[\[\]{}]', re.DOTALL)


def read_json_call(text: str, arguments_key: str = "arguments") -> Call:
    """The call `{"name": ..., "arguments": {...}}`. `arguments_key`: the family's key."""
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return MalformedCall(f"the tool call is not valid JSON: {error}")
    return call_of_json(call, arguments_key)


def call_of_json(call: object, arguments_key: str = "arguments") -> Call:
    """The call that a decoded JSON value describes."""
    if not isinstance(call, dict):
        return MalformedCall(
            f'the tool call is not a JSON object with "name" and "{arguments_key}"'
        )
    other = "parameters" if arguments_key == "arguments" else "arguments"
    key = arguments_key if arguments_key in call or other not in call else other
    return make_call(call.get("name"), call.get(key, {}))


def read_arguments(name: str, text: str) -> Call:
    """The call of tool `name` with the JSON object `text` as arguments."""
    if not text.strip():
        return MalformedCall("the tool call has no arguments, not even {}")
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return MalformedCall(f"the arguments of the tool call are not valid JSON: {error}")
    return make_call(name, arguments)


def json_end(text: str, start: int) -> int | None:
    """The end index of the object or array that begins at `start`; None if it is not closed."""
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text, start):
        mark = match.group()
        if mark in ("{", "["):
            depth += 1
        elif mark in ("}", "]"):
            depth -= 1
            if depth <= 0:
                return match.end()
    return None
