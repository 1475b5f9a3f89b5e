"""A generated turn as a message: what it says, and the ways in which a chat template may take it.

A template that is given a turn as plain content writes it verbatim, if it can; some refuse that, or
write tool results only after calls that they were given as such. So a turn can be put in several
forms. Which of them the template writes as it was generated is found out by `conversation.py`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from agentrl.rollout.tool_calls import MalformedCall, ParsedCall, ToolCallParser

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")  # as templates name a thought

Message = dict[str, Any]  # role and content; tool_call_id and name for results that have them


class ThoughtMarks(NamedTuple):
    """What stands before and after a thought."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class TurnReading:
    """What a turn says.

    `text` is all of it without its stop token; `lead` the part up to the end of the thought, as it
    stands; `prompted` what the prompt wrote of the turn already (`<think>` and a line end).
    """

    text: str
    prompted: str
    lead: str
    thought: str
    content: str
    calls: tuple[ParsedCall | MalformedCall, ...]

    @property
    def call_names(self) -> tuple[str, ...]:
        """The names of its calls; one that cannot be made has a name that says so."""
        return tuple(_writable(call).name for call in self.calls)

    def says_the_same(self, other: "TurnReading") -> bool:
        """Whether both have the same thought, content and calls, space around them aside.

        A call that cannot be made is the same as what a template is given in its place.
        """
        return (self.thought, self.content) == (other.thought, other.content) and list(
            map(_writable, self.calls)
        ) == list(map(_writable, other.calls))


def read_turn(
    text: str,
    prompted: str,
    marks: ThoughtMarks,
    parse_calls: ToolCallParser,
    tools: Sequence[Mapping[str, Any]] = (),
) -> TurnReading:
    """What a turn says. `prompted`: see `TurnReading`."""
    start = 0
    stripped = text.lstrip()
    if stripped.startswith(marks.open):
        start = len(text) - len(stripped) + len(marks.open)
    close = text.find(marks.close, start)
    has_thought = close >= 0
    lead_end = close + len(marks.close) if has_thought else 0
    parsed = parse_calls(text[lead_end:], tools)
    return TurnReading(
        text=text,
        prompted=prompted,
        lead=text[:lead_end],
        thought=text[start:close].strip() if has_thought else "",
        content=parsed.content.strip(),
        calls=tuple(parsed.calls),
    )


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


class TurnForm(Enum):
    """A way of giving a turn to the template: all as content, or in fields."""

    TEXT = "content as generated"
    REOPENED = "content as generated, after what the prompt wrote of it"
    FIELDS = "thought, content and calls in fields"
    FIELDS_JSON = "thought, content and calls in fields, arguments as JSON text"
    INLINE = "calls in fields, thought in the content"
    INLINE_JSON = "calls in fields, thought in the content, arguments as JSON text"


TEXT_FORMS = (TurnForm.TEXT, TurnForm.REOPENED)
_JSON_FORMS = (TurnForm.FIELDS_JSON, TurnForm.INLINE_JSON)


def as_message(turn: TurnReading, form: TurnForm, call_ids: Sequence[str]) -> Message | None:
    """The turn in this form, or None if it cannot be put so. `call_ids`: one for each call."""
    if form is TurnForm.TEXT:
        return {"role": "assistant", "content": turn.text}
    if form is TurnForm.REOPENED:
        return (
            {"role": "assistant", "content": turn.prompted + turn.text} if turn.prompted else None
        )
    message: Message = {"role": "assistant", "content": turn.content}
    if form in (TurnForm.INLINE, TurnForm.INLINE_JSON):
        if not turn.lead:
            return None
        rest = turn.text[len(turn.lead) :]
        before = rest[: len(rest) - len(rest.lstrip())]
        message["content"] = turn.prompted + turn.lead + before + turn.content
    elif turn.thought:
        message |= dict.fromkeys(THOUGHT_FIELDS, turn.thought)
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _json(call.arguments) if form in _JSON_FORMS else call.arguments,
                },
            }
            for call, call_id in zip(map(_writable, turn.calls), call_ids, strict=True)
        ]
    return message


def _writable(call: ParsedCall | MalformedCall) -> ParsedCall:
    """The call; in place of one that cannot be read, which no template could write, a stand-in."""
    return call if isinstance(call, ParsedCall) else ParsedCall("unreadable", {})


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)
