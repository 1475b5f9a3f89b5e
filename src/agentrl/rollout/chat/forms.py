"""The forms in which a generated turn can be passed to a chat template.

Most templates write plain content verbatim. Some reject a turn as content, some change it, and some
write tool results only after calls in fields. `CANDIDATE_FORMS` lists all forms in order, each with
its reason. `form_choice.py` chooses one.

For a turn `hm\\n</think>\\n\\nYes.` + a call, after a prompt that ends in `<think>\\n`:

    form             content                          thought fields   tool_calls
    content          hm\\n</think>\\n\\nYes.<call>
    reopened         <think>\\nhm\\n</think>\\n\\nYes.<call>
    fields           Yes.                             hm               the call
    inline thought   <think>\\nhm\\n</think>\\n\\nYes.                     the call
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl.rollout.chat.turns import THOUGHT_FIELDS, Message, TurnReading, writable


def as_content(turn: TurnReading, _call_ids: Sequence[str]) -> Message:
    """The whole turn as content, without the template's frame."""
    return _assistant(turn.body)


def as_reopened_content(turn: TurnReading, _call_ids: Sequence[str]) -> Message | None:
    """The whole turn as content, with the part that the prompt wrote; None if it wrote none."""
    return _assistant(turn.prompted + turn.body) if turn.prompted else None


def in_fields(
    turn: TurnReading, call_ids: Sequence[str], *, json_arguments: bool = False
) -> Message:
    """Thought, content and calls in separate fields."""
    thought = dict.fromkeys(THOUGHT_FIELDS, turn.thought) if turn.thought else {}
    return _assistant(turn.content) | thought | _calls(turn, call_ids, json_arguments)


def with_inline_thought(
    turn: TurnReading, call_ids: Sequence[str], *, json_arguments: bool = False
) -> Message | None:
    """Calls in fields and the thought in the content; None if there is no thought."""
    if not turn.lead:
        return None
    rest = turn.text[len(turn.lead) :]
    space = rest[: len(rest) - len(rest.lstrip())]
    content = turn.prompted + turn.lead + space + turn.content
    return _assistant(content) | _calls(turn, call_ids, json_arguments)


@dataclass(frozen=True, slots=True)
class TurnForm:
    """A form in which a turn can be passed to a template.

    reason: why it is a candidate.
    put: (turn, call ids [n_calls]) -> message; None if the turn has no such form.
    is_text: calls and thought stay unparsed in the content.
    """

    name: str
    reason: str
    put: Callable[[TurnReading, Sequence[str]], Message | None]
    is_text: bool = False


CANDIDATE_FORMS = (
    TurnForm(
        "content",
        "nothing is parsed, so nothing can be serialised otherwise than it was generated",
        as_content,
        is_text=True,
    ),
    TurnForm(
        "reopened content",
        "a template that opens the thought in the prompt wants the opening again in the turn",
        as_reopened_content,
        is_text=True,
    ),
    TurnForm(
        "fields",
        "some templates refuse a turn with calls as content (gpt-oss), take it for an answer that "
        "no results may follow (Mistral), or write results only after calls they know (Gemma 4)",
        in_fields,
    ),
    TurnForm(
        "fields, JSON arguments",
        "some templates write arguments as they are given: as an object, that would be Python's "
        "notation, or fail (DeepSeek V3)",
        partial(in_fields, json_arguments=True),
    ),
    TurnForm(
        "inline thought",
        "some templates want calls in fields, and drop or move a thought that is in one",
        with_inline_thought,
    ),
    TurnForm(
        "inline thought, JSON arguments",
        "the last two together",
        partial(with_inline_thought, json_arguments=True),
    ),
)


def candidates(
    turn: TurnReading, call_ids: Sequence[str], first: Sequence[TurnForm] = ()
) -> Iterator[tuple[TurnForm, Message]]:
    """The forms of a turn with their messages, beginning with those in `first`.

    A form with the same message as an earlier one is left out.
    """
    tried: list[Message] = []
    for form in (*first, *(form for form in CANDIDATE_FORMS if form not in first)):
        message = form.put(turn, call_ids)
        if message is not None and message not in tried:
            tried.append(message)
            yield form, message


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _calls(turn: TurnReading, call_ids: Sequence[str], json_arguments: bool) -> Message:
    """The field of calls; {} if there are none."""
    if not turn.calls:
        return {}

    def function(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        given = json.dumps(arguments, ensure_ascii=False) if json_arguments else arguments
        return {"name": name, "arguments": given}

    return {
        "tool_calls": [
            {"id": call_id, "type": "function", "function": function(call.name, call.arguments)}
            for call, call_id in zip(map(writable, turn.calls), call_ids, strict=True)
        ]
    }
