"""GLM-4.5 and later: keys and values as elements, values that are no strings as JSON.

<tool_call>stock
<arg_key>bin</arg_key>
<arg_value>B7</arg_value>
</tool_call>
"""

import re

from agentrl.rollout.tool_calls.calls import Call, MalformedCall, ParsedTurn, Tools, quote
from agentrl.rollout.tool_calls.elements import read_elements
from agentrl.rollout.tool_calls.typed_text import typed_call

_NAME = re.compile(r"[^\s<>{}\"]++")
# A value ends at a closing mark before another key or the end; other closing marks are its text.
_ARGUMENT = re.compile(
    r"\s*<arg_key>([^<]++)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*+(?:<arg_key>|\Z))",
    re.DOTALL,
)


def parse_glm45(text: str, tools: Tools = ()) -> ParsedTurn:
    """The calls of a turn of GLM-4.5. `tools`: distinguish numbers from strings."""
    return read_elements(
        text, "<tool_call>", "</tool_call>", lambda body: (_read_function(body, tools),)
    )


def _read_function(body: str, tools: Tools) -> Call:
    name_end = body.find("<arg_key>")
    name = (body if name_end < 0 else body[:name_end]).strip()
    if not _NAME.fullmatch(name):
        return MalformedCall(
            f"the tool call does not begin with the tool's name, but with {quote(body.strip())}"
        )
    texts: list[tuple[str, str]] = []
    position = len(body) if name_end < 0 else name_end
    while match := _ARGUMENT.match(body, position):
        texts.append((match[1].strip(), match[2]))
        position = match.end()
    rest = body[position:].strip()
    if rest:
        return MalformedCall(
            f"the tool call holds {quote(rest)} where <arg_key>NAME</arg_key> and "
            "<arg_value>VALUE</arg_value> must be"
        )
    return typed_call(name, texts, tools)
