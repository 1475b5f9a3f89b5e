"""The ids by which a row's results name its calls.

The row's own ids are written where the chat template makes calls of them that are read. Elsewhere
(Mistral's have nine characters, Kimi K2's hold the name) they are replaced, in the calls and in
their results alike.
"""

from collections.abc import Sequence

from agentrl.rollout.chat import ChatRenderer, Message
from agentrl.rollout.chat.turns import TurnReading


class CallIds:
    """Maps the ids of one row, turn by turn."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._n_calls = 0
        self._known: dict[str, Message] = {}  # what a result tells of its call, by the row's id
        self._waiting: list[Message] = []  # the same for the last turn's calls without a result

    def choices(self, turn: Message) -> list[list[str]]:
        """The ids that the turn's calls may have, best first.

        Raises `ValueError` if two of its calls have one id.
        """
        calls = turn.get("tool_calls", ())
        own = [call["id"] for call in calls if "id" in call]
        if len(set(own)) < len(own):
            raise ValueError("has two calls with one `id`")
        names = [call["function"]["name"] for call in calls]
        made = [self._renderer.call_id(name, self._n_calls + at) for at, name in enumerate(names)]
        if len(own) < len(calls) or not calls:
            return [made]
        if self._renderer.capabilities.named_by_id and not all(map(str.__contains__, own, names)):
            return [made]
        return [own, made]

    def take(self, turn: Message, ids: Sequence[str]) -> None:
        """The turn is said with these ids."""
        calls = turn.get("tool_calls", ())
        self._n_calls += len(calls)
        self._waiting = [
            {"tool_call_id": given, "name": call["function"]["name"]}
            for call, given in zip(calls, ids, strict=True)
        ]
        for call, told in zip(calls, self._waiting, strict=True):
            if "id" in call:
                self._known[call["id"]] = told

    def answered(self, message: Message) -> Message:
        """A message behind the turn; a result gets the id of its call, and its name.

        A result without an id is that of the next call. Raises `ValueError` if it names no call.
        """
        if message["role"] != "tool":
            return message
        own = message.get("tool_call_id")
        if own is None or not self._known:
            told = self._waiting[0] if self._waiting else {}
        elif own in self._known:
            told = self._known[own]
        else:
            raise ValueError(f"its `tool_call_id` {own!r} is of no call before it")
        self._waiting = [other for other in self._waiting if other is not told]
        return {**told, **message, "tool_call_id": told["tool_call_id"]} if told else message


def with_ids(turn: Message, said: TurnReading, ids: Sequence[str]) -> Message:
    """The turn, whose calls are those of `said` or none, with these ids of its calls.

    A call of another name is a probe, and keeps its own: an id may hold the name.
    """
    if "tool_calls" not in turn:
        return turn
    calls = [
        {**call, "id": given} if call["function"]["name"] == name else call
        for call, name, given in zip(turn["tool_calls"], said.call_names, ids, strict=True)
    ]
    return {**turn, "tool_calls": calls}
