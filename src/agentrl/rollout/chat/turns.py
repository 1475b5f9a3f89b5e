"""A generated turn: its ids, and what its text says.

In which forms a chat template can be given a turn is in `forms.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl.rollout.tool_calls import MalformedCall, ParsedCall, ToolCallParser

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")  # as templates name a thought

Message = dict[str, Any]  # role and content; tool_call_id and name for results that have them


def n_characters(messages: Sequence[Message]) -> int:
    """Of what the messages say."""
    return sum(len(message.get("content") or "") for message in messages)


class ThoughtMarks(NamedTuple):
    """What stands before and after a thought."""

    open: str
    close: str


class TurnFrame(NamedTuple):
    """The control text that the template itself writes before and after what a turn says.

    Both are empty for most families. gpt-oss has `<|channel|>final<|message|>` before, Cohere2
    `<|END_RESPONSE|>` after.
    """

    before: str = ""
    after: str = ""

    def peel_turn(self, text: str) -> str:
        """A turn's text, as content that the template writes the frame around again."""
        return text.removeprefix(self.before).removesuffix(self.after)

    def peel_content(self, content: str) -> str:
        """What is said in text that may begin with other messages, and their headers."""
        content = content.strip()
        before = self.before.strip()
        if before:
            content = content.rpartition(before)[2]
        return content.removesuffix(self.after.strip()).strip()


NO_FRAME = TurnFrame()


@dataclass(frozen=True, slots=True)
class TurnReading:
    """What a turn says.

    `text` is all of it without its stop token; `body` that without the frame that the template
    writes around it; `lead` the part up to the end of the thought, as it stands; `prompted` what
    the prompt wrote of the turn already (`<think>` and a line end).
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
        """The names of its calls; one that cannot be made has a name that says so."""
        return tuple(writable(call).name for call in self.calls)

    def says_the_same(self, other: "TurnReading") -> bool:
        """Whether both have the same thought, content and calls, space around them aside.

        A call that cannot be made is the same as what a template is given in its place.
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
    """What a turn says. `prompted`: see `TurnReading`."""
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
    """The thought that a turn begins with, and where its closing mark ends; "" and 0 without one.

    The prompt may have opened the thought, so that only its end stands in the turn.
    """
    start = 0
    stripped = text.lstrip()
    if stripped.startswith(marks.open):
        start = len(text) - len(stripped) + len(marks.open)
    close = text.find(marks.close, start)
    return (text[start:close].strip(), close + len(marks.close)) if close >= 0 else ("", 0)


# Kimi K2's and Mistral's: ids that the model itself gives its calls.
_WRITTEN_IDS = (
    re.compile(r"<\|tool_call_begin\|>\s*([^\s<|]+:\d+)\s*<\|tool_call_argument_begin\|>"),
    re.compile(r'[{,]\s*"id":\s*"([A-Za-z0-9]{9})"\s*}'),
    re.compile(r"\[CALL_ID\]\s*([A-Za-z0-9]{9})"),
)


def written_ids(turn: TurnReading) -> list[str] | None:
    """The ids of a turn's calls if the model wrote one for each."""
    for pattern in _WRITTEN_IDS:
        found = pattern.findall(turn.text, len(turn.lead))
        if found and len(found) == len(turn.calls):
            return found
    return None


def writable(call: ParsedCall | MalformedCall) -> ParsedCall:
    """The call; in place of one that cannot be read, which no template could write, a stand-in."""
    return call if isinstance(call, ParsedCall) else ParsedCall("unreadable", {})


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A generated turn as a conversation holds it.

    output_ids: as they were sampled, with the stop token if there is one
    stop_id, stop_text: that token; None and "" where the turn was cut off
    reading: what it says
    headers: the end of the prompt that it was generated from, in the ways in which a later prompt
        may write it before the turn (`EscapingCodec.headers`)
    call_ids: one for each of its calls
    written: the template's text for it, without the stop token; not `text` where it is restyled
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
    """What a prompt that ends so wrote of the turn: the begin of a thought, or nothing."""
    if not prompt_end.rstrip().endswith(marks.open):
        return ""
    return prompt_end[prompt_end.rindex(marks.open) :]
