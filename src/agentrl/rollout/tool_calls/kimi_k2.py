"""Kimi K2: calls between special tokens, each with an id that holds its name, arguments as JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.stock:0<|tool_call_argument_begin|>
{"bin": "B7"}<|tool_call_end|><|tool_calls_section_end|>
"""

import re

from agentrl.rollout.tool_calls.calls import Call, MalformedCall, ParsedTurn, Tools, quote
from agentrl.rollout.tool_calls.json_text import read_arguments
from agentrl.rollout.tool_calls.sections import read_section

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_ELEMENT = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?([^\s:]++)(?::\d+)?")


def parse_kimi_k2(text: str, tools: Tools = ()) -> ParsedTurn:
    """The calls of a turn of Kimi K2."""
    return read_section(text, _SECTION, _ELEMENT, _read_call)


def _read_call(body: str) -> Call:
    call_id, separated, arguments = body.partition(_ARGUMENTS)
    if not separated:
        return MalformedCall(f"the tool call has no {_ARGUMENTS} before its arguments")
    match = _ID.fullmatch(call_id.strip())
    if match is None:
        return MalformedCall(
            f"the tool call's id must be functions.NAME:NUMBER, not {quote(call_id.strip())}"
        )
    return read_arguments(match[1], arguments)
