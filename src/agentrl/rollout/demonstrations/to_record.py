"""A demonstration as the turns of a Record, which have texts and calls and no tokens.

The reverse of `of_record.py`. Turns keep results in the order of their calls, so results that name
their calls by ids are put in that order, and what has no place in it is refused.
"""

from collections.abc import Sequence
from typing import Any

from agentrl.databases.documents import ToolCall
from agentrl.rollout.chat import Message
from agentrl.rollout.demonstrations.call_ids import CallResults
from agentrl.rollout.demonstrations.layouts import Demonstration
from agentrl.rollout.demonstrations.messages import naming
from agentrl.rollout.demonstrations.of_record import THOUGHT


def turns_of(shown: Demonstration) -> list[dict[str, Any]]:
    """The turns of a conversation, as fields of `DispatchedSamplingTask`.

    Raises ValueError, with one sentence that continues after the row's place, for what turns cannot
    keep: messages behind the last turn, and results that do not answer its calls one by one.
    """
    messages = shown.messages
    starts = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not starts or starts[-1] != len(messages) - 1:
        raise ValueError("does not end with a message of the assistant")
    results_of = CallResults(have_ids=True)
    turns: list[dict[str, Any]] = []
    added = [_kept(message) for message in messages[: starts[0]]]
    for at, following in zip(starts, [*starts[1:], len(messages)], strict=True):
        message = messages[at]
        calls = [ToolCall.model_validate(c["function"]) for c in message.get("tool_calls", ())]
        ids = [f"{at}.{number}" for number in range(len(calls))]
        results_of.take(message, ids)
        answers = results_of.answered(messages[at + 1 : following], first=at + 2)
        with naming(at + 1):
            _refuse_other_order(messages, answers, ids)
        results = [one["content"] for one in answers if one["role"] == "tool"]
        turns.append(
            {
                "messages": added,
                "output_text": _text(at, message),
                "tool_calls": [
                    call.model_copy(update={"result": result})
                    for call, result in zip(calls, results, strict=False)
                ]
                + calls[len(results) :],
                "trained": shown.trained[at],
            }
        )
        added = [_kept(one) for one in answers]
    return turns


def _kept(message: Message) -> Message:
    """A message that no turn generated, without an id: stored calls have none."""
    return {name: value for name, value in message.items() if name != "tool_call_id"}


def _text(at: int, message: Message) -> str:
    """What message `at` says, its thought first."""
    thought, text = message.get("reasoning_content", ""), message["content"]
    begin, end = THOUGHT
    if end in thought:
        raise ValueError(f"message {at + 1}: its thought has {end!r}, which ends it")
    # A content that begins like a thought stays content behind an empty thought.
    return f"{begin}{thought}{end}{text}" if thought or text.startswith(begin) else text


def _refuse_other_order(
    given: Sequence[Message], answers: Sequence[Message], ids: Sequence[str]
) -> None:
    """Raise ValueError unless results in `answers` are of the first of the calls, one each.

    `given`: all messages. Results that answer no call are theirs, and not changed.
    """
    of_calls = [
        one["tool_call_id"]
        for one in answers
        if one["role"] == "tool" and not any(one is message for message in given)
    ]
    if any(id not in ids for id in of_calls):
        raise ValueError("the result of an earlier turn's call is behind it")
    if of_calls != list(ids[: len(of_calls)]):
        raise ValueError(
            "the results behind it are not those of its first calls, one each, and a run keeps "
            "results by that order"
        )
