"""The ids by which a row's results name its calls.

The row's own ids are written where the chat template makes calls of them that are read. Elsewhere
(Mistral's have nine characters, Kimi K2's hold the name) they are replaced, in the calls and in
their results alike.

Results are in the order of their calls, as in sampling: where the chat template writes no ids, a
model reads the first result as that of the first call.
"""

from collections.abc import Sequence
from itertools import groupby

from agentrl.rollout.chat import ChatRenderer, Message
from agentrl.rollout.chat.turns import TurnReading
from agentrl.rollout.demonstrations.messages import naming


class CallResults:
    """Gives the results of one row the ids of their calls and puts them in order, turn by turn.

    `have_ids`: whether results are read with these ids. Without, one whose place is another call's
    is refused.
    """

    def __init__(self, *, have_ids: bool) -> None:
        self._have_ids = have_ids
        self._n_calls = 0
        self._known: dict[str, Message] = {}  # what a result tells of its call, by the row's id
        self._called: list[Message] = []  # the same for the last turn's calls
        self._waiting: list[Message] = []  # those of them without a result

    def take(self, turn: Message, ids: Sequence[str]) -> None:
        """The turn is said with these ids."""
        calls = turn.get("tool_calls", ())
        self._n_calls += len(calls)
        self._called = [
            {"tool_call_id": given, "name": call["function"]["name"]}
            for call, given in zip(calls, ids, strict=True)
        ]
        self._waiting = list(self._called)
        for call, told in zip(calls, self._called, strict=True):
            if "id" in call:
                self._known[call["id"]] = told

    def answered(self, messages: Sequence[Message], first: int) -> list[Message]:
        """The messages behind the turn, of which `first` is the number of the first in the row.

        A result gets the id of its call, and its name; without an id it is that of the next call.
        Raises `ValueError` if one names no call, or would be read as that of another call.
        """
        answered: list[Message] = []
        numbered = enumerate(messages, start=first)
        for role, group in groupby(numbered, key=lambda each: each[1]["role"]):
            run = list(group)
            answered += self._results(run) if role == "tool" else [message for _, message in run]
        return answered

    def _results(self, run: Sequence[tuple[int, Message]]) -> list[Message]:
        """Results that follow each other, by their numbers, in the order of their calls."""
        n_before = len(self._called) - len(self._waiting)
        told = []
        for number, message in run:
            with naming(number):
                told.append((self._call_of(message), number, message))
        told.sort(key=lambda each: self._order(each[0]))
        if not self._have_ids:
            for (call, number, _), read_as in zip(told, self._called[n_before:], strict=False):
                if call is not read_as:
                    with naming(number):
                        raise ValueError(
                            f"would be read as the result of another call, of {read_as['name']}, "
                            "which has none before it: the chat template writes no ids"
                        )
        return [
            {**call, **message, "tool_call_id": call["tool_call_id"]} if call else message
            for call, _, message in told
        ]

    def _call_of(self, message: Message) -> Message:
        """What the result tells of its call; nothing if all calls have theirs."""
        own = message.get("tool_call_id")
        if own is None or not self._known:
            call = self._waiting[0] if self._waiting else {}
        elif own in self._known:
            call = self._known[own]
        else:
            raise ValueError(f"its `tool_call_id` {own!r} is of no call before it")
        self._waiting = [other for other in self._waiting if other is not call]
        return call

    def _order(self, call: Message) -> int:
        """The place of a call in its turn; behind all others if it is of an earlier one or none."""
        places = (at for at, other in enumerate(self._called) if other is call)
        return next(places, len(self._called))


class CallIds(CallResults):
    """Maps the ids of one row to those that the chat template of `renderer` writes."""

    def __init__(self, renderer: ChatRenderer) -> None:
        super().__init__(have_ids=renderer.capabilities.results_have_ids)
        self._renderer = renderer

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
