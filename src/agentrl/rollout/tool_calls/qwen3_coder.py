"""Qwen3-Coder, Qwen 3.5 and later, Nemotron 3: parameters as elements, their values bare text.

    <tool_call>
    <function=stock>
    <parameter=bin>
    B7
    </parameter>
    </function>
    </tool_call>

These models at times leave `<tool_call>` out; such a call is not made, and they are told.
"""

import re

from agentrl.rollout.tool_calls.calls import Call, MalformedCall, ParsedTurn, Tools, quote
from agentrl.rollout.tool_calls.elements import read_elements
from agentrl.rollout.tool_calls.typed_text import typed_call

_FUNCTION_OPEN, _FUNCTION_CLOSE = "<function=", "</function>"
# A parameter ends at a closing mark before another parameter or the end; others are its text.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]++)>(.*?)</parameter>(?=\s*+(?:<parameter=|\Z))", re.DOTALL
)


def parse_qwen3_coder(text: str, tools: Tools = ()) -> ParsedTurn:
    """The calls of a turn of Qwen3-Coder. `tools`: distinguish numbers from strings."""
    turn = read_elements(
        text, "<tool_call>", "</tool_call>", lambda body: (_read_function(body, tools),)
    )
    stray = turn.content.find(_FUNCTION_OPEN)
    if not turn.calls and stray >= 0 and turn.content.find(_FUNCTION_CLOSE, stray) >= 0:
        error = "the tool call <function=...> does not stand inside <tool_call>...</tool_call>"
        return ParsedTurn(turn.content, (MalformedCall(error),))
    return turn


def _read_function(body: str, tools: Tools) -> Call:
    body = body.strip()
    if not body.startswith(_FUNCTION_OPEN):
        return MalformedCall(f"the tool call does not begin with {_FUNCTION_OPEN}NAME>")
    if not body.endswith(_FUNCTION_CLOSE):
        return MalformedCall(f"the function of the tool call is not closed with {_FUNCTION_CLOSE}")
    inside = body[len(_FUNCTION_OPEN) : -len(_FUNCTION_CLOSE)]
    name, named, parameters = inside.partition(">")
    if not named or "\n" in name:
        return MalformedCall(f"the name of the tool call, {_FUNCTION_OPEN}NAME>, is not closed")
    texts: list[tuple[str, str]] = []
    position = 0
    while match := _PARAMETER.match(parameters, position):
        texts.append((match[1].strip(), _without_frame(match[2])))
        position = match.end()
    rest = parameters[position:].strip()
    if rest:
        return MalformedCall(
            f"the tool call holds {quote(rest)} where <parameter=NAME>...</parameter> must be"
        )
    return typed_call(name.strip(), texts, tools)


def _without_frame(value: str) -> str:
    """A value without the line breaks around it, which belong to the format."""
    return value.removeprefix("\n").removesuffix("\n")
