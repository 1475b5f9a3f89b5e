"""What the turns of a Record keep of a demonstration, and how it comes back as messages."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from agentrl.databases.documents import DispatchedSamplingTask, ToolCall
from agentrl.rollout.demonstrations import Demonstration, read_demonstration
from agentrl.rollout.demonstrations.of_record import Told, conversations
from agentrl.rollout.demonstrations.to_record import turns_of

QUESTION = {"role": "user", "content": "R5 and K7?"}
ANSWER = {"role": "assistant", "content": "two"}


def called(*bins: str, ids: str = "") -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": "stock", "arguments": {"bin": bin}}}
        for bin in bins
    ]
    named = [{**call, "id": id} for call, id in zip(calls, ids, strict=False)] or calls
    return {"role": "assistant", "content": "", "tool_calls": named}


def result(content: str, of: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": content} | ({"tool_call_id": of} if of else {})


def read(*messages: dict[str, Any]) -> Demonstration:
    shown = read_demonstration({"messages": list(messages)})
    assert isinstance(shown, Demonstration)
    return shown


def told(turns: Sequence[dict[str, Any]]) -> Told:
    documents = [
        DispatchedSamplingTask(
            id=f"r-{number}", record_id="r", turn=number, segment=0, service="import",
            prompt_delta_ids=b"", prompt_len=0, output_ids=b"", output_logprobs=b"",
            finish_reason="stop", versions=[], generate_latency_s=0.0,
            created_at=datetime.now(UTC), **turn,
        )
        for number, turn in enumerate(turns)
    ]  # fmt: skip
    [one] = conversations(documents, None, ())
    return one


def test_a_call_is_stored_as_it_is_read() -> None:
    call = {"function": {"name": "stock", "parameters": {"bin": "R5"}}}
    [turn] = turns_of(read(QUESTION, {"role": "assistant", "tool_calls": [call]}))
    assert turn["tool_calls"] == [ToolCall(name="stock", arguments={"bin": "R5"})]


def test_results_are_those_of_the_calls_that_their_ids_name() -> None:
    swapped = [result("K7 has 2", "b"), result("R5 has 1", "a")]
    messages = [QUESTION, called("R5", "K7", ids="ab"), *swapped, ANSWER]
    first, _ = turns_of(read(*messages))
    assert [(call.arguments["bin"], call.result) for call in first["tool_calls"]] == [
        ("R5", "R5 has 1"), ("K7", "K7 has 2"),
    ]  # fmt: skip
    # Ids of one conversation may come again: each names the call before it.
    again = [*messages[:-1], called("A1", "A2", ids="ab"), result("y", "b"), result("x", "a")]
    said = told(turns_of(read(*again, ANSWER))).messages
    results = [message["content"] for message in said if message["role"] == "tool"]
    assert results == ["R5 has 1", "K7 has 2", "x", "y"]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([called("R5", "K7", ids="ab"), result("2", "b")],
         "message 2: the results behind it are not those of its first calls, one each"),
        ([called("R5", "K7", ids="ab"), result("1", "a"), result("2", "a")],
         "message 2: the results behind it are not those of its first calls, one each"),
        ([called("R5", ids="a"), called("K7", ids="b"), result("1", "a")],
         "message 3: the result of an earlier turn's call is behind it"),
        ([called("R5", ids="a"), result("1", "x")], "message 3: its `tool_call_id` 'x' is of no"),
        ([{"role": "assistant", "content": "a", "thinking": "so</think>"}],
         "message 2: its thought has '</think>', which ends it"),
    ],
)  # fmt: skip
def test_what_turns_cannot_keep_is_refused(messages: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(ValueError, match=r"^message \d: .*") as raised:
        turns_of(read(QUESTION, *messages, ANSWER))
    assert str(raised.value).startswith(why)


def test_a_conversation_ends_with_a_turn() -> None:
    with pytest.raises(ValueError, match="does not end with a message of the assistant"):
        turns_of(read(QUESTION, ANSWER, QUESTION))


def test_thoughts_and_what_looks_like_them_come_back_as_they_were() -> None:
    messages = [
        QUESTION,
        {"role": "assistant", "content": "<think>\nin it\n</think>\n\nyes"},
        QUESTION,
        {"role": "assistant", "content": "no", "reasoning_content": "\n<think> so"},
    ]
    assert list(told(turns_of(read(*messages))).messages) == messages


def test_a_turn_that_is_not_trained_is_context_and_not_a_failed_one() -> None:
    messages = [QUESTION, {**ANSWER, "train": False}, QUESTION, ANSWER]
    assert [turn["trained"] for turn in turns_of(read(*messages))] == [False, True]
    back = told(turns_of(read(*messages)))
    assert list(back.messages) == messages
    assert (back.n_prompt, back.n_given, back.given) == (1, 3, {1})


def test_what_the_assistant_says_in_a_prompt_is_context() -> None:
    asked = [QUESTION, ANSWER, QUESTION]
    back = told([{"messages": asked, "output_text": "2"}])
    assert back.messages[1] == {**ANSWER, "train": False}
    assert back.messages[3] == {"role": "assistant", "content": "2"}
    assert (back.n_prompt, back.n_given) == (1, 3)
