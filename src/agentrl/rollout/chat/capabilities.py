"""What a chat template can express, found by rendering probes; independent of model families.

    does it write tools?  a tool's results?  a system message?  a thought, between which marks?
    with which tokens do its turns end?  with which does it frame what they say?

If a template does not support tools, they are written in Hermes notation, which the default parser
reads: schemas in the system message, calls in `<tool_call>`, results in `<tool_response>` in a user
message.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from agentrl.rollout.chat.escaping import EscapingCodec
from agentrl.rollout.chat.turn_marks import find_frame, find_thought_marks
from agentrl.rollout.chat.turns import Message, ThoughtMarks, TurnFrame

Tools = Sequence[Mapping[str, Any]]
# (messages, tools, whether to add the next turn's header) -> text; raises the template's errors.
Apply = Callable[..., str]

_SYSTEM = "probe-system"
_QUESTION = "probe-question"
_TURN = "probe-turn"
_RESULT = "probe-result"
_NAME = "probe_tool"
_CALL_ID = "call00001"  # nine letters and digits, as Mistral's templates require
_OTHER_ID = "call00002"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "A text."}},
            "required": ["text"],
        },
    },
}
_REFUSALS = (TemplateError, TypeError, KeyError, ValueError)

_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions. Their signatures stand within <tools></tools>:"
    "\n<tools>\n"
)
_TOOLS_FOOT = (
    "\n</tools>\n\nFor each call, write a JSON object with the function's name and arguments "
    "within <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
)


class TemplateRefusal(ValueError):
    """The chat template rejects these messages."""


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """What a template can express.

    takes_system, takes_developer, writes_tools, writes_results, writes_thoughts: whether it has
        such a notation. Where it has none for OpenAI's developer, that is the system.
    thought_marks: the text around a thought.
    frame: the control text around a turn's content.
    named_by_id: calls are written with ids only, which contain the names.
    results_have_ids: results are written with the ids of their calls.
    turn_ends: text and id of the tokens that end a turn; the one before tool results comes first.
    """

    takes_system: bool
    takes_developer: bool
    writes_tools: bool
    writes_results: bool
    writes_thoughts: bool
    thought_marks: ThoughtMarks
    frame: TurnFrame
    named_by_id: bool
    results_have_ids: bool
    turn_ends: tuple[tuple[str, int], ...]

    def adapt_tools(self, tools: Tools | None) -> Tools | None:
        """The tools to pass to the template; None if it does not write tools."""
        return tools if self.writes_tools else None

    def adapt_messages(self, messages: Sequence[Message], tools: Tools | None) -> list[Message]:
        """The messages in a form that the template supports."""
        adapted = list(messages if self.takes_developer else map(_developer_as_system, messages))
        if tools and not self.writes_tools:
            schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            text = _TOOLS_HEAD + schemas + _TOOLS_FOOT
            if adapted and adapted[0]["role"] == "system":
                first = f"{adapted[0]['content']}\n\n{text}"
                adapted[0] = {**adapted[0], "content": first}
            else:
                adapted.insert(0, {"role": "system", "content": text})
        if adapted and adapted[0]["role"] == "system" and not self.takes_system:
            adapted = _system_in_question(adapted)
        return adapted if self.writes_results else _results_as_user(adapted)


def _developer_as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _system_in_question(messages: Sequence[Message]) -> list[Message]:
    """The messages with the system message prepended to the first question, as in Gemma."""
    system, *rest = messages
    first = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if first is None:
        return [{**system, "role": "user"}, *rest]
    content = f"{system['content']}\n\n{rest[first]['content']}"
    return [*rest[:first], {**rest[first], "content": content}, *rest[first + 1 :]]


def _results_as_user(messages: Sequence[Message]) -> list[Message]:
    """The messages with tool results as user messages; adjacent user messages are joined."""
    adapted: list[Message] = []
    for message in messages:
        given = message
        if message["role"] == "tool":
            body = f"<tool_response>\n{message['content']}\n</tool_response>"
            given = {"role": "user", "content": body}
        if adapted and adapted[-1]["role"] == given["role"] == "user":
            joined = f"{adapted[-1]['content']}\n{given['content']}"
            adapted[-1] = {"role": "user", "content": joined}
        else:
            adapted.append(given)
    return adapted


def probe_capabilities(apply: Apply, codec: EscapingCodec) -> TemplateCapabilities:
    """Find out by probing what a template can express.

    Raises ValueError if the template rejects or changes questions and turns, if a turn has no end
    token, or if escaped text does not survive.
    """

    def render(messages: Sequence[Message], tools: Tools | None, header: bool) -> str:
        return _try(apply, messages, tools, header)

    user = {"role": "user", "content": _QUESTION}
    answer = {"role": "assistant", "content": _TURN}
    result = {"role": "tool", "content": _RESULT, "name": _NAME, "tool_call_id": _CALL_ID}
    calls: list[Message] = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": _CALL_ID,
                    "type": "function",
                    "function": {"name": _NAME, "arguments": arguments},
                }
            ],
        }
        for arguments in ({"text": _TURN}, json.dumps({"text": _TURN}))
    ]
    try:
        whole = apply([user, answer], None, False)
    except _REFUSALS as refusal:
        raise ValueError(f"the chat template refuses a question and a turn: {refusal}") from None
    if _QUESTION not in whole or _TURN not in whole:
        raise ValueError("the chat template does not write a question and a turn as they are")
    called = [_try(apply, [user, call], None, False) for call in calls]
    with_tools = _try(apply, [user], [_TOOL])
    answered = [(turn, _try(apply, [user, turn, result])) for turn in (*calls, answer)]
    answered = [(turn, text) for turn, text in answered if _RESULT in text]
    turns = [turn for turn, _ in answered]
    other = {**result, "tool_call_id": _OTHER_ID}
    # The probe of a turn with calls is found by the name of its tool, which follows the thought.
    marks, shows_thoughts = find_thought_marks(
        render, codec, user, {_TURN: answer, _NAME: calls[0]}
    )
    prompt = _try(apply, [user])
    opens_thoughts = prompt.rstrip().endswith(marks.open)
    if codec.special_texts:
        _check_escapes(apply, codec, [user, *turns[:1]])
    follow_ups = [(turn, result) for turn in turns] + [(answer, user)]
    ends = [
        end
        for turn, added in follow_ups
        for end in _turn_ends(
            codec, _try(apply, [user, turn], None, False), _try(apply, [user, turn, added])
        )
        if end[0] != marks.close  # it only ends a thought
    ]
    if not ends:
        raise ValueError(
            "the chat template does not end an assistant turn with a special token, but with "
            f"{whole.partition(_TURN)[2][:20]!r}"
        )
    takes_system, takes_developer = (
        _SYSTEM in _try(apply, [{"role": role, "content": _SYSTEM}, user])
        for role in ("system", "developer")
    )
    return TemplateCapabilities(
        takes_system=takes_system,
        takes_developer=takes_developer,
        writes_tools=_NAME in with_tools,
        writes_results=bool(turns),
        writes_thoughts=shows_thoughts or opens_thoughts,
        thought_marks=marks,
        frame=find_frame(codec, prompt, whole, _TURN, [text for text, _ in ends]),
        named_by_id=bool(turns) and any(_CALL_ID in text and _NAME not in text for text in called),
        results_have_ids=any(_try(apply, [user, turn, other]) != text for turn, text in answered),
        turn_ends=tuple(dict.fromkeys(ends)),
    )


def _turn_ends(codec: EscapingCodec, closed: str, followed: str) -> list[tuple[str, int]]:
    """Text and id of the tokens that end the probe's turn.

    `closed`: the conversation up to the turn. `followed`: with more messages. The end is the last
    special token after the turn that both share. If they share none, each has its own end: some
    models end a turn by beginning the next one.
    """
    rests = [text.partition(_TURN)[2] for text in (closed, followed)]
    shared = rests[0][: _shared_length(*rests)]
    if ends := codec.specials(shared):
        return [ends[-1]]
    ways = (codec.special_at(rest, len(shared)) for rest in rests)
    return [way for way in ways if way is not None]


def _shared_length(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    differs = (index for index, (one, other) in pairs if one != other)
    return next(differs, min(len(first), len(second)))


def _check_escapes(apply: Apply, codec: EscapingCodec, before: Sequence[Message]) -> None:
    """Raise ValueError if the template changes escaped text."""
    evil = codec.escape_tool_text(codec.special_texts[-1])
    result = {"role": "tool", "content": f"{_RESULT} {evil}", "tool_call_id": _CALL_ID}
    text = _try(apply, [*before, result])
    if _RESULT in text and evil not in text:
        raise ValueError(
            "the chat template changes characters of tool results (it may write them as ASCII), so "
            "that tools could write control tokens"
        )


def _try(
    apply: Apply, messages: Sequence[Message], tools: Tools | None = None, header: bool = True
) -> str:
    """The rendered text; "" if the template rejects the messages."""
    try:
        return apply(messages, tools, header)
    except _REFUSALS:
        return ""
