"""Whether a turn, as it is written, can be sampled, and is then read as the calls that it says.

A model that learnt another turn would make other calls than the row's, or none, before results that
answer the row's.
"""

import json
from typing import Any

from agentrl.rollout.chat import ChatRenderer
from agentrl.rollout.chat.capabilities import Tools
from agentrl.rollout.chat.turns import TurnReading, opened_thought
from agentrl.rollout.tool_calls import Call, MalformedCall, ParsedCall


def refuse_stops(renderer: ChatRenderer, said: TurnReading) -> None:
    """Raise `ValueError` if a part of a turn has a token at which sampling stops."""
    calls = [call for call in said.calls if isinstance(call, ParsedCall)]
    in_calls = [json.dumps([call.name, call.arguments], ensure_ascii=False) for call in calls]
    stops = sorted(renderer.codec.added_ids.intersection(renderer.stop_token_ids))
    for stop in map(renderer.codec.token, stops):
        if any(stop in part for part in (said.thought, said.content, *in_calls)):
            raise ValueError(f"says {stop!r}, which ends a turn")


def refuse_misread(
    renderer: ChatRenderer, prompt: str, text: str, said: TurnReading, tools: Tools
) -> None:
    """Raise `ValueError` if the turn `text` behind `prompt` is not read as the calls of `said`.

    Calls that no parser of AgentRL's reads are not compared.
    """
    if not said.calls or renderer.parser_choice.unread:
        return
    prompted = opened_thought(prompt, renderer.capabilities.thought_marks)
    read = renderer.read_turn(text, prompted, tools).calls
    for call, other in zip(said.calls, read, strict=False):
        assert isinstance(call, ParsedCall), "a row's calls are whole"
        if isinstance(other, MalformedCall):
            raise ValueError(
                f"the call of {call.name} cannot be read as the chat template writes it: "
                f"{other.error}"
            )
        if not _is_same(call, other):
            raise ValueError(
                f"the call of {call.name} is read as another one, as the chat template writes it: "
                f"{other.name} with {_shown(other.arguments)}"
            )
    if len(read) != len(said.calls):
        raise ValueError(
            f"its calls are read as {len(read)}, as the chat template writes them, and not as "
            f"{len(said.calls)}"
        )


def _is_same(call: ParsedCall, other: Call) -> bool:
    return (
        isinstance(other, ParsedCall)
        and call.name == other.name
        and call.arguments.keys() == other.arguments.keys()
        and all(_says_the_same(call.arguments[key], other.arguments[key]) for key in call.arguments)
    )


def _says_the_same(value: Any, read: Any) -> bool:
    """Whether two values have one text: some templates write an argument without its type."""
    return bool(value == read) or _of_text(value) == _of_text(read) or str(value) == str(read)


def _of_text(value: Any) -> Any:
    """The value of a text that is JSON, and any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _shown(value: Any, limit: int = 60) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[:limit]}..."
