"""Mistral: calls after a special token, as a JSON array or as names with arguments.

    [TOOL_CALLS][{"name": "stock", "arguments": {"bin": "B7"}, "id": "a1b2c3d4e"}]
    [TOOL_CALLS]stock[ARGS]{"bin": "B7"}[TOOL_CALLS]now[ARGS]{}

The first is that of tokenizers before version 11. Version 11 writes `[CALL_ID]` and an id between
name and `[ARGS]`; before Magistral there is no `[ARGS]` either.
"""

import re

import orjson

from agentrl.rollout.tool_calls.calls import Call, MalformedCall, ParsedTurn, Tools, quote
from agentrl.rollout.tool_calls.json_text import (
    call_of_json,
    json_end,
    read_arguments,
    read_json_call,
)

_MARK = "[TOOL_CALLS]"
_THOUGHT_OPEN, _THOUGHT_CLOSE = "[THINK]", "[/THINK]"
_HEAD = re.compile(
    r"\s*([^\s\[\]{}]++)\s*(?:\[CALL_ID\]\s*[^\s\[\]{}]*+\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)


def parse_mistral(text: str, tools: Tools = ()) -> ParsedTurn:
    """The calls of a turn of a Mistral model."""
    thought_end = 0
    if text.lstrip().startswith(_THOUGHT_OPEN) and _THOUGHT_CLOSE in text:
        thought_end = text.find(_THOUGHT_CLOSE)
    before, *pieces = text[thought_end:].split(_MARK)
    content = [text[:thought_end], before]
    calls: list[Call] = []
    for piece in pieces:
        found, after = _read_piece(piece)
        calls += found
        content.append(after)
    return ParsedTurn("".join(content).strip(), tuple(calls))


def _read_piece(piece: str) -> tuple[list[Call], str]:
    """The calls after a mark, and the text after them."""
    start = len(piece) - len(piece.lstrip())
    if piece.startswith(("[", "{"), start):
        end = json_end(piece, start)
        if end is None:
            return [read_json_call(piece)], ""
        return _read_array(piece[start:end]), piece[end:]
    head = _HEAD.match(piece)
    if head is None:
        return [
            MalformedCall(
                f"the tool call after {_MARK} is no JSON array of calls and no name with [ARGS] "
                f"and a JSON object, but {quote(piece.strip())}"
            )
        ], ""
    end = json_end(piece, head.end())
    arguments = piece[head.end() : end]
    return [read_arguments(head[1], arguments)], "" if end is None else piece[end:]


def _read_array(text: str) -> list[Call]:
    try:
        calls = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return [MalformedCall(f"the tool call is not valid JSON: {error}")]
    if not isinstance(calls, list):
        return [call_of_json(calls)]
    if not calls:
        return [MalformedCall(f"the array of tool calls after {_MARK} is empty")]
    return [call_of_json(call) for call in calls]
