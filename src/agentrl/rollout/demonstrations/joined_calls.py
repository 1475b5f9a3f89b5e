"""Messages of ms-swift that hold a call each, as the turns that say them.

    {"role": "assistant", "content": "I count."}            which may be missing
    {"role": "tool_call", "content": the JSON of a call}
    {"role": "tool_call", "content": the JSON of a call}

are one turn with two calls.
"""

from collections.abc import Sequence
from typing import Any

from agentrl.databases.task_file.file_rows import parse_inner
from agentrl.rollout.demonstrations.messages import MARKS, marked, naming

_SPEAKER = "tool_call"
_READ = ("role", "content", *MARKS)


def with_joined_calls(messages: Sequence[Any]) -> list[Any]:
    """The messages, with one of the assistant for such calls and the text before them.

    Raises `ValueError` with one sentence that continues after the row's place.
    """
    joined: list[Any] = []
    for number, one in enumerate(messages, start=1):
        if not isinstance(one, dict) or one.get("role") != _SPEAKER:
            joined.append(one)
            continue
        with naming(number):
            call = _call(one)
            before = joined[-1] if joined else None
            if not isinstance(before, dict) or before.get("role") != "assistant":
                joined.append({**one, "role": "assistant", "content": "", "tool_calls": [call]})
                continue
            if marked(one, *MARKS) != marked(before, *MARKS):
                raise ValueError("is marked to be trained otherwise than the turn it belongs to")
            calls = before.get("tool_calls") or []
            if not isinstance(calls, list):
                raise ValueError("follows calls in another form")
            joined[-1] = {**before, "tool_calls": [*calls, call]}
    return joined


def _call(message: dict[str, Any]) -> Any:
    others = [f"`{name}`" for name, value in message.items() if value and name not in _READ]
    if others:
        raise ValueError(f"is a call of a turn, and has {', '.join(others)}, which is not read")
    content = message.get("content")
    try:
        return parse_inner(content) if isinstance(content, str) else content
    except ValueError as error:
        raise ValueError(f"its content is no JSON of a call: {error}") from None
