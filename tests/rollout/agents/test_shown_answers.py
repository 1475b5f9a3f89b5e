"""Answers are recognised in the messages that programs send back, each as the one that is meant."""

from typing import Any, cast

import pytest

from agentrl.rollout.agents.llm import ChatReply
from agentrl.rollout.agents.shown_answers import ShownAnswer, ShownAnswers, call_message
from agentrl.rollout.chat import Message

ASKED: Message = {"role": "user", "content": "Which?"}
OTHER: Message = {"role": "user", "content": "Or so?"}


def said(content: str, *calls: Message) -> Message:
    message: Message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(calls)} if calls else message


def result(id: str | None, content: str) -> Message:
    return {"role": "tool", "content": content, **({} if id is None else {"tool_call_id": id})}


class Reply:
    """A reply, as far as it matters here: the sampled text as a message."""

    def __init__(self, text: str) -> None:
        self.message = said(text)


def answers(*shown: tuple[list[Message], Message, str]) -> ShownAnswers:
    """Answers to messages, as they were shown, and their sampled texts."""
    known = ShownAnswers()
    for before, message, text in shown:
        known.add(ShownAnswer(before, message, cast(ChatReply, Reply(text))))
    return known


def sampled(known: ShownAnswers, *messages: Message) -> list[Any]:
    return [message["content"] for message in known.read(messages).messages]


def test_json_space_and_order_of_keys_do_not_matter() -> None:
    call = call_message("c1", "find", '{"item": "bolt", "n": 2}')
    known = answers(([ASKED], said("I look.", call), "<sampled>"))
    again = call_message("another", "find", {"n": 2, "item": "bolt"})
    assert sampled(known, ASKED, said("  I look.\n", again))[1] == "<sampled>"
    changed = call_message("c1", "find", {"n": 3, "item": "bolt"})
    assert sampled(known, ASKED, said("I look.", changed))[1] == "I look."


def test_of_answers_with_the_same_words_the_ids_or_the_place_tell_which_is_meant() -> None:
    first, second = (said("", call_message(id, "find", "{}")) for id in ("c1", "c2"))
    known = answers(([ASKED], first, "one"), ([ASKED], second, "two"))
    assert [sampled(known, ASKED, shown)[1] for shown in (first, second)] == ["one", "two"]
    known = answers(([ASKED], said("Yes."), "one"), ([OTHER], said("Yes."), "two"))
    assert sampled(known, ASKED, said("Yes."))[1] == "one"
    assert sampled(known, OTHER, said("Yes."))[1] == "two"
    assert sampled(known, ASKED, OTHER, said("Yes."))[2] == "two"  # elsewhere, the latest


def test_a_message_without_words_is_an_answer_in_its_place_only() -> None:
    known = answers(([ASKED], said(""), "<thought only>"))
    assert sampled(known, ASKED, said(""))[1] == "<thought only>"
    assert sampled(known, OTHER, said(""))[1] == ""


@pytest.mark.parametrize("ids", [("c1", "c2"), (None, None)])
def test_results_come_in_the_order_of_the_calls(ids: tuple[str | None, str | None]) -> None:
    calls = [call_message(id, "find", {"item": id}) for id in ("c1", "c2")]
    shown = said("", *calls)
    known = answers(([ASKED], shown, "<calls>"))
    results = [result(id, f"of {number}") for number, id in enumerate(ids, 1)]
    in_order = ["Which?", "<calls>", "of 1", "of 2"]
    assert sampled(known, ASKED, shown, *results) == in_order
    if ids[0] is not None:
        assert sampled(known, ASKED, shown, *reversed(results)) == in_order
    read = known.read([ASKED, shown, *results, OTHER])
    assert read.last is not None and read.results == results
    assert read.messages[-1] == OTHER


def test_results_of_other_calls_stay_as_they_are_sent() -> None:
    example = said("", call_message("x", "find", {"item": "bolt"}))
    messages = [ASKED, example, result("x", "B7"), OTHER]
    assert ShownAnswers().read(messages).messages == messages
