"""MiniCPM: versions 3 and 4 write Python calls, later ones elements with bare text.

    <|tool_call_start|>
    ```python
    stock(bin="B7")
    now()
    ```
    <|tool_call_end|>

The later ones: `<function name="stock"><param name="bin">B7</param></function>`.
"""

import re
from xml.sax.saxutils import unescape

from agentrl.rollout.tool_calls.calls import (
    Call,
    MalformedCall,
    ParsedTurn,
    Tools,
    make_call,
    quote,
)
from agentrl.rollout.tool_calls.elements import read_elements
from agentrl.rollout.tool_calls.python_calls import PythonReader, UnreadableError
from agentrl.rollout.tool_calls.typed_text import typed_call

_PYTHON_OPEN, _PYTHON_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_FENCE = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*)```\s*", re.DOTALL)
_FUNCTION_OPEN, _FUNCTION_CLOSE = "<function name=", "</function>"
_FUNCTION_NAME = re.compile(r"""\s*(?:"([^"<>]++)"|'([^'<>]++)')\s*>""")
# A parameter ends at a closing mark before another parameter or the end; others are its text.
_PARAMETER = re.compile(
    r"""\s*<param\s+name=(?:"([^"<>]++)"|'([^'<>]++)')\s*>(.*?)</param>(?=\s*+(?:<param\s|\Z))""",
    re.DOTALL,
)
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)


def parse_minicpm(text: str, tools: Tools = ()) -> ParsedTurn:
    """The calls of a turn of MiniCPM. `tools`: distinguish numbers from strings in elements."""
    if _PYTHON_OPEN in text:
        return read_elements(text, _PYTHON_OPEN, _PYTHON_CLOSE, _read_python)
    return read_elements(
        text, _FUNCTION_OPEN, _FUNCTION_CLOSE, lambda body: (_read_function(body, tools),)
    )


def _read_python(body: str) -> list[Call]:
    """The calls of a fenced block; an unreadable call ends it."""
    fence = _FENCE.fullmatch(body)
    if fence is None:
        return [MalformedCall("the tool calls do not stand between ```python and ```")]
    reader = PythonReader(fence[1].strip())
    calls: list[Call] = []
    try:
        while reader.at < len(reader.text):
            calls.append(make_call(*reader.read_call()))
            reader.take(";")
            reader.skip_space()
    except UnreadableError as error:
        calls.append(MalformedCall(f"the tool call cannot be read: {error}"))
    return calls or [MalformedCall("there is no tool call between ```python and ```")]


def _read_function(body: str, tools: Tools) -> Call:
    head = _FUNCTION_NAME.match(body)
    if head is None:
        return MalformedCall(f'the tool call does not begin with {_FUNCTION_OPEN}"NAME">')
    texts: list[tuple[str, str]] = []
    position = head.end()
    while match := _PARAMETER.match(body, position):
        texts.append((match[1] or match[2], _text_of(match[3])))
        position = match.end()
    rest = body[position:].strip()
    if rest:
        return MalformedCall(
            f'the tool call holds {quote(rest)} where <param name="NAME">...</param> must be'
        )
    return typed_call(head[1] or head[2], texts, tools)


def _text_of(value: str) -> str:
    """A parameter's text: verbatim in CDATA, otherwise with XML entities replaced."""
    verbatim = _CDATA.fullmatch(value)
    if verbatim is not None:
        return verbatim[1]
    return unescape(value.strip(), {"&quot;": '"', "&apos;": "'"})
