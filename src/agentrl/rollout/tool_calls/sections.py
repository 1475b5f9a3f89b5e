"""Marked calls that stand together in a marked section, as DeepSeek and Kimi write them."""

from collections.abc import Callable

from agentrl.rollout.tool_calls.calls import Call, MalformedCall, ParsedTurn
from agentrl.rollout.tool_calls.elements import read_elements


def read_section(
    text: str, section: tuple[str, str], element: tuple[str, str], read: Callable[[str], Call]
) -> ParsedTurn:
    """The calls that `read` finds in each element. `section`, `element`: their two marks.

    Calls outside a section count too. Other text in a section is content.
    """
    turn = read_elements(text, *element, lambda body: (read(body),))
    content, calls = turn.content, turn.calls
    if section[0] in content and not calls:
        error = f"the section of tool calls holds no {element[0]}...{element[1]}"
        calls = (MalformedCall(error),)
    for mark in section:
        content = content.replace(mark, "")
    return ParsedTurn(content.strip(), calls)
