"""The model's own turns among the messages that a program sends back: recognised, they are exact.

Programs repeat the conversation with each request, in their own words: JSON in another order,
without surrounding space, without the thought. A message with the words of an answer stands for the
tokens that were sampled. Any other message of an assistant is the program's own, as an example in a
prompt is.

Messages are OpenAI's, with contents that are texts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.rollout.agents.llm import ChatReply
from agentrl.rollout.chat import Message
from agentrl.rollout.tool_calls import ParsedCall

_Words = tuple[str, tuple[tuple[str, str], ...]]  # the content; names and arguments of the calls
_NO_WORDS: _Words = ("", ())


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """An answer as the program got it.

    `before`: the messages that it answers, as the conversation has them. `shown`: its message, with
    calls that have ids.
    """

    before: Sequence[Message]
    shown: Message
    reply: ChatReply


@dataclass(frozen=True, slots=True)
class ReadMessages:
    """Messages as the conversation has them.

    `last`: the last answer among them; `results`: those of tools that follow it, as they were sent.
    """

    messages: list[Message]
    last: ShownAnswer | None
    results: list[Message]


class ShownAnswers:
    """The answers of one attempt, by the words with which a program may repeat them."""

    def __init__(self) -> None:
        self._answers: dict[_Words, list[ShownAnswer]] = {}

    def add(self, answer: ShownAnswer, *also: Message) -> None:
        """Remember an answer. `also`: other messages that stand for it."""
        for words in {_words(message) for message in (answer.shown, *also)}:
            self._answers.setdefault(words, []).append(answer)

    def read(self, messages: Sequence[Message]) -> ReadMessages:
        """Put the sampled turns in the place of the messages that repeat them.

        The results that follow one get the order of its calls, because chat templates match them by
        their order.
        """
        read: list[Message] = []
        last: ShownAnswer | None = None
        results: list[Message] = []
        following = False  # whether all since the last answer are results
        for message in messages:
            if following and message["role"] == "tool":
                results.append(message)
                continue
            if following:
                read += _in_order(last, results)
            answer = self._find(message, read)
            following = answer is not None
            if answer is None:
                read.append(message)
            else:
                last, results = answer, []
                read.append({**answer.reply.message})
        if following:
            read += _in_order(last, results)
        return ReadMessages(read, last, results)

    def _find(self, message: Message, before: Sequence[Message]) -> ShownAnswer | None:
        """The answer that a message after `before` repeats; None if it repeats none."""
        if message["role"] != "assistant":
            return None
        words = _words(message)
        found = self._answers.get(words, [])
        # Of several with the same words: that with these calls, or in this place, or the latest.
        ids = _ids(message)
        if ids and (called := [answer for answer in found if _ids(answer.shown) == ids]):
            return called[-1]
        here = [answer for answer in found if list(answer.before) == list(before)]
        if here:
            return here[-1]
        # Without words it may be anything that the program put there.
        return found[-1] if found and words != _NO_WORDS else None


def readable_calls(reply: ChatReply) -> tuple[ParsedCall, ...]:
    """The calls of a reply; () if one cannot be read, as its text then has to show them all."""
    made = tuple(call for call in reply.tool_calls if isinstance(call, ParsedCall))
    return made if len(made) == len(reply.tool_calls) else ()


def call_message(id: str, name: str, arguments: Any) -> Message:
    """A call as OpenAI's messages have it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def functions_of(message: Message) -> list[tuple[str, Any]]:
    """Name and arguments of a message's calls, however the JSON of these is written."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], _value(function["arguments"])) for function in calls]


def _value(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _words(message: Message) -> _Words:
    calls = (
        (name, json.dumps(value, sort_keys=True, default=str))
        for name, value in functions_of(message)
    )
    return message["content"].strip(), tuple(calls)


def _ids(message: Mapping[str, Any]) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls", ())]


def _in_order(answer: ShownAnswer | None, results: Sequence[Message]) -> list[Message]:
    """Results in the order of an answer's calls, without ids. Those of no call come last."""
    ids = _ids(answer.shown) if answer is not None else []

    def place(result: Message) -> int:
        id = result.get("tool_call_id")
        return ids.index(id) if id in ids else len(ids)

    return [{"role": "tool", "content": result["content"]} for result in sorted(results, key=place)]
