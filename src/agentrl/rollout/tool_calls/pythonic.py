"""Llama 3.2, Llama 4 and others that write a list of Python calls; LFM2 with special tokens.

    [stock(bin="B7"), now()]
    <|tool_call_start|>[stock(bin='B7')]<|tool_call_end|>

Without such a token the list begins a line.
"""

import re

from agentrl.rollout.tool_calls.calls import Call, MalformedCall, ParsedTurn, Tools, make_call
from agentrl.rollout.tool_calls.elements import thought_end
from agentrl.rollout.tool_calls.python_calls import PythonReader, UnreadableError

_OPENING = ("<|tool_call_start|>", "<|python_start|>")
_CLOSING = ("<|tool_call_end|>", "<|python_end|>")
_START = re.compile(
    "|".join(map(re.escape, _OPENING)) + r"|^[ \t]*+(?=\[\s*+[^\W\d][\w.\-]*+\s*+\()", re.MULTILINE
)


def parse_pythonic(text: str, tools: Tools = ()) -> ParsedTurn:
    """The calls of a turn that writes them as a Python list."""
    content: list[str] = []
    calls: list[Call] = []
    position, search_from = 0, thought_end(text, _OPENING[0], _CLOSING[0])
    while match := _START.search(text, search_from):
        content.append(text[position : match.start()])
        found, position = _read_list(text, match.end())
        calls += found
        search_from = position
    content.append(text[position:])
    rest = "".join(content)
    for mark in _CLOSING:
        rest = rest.replace(mark, "")
    return ParsedTurn(rest.strip(), tuple(calls))


def _read_list(text: str, start: int) -> tuple[list[Call], int]:
    """The calls of the list at `start`, and the index after it, or after the line of an error."""
    reader = PythonReader(text, start)
    calls: list[Call] = []
    try:
        if not reader.take("["):
            raise UnreadableError("a list of calls, [NAME(ARGUMENT=VALUE)], was expected")
        while True:
            calls.append(make_call(*reader.read_call()))
            if reader.take("]"):
                return calls, reader.at
            if not reader.take(","):
                raise UnreadableError(f"',' or ']' was expected after call {len(calls)}")
    except UnreadableError as error:
        calls.append(MalformedCall(f"the tool call cannot be read: {error}"))
    line_end = text.find("\n", reader.at)
    return calls, len(text) if line_end < 0 else line_end
