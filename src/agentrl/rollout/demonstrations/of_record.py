"""A Record's conversations as chat messages, from its stored turns.

A Record has one conversation, and one more for each time that its context was rewritten. The last
messages of a conversation are those of its last turn. A turn is trained in the conversation in
which it was generated; in later ones it is context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.databases.documents import DispatchedSamplingTask, Rewrite, TurnStatus
from agentrl.rollout.agents.context_strategies import (
    ask_for_summary,
    discard_results,
    restart,
    take_out_last_turn,
)
from agentrl.rollout.chat import ChatRenderer, Entry, Message, ToolSchema
from agentrl.rollout.groups.group_rules import turn_advantages
from agentrl.rollout.tool_calls import MalformedCall

THOUGHT = ("<think>", "</think>")  # of turns without tokens: see `agents/endpoint.py`
_NO_TOKENS = (-1,)  # marks a generated turn that has none


@dataclass(frozen=True)
class Told:
    """A conversation in OpenAI's form. An assistant's message with `"train": False` is context.

    given: the indexes of the assistant's messages of which nothing is ever trained, in no answer
    """

    messages: tuple[Message, ...]
    given: frozenset[int]

    @property
    def trained(self) -> bool:
        """Whether it has a turn to train."""
        return any(_is_trained(message) for message in self.messages)

    @property
    def n_prompt(self) -> int:
        """Number of messages before the assistant's first."""
        return self._n_before(frozenset())

    @property
    def n_given(self) -> int:
        """Number of messages before the assistant's first that is not `given`."""
        return self._n_before(self.given)

    def _n_before(self, passed: frozenset[int]) -> int:
        said = (at for at, message in enumerate(self.messages) if message["role"] == "assistant")
        return next((at for at in said if at not in passed), len(self.messages))


def _is_trained(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and message.get("train") is not False


def needs_renderer(turns: Sequence[DispatchedSamplingTask]) -> bool:
    """Whether the turns' texts are the model's own, so that its renderer reads them."""
    return any(turn.output_ids for turn in turns)


def conversations(
    turns: Sequence[DispatchedSamplingTask],
    renderer: ChatRenderer | None,
    tools: Sequence[ToolSchema],
) -> list[Told]:
    """The conversations of a Record, by its turns in order.

    `renderer`: reads the turns' texts; None if they have no tokens. Raises ValueError if an agent
    of the user's rewrote the messages: what it asked is not stored as a whole.
    """
    told: list[Told] = []
    reader = _Reader(renderer, tools)
    head: list[Message] = []
    entries: list[Entry] = []
    before_summary: list[Entry] = []
    new: set[int] = set()  # turns generated in the present conversation
    for turn in turns:
        rewrite = None if turn.rewrite is None else Rewrite(turn.rewrite)
        if rewrite is not None:
            told.append(reader.told(entries, new))
            new = set()
        if not entries:
            head = list(turn.messages)
        if rewrite is None:
            entries = [*entries, *map(Entry, turn.messages)]
        elif rewrite is Rewrite.DISCARD_ALL_TOOLS:
            entries = discard_results([*entries, *map(Entry, turn.messages)])
        elif rewrite is Rewrite.REPETITION:
            entries = take_out_last_turn([*entries, *reader.results(entries)])
        elif rewrite is Rewrite.SUMMARY:
            before_summary = [*entries, *reader.results(entries)]
            question = ask_for_summary(before_summary)
            assert question is not None, f"{turn.id} asks for a summary of nothing"
            entries = question
        elif rewrite is Rewrite.DISCARD_ALL:
            summary = reader.read(entries[-1])["content"]
            entries = restart(head, summary, before_summary)
        else:
            raise ValueError("its agent went on from other messages, which are not stored whole")
        generated = Entry({"role": "assistant", "content": turn.output_text}, _NO_TOKENS)
        reader.known[id(generated)] = turn
        reader.kept.append(generated)
        new.add(id(generated))
        entries = [*entries, generated]
    told.append(reader.told(entries, new))
    return told


class _Reader:
    """Turns of a Record as messages. `known`: the turn of each generated entry, by its identity."""

    def __init__(self, renderer: ChatRenderer | None, tools: Sequence[ToolSchema]) -> None:
        self._renderer = renderer
        self._tools = tools
        self.known: dict[int, DispatchedSamplingTask] = {}
        self.kept: list[Entry] = []  # so that no identity is used twice

    def told(self, entries: Sequence[Entry], new: set[int]) -> Told:
        messages: list[Message] = []
        given: set[int] = set()
        names: list[str] = []
        for at, entry in enumerate(entries):
            if id(entry) in self.known:
                message = self.read(entry)
                turn = self.known[id(entry)]
                [advantage] = turn_advantages(1.0, [TurnStatus(turn.status)])
                if id(entry) not in new or advantage <= 0 or not turn.trained:
                    message["train"] = False
                if not turn.trained:
                    given.add(at)
                names = [call["function"]["name"] for call in message.get("tool_calls", ())]
            else:
                # Results belong to the calls before them by their order, as in chat templates.
                message = {k: v for k, v in entry.message.items() if k != "tool_call_id"}
                if message["role"] == "tool" and names and "name" not in message:
                    message["name"] = names.pop(0)
                if message["role"] == "assistant":  # of a prompt, which no turn generated
                    message["train"] = False
                    given.add(at)
            messages.append(message)
        return Told(tuple(messages), frozenset(given))

    def results(self, entries: Sequence[Entry]) -> list[Entry]:
        """The results of the last turn's calls, as messages."""
        calls = self.known[id(entries[-1])].tool_calls
        return [Entry({"role": "tool", "content": call.result or ""}) for call in calls]

    def read(self, entry: Entry) -> Message:
        """A generated turn as a message."""
        turn = self.known[id(entry)]
        if self._renderer is None or not turn.output_ids:
            return _without_tokens(turn)
        reading = self._renderer.read_turn(turn.output_text, "", self._tools)
        # A call that cannot be parsed is in the text, which stays whole.
        malformed = any(isinstance(call, MalformedCall) for call in reading.calls)
        content = turn.output_text if malformed else reading.content
        message: Message = {"role": "assistant", "content": content}
        if reading.thought and not malformed:
            message["reasoning_content"] = reading.thought
        calls = [] if malformed else [_call(c.name, c.arguments) for c in reading.calls]  # type: ignore[union-attr]
        return {**message, "tool_calls": calls} if calls else message


def _without_tokens(turn: DispatchedSamplingTask) -> Message:
    text, begin, end = turn.output_text, *THOUGHT
    thought = ""
    if text.startswith(begin) and end in text:
        thought, _, text = text.removeprefix(begin).partition(end)
    message: Message = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    calls = [_call(call.name, call.arguments) for call in turn.tool_calls if call.name]
    return {**message, "tool_calls": calls} if calls else message


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
