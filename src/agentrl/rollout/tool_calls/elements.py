"""Calls between an opening and a closing mark, and the thought that may stand before them."""

from collections.abc import Callable, Sequence

from agentrl.rollout.tool_calls.calls import Call, MalformedCall, ParsedCall, ParsedTurn

THINK = ("<think>", "</think>")  # the marks of a thought, in most families


def read_elements(
    text: str,
    opening: str,
    closing: str,
    read: Callable[[str], Sequence[Call]],
    thought: tuple[str, str] = THINK,
) -> ParsedTurn:
    """The calls that `read` finds in each `opening`...`closing`; all other text is content.

    The thought is content too, even if it contains calls: they are not made. `thought`: its two
    marks.
    """
    content: list[str] = []
    calls: list[Call] = []
    position, search_from = 0, thought_end(text, opening, closing, thought)
    while (start := text.find(opening, search_from)) >= 0:
        content.append(text[position:start])
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            calls.append(_not_closed(closing))
            position = len(text)
            break
        found, end = _read_element(text, start, end, opening, closing, read)
        calls += found
        position = search_from = end + len(closing)
    content.append(text[position:])
    return ParsedTurn("".join(content).strip(), tuple(calls))


def thought_end(text: str, opening: str, closing: str, thought: tuple[str, str] = THINK) -> int:
    """The end index of the thought at the start of a turn; 0 if there is none.

    The opening mark may be in the prompt. A closing mark inside a call is an argument's text. An
    unclosed thought does not count: some models go directly from a thought to a call.
    """
    end = text.find(thought[1])
    if end < 0:
        return 0
    begun = text.lstrip().startswith(thought[0])
    if not begun and text.rfind(opening, 0, end) > text.rfind(closing, 0, end):
        return 0
    return end + len(thought[1])


def _read_element(
    text: str,
    start: int,
    end: int,
    opening: str,
    closing: str,
    read: Callable[[str], Sequence[Call]],
) -> tuple[Sequence[Call], int]:
    """The calls of an element, and its end; later than `end` if arguments contain the mark."""
    body = text[start:end]
    calls = read(body)
    if _all_readable(calls):
        return calls, end
    _, unclosed, last = body.rpartition(opening)
    if unclosed:
        return [_not_closed(closing), *read(last)], end
    next_start = text.find(opening, end)
    later_end = text.rfind(closing, end + 1, next_start if next_start >= 0 else len(text))
    if later_end > end and _all_readable(longer := read(text[start:later_end])):
        return longer, later_end
    return calls, end


def _all_readable(calls: Sequence[Call]) -> bool:
    return all(isinstance(call, ParsedCall) for call in calls)


def _not_closed(closing: str) -> MalformedCall:
    return MalformedCall(f"the tool call is not closed with {closing}")
