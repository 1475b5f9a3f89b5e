"""Recognises the model's own turns in the messages that a client sends.

Clients send the whole conversation again with each request, in their own words: JSON in another
order, without surrounding space, without the thought. A turn whose content and calls are those of
an answer is replaced by the sampled text, so that its tokens stay those that were sampled. Any
other message of an assistant is the client's own, as an example in a prompt is.
"""

import json
from collections.abc import Sequence
from typing import Any

from agentrl.gateway.exchange import ChatAnswer
from agentrl.rollout.chat import Message

_Said = tuple[str, tuple[tuple[str, str], ...]]  # content, and names and arguments of the calls


class History:
    """The answers of one session, by what clients repeat of them."""

    def __init__(self) -> None:
        self._by_words: dict[_Said, str] = {}
        self._by_call: dict[str, tuple[_Said, str]] = {}

    def add(self, answer: ChatAnswer, text: str) -> None:
        """Remember an answer. `text`: of the whole turn, as it was sampled."""
        calls = tuple((call.name, _canonical(call.arguments)) for call in answer.calls)
        said = (answer.content.strip(), calls)
        self._by_words[said] = text
        if answer.stopped_by is not None:  # which some clients put back
            self._by_words[((answer.content + answer.stopped_by).strip(), calls)] = text
        if answer.calls:  # of two answers with the same words, the ids tell which one is meant
            self._by_call[answer.calls[0].id] = (said, text)

    def translate(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the sampled texts of recognised turns.

        The results that follow a recognised turn get the order of its calls, because chat
        templates match them by their order.
        """
        translated: list[Message] = []
        order: dict[str, int] = {}  # of the calls of the last recognised turn, by id
        results: list[tuple[int, Message]] = []
        for message in messages:
            if message["role"] == "tool" and message.get("tool_call_id") in order:
                place = order[message["tool_call_id"]]
                results.append((place, {"role": "tool", "content": message["content"]}))
                continue
            translated += _sorted(results)
            results = []
            if message["role"] != "assistant":
                translated.append(message)
                continue
            text = self._sampled(message)
            if text is None:
                order = {}
                translated.append(message)
            else:
                calls = message.get("tool_calls", ())
                order = {call["id"]: place for place, call in enumerate(calls)}
                translated.append({"role": "assistant", "content": text})
        return translated + _sorted(results)

    def _sampled(self, message: Message) -> str | None:
        """The sampled text of a message that repeats an answer; None if it does not."""
        calls = message.get("tool_calls", ())
        said = (
            (message["content"] or "").strip(),
            tuple(
                (call["function"]["name"], _canonical(call["function"]["arguments"]))
                for call in calls
            ),
        )
        if calls:
            meant, text = self._by_call.get(calls[0]["id"], (None, ""))
            if meant == said:
                return text
        return self._by_words.get(said)


def _sorted(results: Sequence[tuple[int, Message]]) -> list[Message]:
    return [message for _, message in sorted(results, key=lambda result: result[0])]


def _canonical(arguments: Any) -> str:
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False)
