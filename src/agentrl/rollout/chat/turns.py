"""A generated turn: its ids, and its parsed text.

`forms.py` defines the forms in which a turn is passed to a chat template.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl.rollout.tool_calls import MalformedCall, ParsedCall, ToolCallParser

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")  # templates' names of a thought

Message = dict[str, Any]  # role and content; tool results may have tool_call_id and name


def n_characters(messages: Sequence[Message]) -> int:
    """Characters in the contents of messages."""
    return sum(len(message.get("content") or "") for message in messages)


class ThoughtMarks(NamedTuple):
    """The text before and after a thought."""

    open: str
    close: str


class TurnFrame(NamedTuple):
    """The control text that the template writes before and after a turn's content.

    Both are empty for most model families. gpt-oss has `<|channel|>final<|message|>` before,
    Cohere2 has `<|END_RESPONSE|>` after.
    """

    before: str = ""
    after: str = ""

    def peel_turn(self, text: str) -> str:
        """A turn's text without the frame, which the template adds again."""
        return text.removeprefix(self.before).removesuffix(self.after)

    def peel_content(self, content: str) -> str:
        """The content without the frame, and without other messages before it."""
        content = content.strip()
        before = self.before.strip()
        if before:
            content = content.rpartition(before)[2]
        return content.removesuffix(self.after.strip()).strip()


NO_FRAME = TurnFrame()


@dataclass(frozen=True, slots=True)
class TurnReading:
    """A parsed turn.

    `text`: the whole turn without its stop token. `body`: `text` without the template's frame.
    `prompted`: the part of the turn that the prompt wrote, such as `<think>` and a line end.
    `lead`: the part of `text` up to the end of the thought. `thought`, `content`, `calls`: its
    parts.
    """

    text: str
    body: str
    prompted: str
    lead: str
    thought: str
    content: str
    calls: tuple[ParsedCall | MalformedCall, ...]

    @property
    def call_names(self) -> tuple[str, ...]:
        """The names of its calls; a malformed call has a stand-in."""
        return tuple(writable(call).name for call in self.calls)

    def says_the_same(self, other: "TurnReading") -> bool:
        """Whether both have the same thought, content and calls, apart from surrounding space.

        A malformed call equals its stand-in (`writable`).
        """
        return (self.thought, self.content) == (other.thought, other.content) and list(
            map(writable, self.calls)
        ) == list(map(writable, other.calls))


def read_turn(
    text: str,
    prompted: str,
    marks: ThoughtMarks,
    parse_calls: ToolCallParser,
    tools: Sequence[Mapping[str, Any]] = (),
    frame: TurnFrame = NO_FRAME,
) -> TurnReading:
    """Parse a turn's text. `prompted`: see `TurnReading`."""
    thought, lead_end = find_thought(text, marks)
    parsed = parse_calls(text[lead_end:], tools)
    return TurnReading(
        text=text,
        body=frame.peel_turn(text),
        prompted=prompted,
        lead=text[:lead_end],
        thought=thought,
        content=frame.peel_content(parsed.content),
        calls=tuple(parsed.calls),
    )


def find_thought(text: str, marks: ThoughtMarks) -> tuple[str, int]:
    """The thought at the start of a turn, and the index after its closing mark; "" and 0 if none.

    The opening mark may be in the prompt instead.
    """
    start = 0
    stripped = text.lstrip()
    if stripped.startswith(marks.open):
        start = len(text) - len(stripped) + len(marks.open)
    close = text.find(marks.close, start)
    return (text[start:close].strip(), close + len(marks.close)) if close >= 0 else ("", 0)


# Ids that the model itself gives its calls, in Kimi K2's and Mistral's notation.
_WRITTEN_IDS = (
    re.compile(r"<\|tool_call_begin\|>\s*([^\s<|]+:\d+)\s*<\|tool_call_argument_begin\|>"),
    re.compile(r'[{,]\s*"id":\s*"([A-Za-z0-9]{9})"\s*}'),
    re.compile(r"\[CALL_ID\]\s*([A-Za-z0-9]{9})"),
)


def written_ids(turn: TurnReading) -> list[str] | None:
    """The ids of a turn's calls if the model wrote one for each, else None."""
    for pattern in _WRITTEN_IDS:
        found = pattern.findall(turn.text, len(turn.lead))
        if found and len(found) == len(turn.calls):
            return found
    return None


def writable(call: ParsedCall | MalformedCall) -> ParsedCall:
    """The call, or a stand-in for a malformed one, which no template could write."""
    return call if isinstance(call, ParsedCall) else ParsedCall("unreadable", {})


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A generated turn in a conversation.

    output_ids: the sampled ids, with the stop token if there is one
    stop_id, stop_text: the stop token; None and "" if the turn was truncated
    reading: the parsed turn
    headers: the end of its prompt, in the ways in which a later prompt may write it
        (`EscapingCodec.headers`)
    call_ids: one per call
    written: the template's text for it, without the stop token; differs from `text` if restyled
    """

    output_ids: tuple[int, ...]
    stop_id: int | None
    stop_text: str
    reading: TurnReading
    headers: tuple[str, ...]
    call_ids: tuple[str, ...]
    written: str

    @property
    def text(self) -> str:
        """The turn's text as it was generated, without the stop token."""
        return self.reading.text


def opened_thought(prompt_end: str, marks: ThoughtMarks) -> str:
    """The opening of a thought at the end of a prompt; "" if there is none."""
    if not prompt_end.rstrip().endswith(marks.open):
        return ""
    return prompt_end[prompt_end.rindex(marks.open) :]
