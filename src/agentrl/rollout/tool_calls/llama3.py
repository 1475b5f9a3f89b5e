"""Llama 3.1 to 3.3: a turn that is a JSON object, with or without `<|python_tag|>` before it.

    {"name": "stock", "parameters": {"bin": "B7"}}

Several calls stand on lines of their own, or with `;` between them. Built-in tools are called
`<|python_tag|>brave_search.call(query="...")`. JSON that has neither parameters nor arguments, nor
a tool's name, is an answer.
"""

import re

import orjson

from agentrl.rollout.tool_calls.calls import (
    Call,
    MalformedCall,
    ParsedTurn,
    Tools,
    quote,
    tool_names,
)
from agentrl.rollout.tool_calls.elements import thought_end
from agentrl.rollout.tool_calls.json_text import call_of_json, json_end
from agentrl.rollout.tool_calls.python_calls import PythonReader, UnreadableError

_TAG = "<|python_tag|>"
_START = re.compile(
    re.escape(_TAG)
    + r'\s*+|^[ \t]*+(?=(?:\[\s*+)?\{\s*+"(?:name|type|parameters|arguments)"\s*+:)',
    re.MULTILINE,
)
_NEXT = re.compile(r"\s*+[;,]\s*+(?=\{)")


def parse_llama3(text: str, tools: Tools = ()) -> ParsedTurn:
    """The calls of a turn of Llama 3."""
    content: list[str] = []
    calls: list[Call] = []
    known = tool_names(tools)
    position, search_from = 0, thought_end(text, _TAG, _TAG)
    while match := _START.search(text, search_from):
        tagged = bool(match.group().strip())
        found, end = _read_calls(text, match.end(), tagged, known)
        if found:
            content.append(text[position : match.start()])
            calls += found
            position = end
        search_from = max(end, match.end(), match.start() + 1)
    content.append(text[position:])
    return ParsedTurn("".join(content).strip(), tuple(calls))


def _read_calls(
    text: str, start: int, tagged: bool, known: frozenset[str]
) -> tuple[list[Call], int]:
    """The calls from `start` on and their end index; [] for JSON that is an answer."""
    if not text.startswith(("{", "["), start):
        return _read_built_in(text, start)
    calls: list[Call] = []
    end = start
    while (value_end := json_end(text, end)) is not None:
        found = _read_value(text[end:value_end], tagged, known)
        if not found:
            break
        calls += found
        end = value_end
        separator = _NEXT.match(text, end)
        if separator is None:
            return calls, end
        end = separator.end()
    if value_end is None:
        return [*calls, MalformedCall("the JSON of the tool call is not closed")], len(text)
    return calls, end if calls else value_end


def _read_value(text: str, tagged: bool, known: frozenset[str]) -> list[Call]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return [MalformedCall(f"the tool call is not valid JSON: {error}")]
    values = value if isinstance(value, list) else [value]
    if not tagged and not all(_is_call(item, known) for item in values):
        return []
    return [call_of_json(item, "parameters") for item in values]


def _is_call(value: object, known: frozenset[str]) -> bool:
    if not isinstance(value, dict):
        return False
    name = value.get("name")
    has_arguments = "parameters" in value or "arguments" in value
    return has_arguments or (isinstance(name, str) and name in known)


def _read_built_in(text: str, start: int) -> tuple[list[Call], int]:
    reader = PythonReader(text, start)
    try:
        name, arguments = reader.read_call()
    except UnreadableError:
        after = quote(text[start : start + 80].strip())
        error = f"after {_TAG} there is neither a JSON object nor a call, but {after}"
        return [MalformedCall(error)], len(text)
    return [call_of_json({"name": name.removesuffix(".call"), "arguments": arguments})], reader.at
