"""Qwen 2.5, Qwen 3 and the Hermes models: one JSON object in each `<tool_call>` element.

<tool_call>
{"name": "stock", "arguments": {"bin": "B7"}}
</tool_call>
"""

from agentrl.rollout.tool_calls.calls import ParsedTurn, Tools
from agentrl.rollout.tool_calls.elements import read_elements
from agentrl.rollout.tool_calls.json_text import read_json_call


def parse_qwen(text: str, tools: Tools = ()) -> ParsedTurn:
    """The calls of a turn of Qwen 2.5 or 3."""
    return read_elements(text, "<tool_call>", "</tool_call>", lambda body: (read_json_call(body),))
