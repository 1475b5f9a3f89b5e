"""A demonstration as the turns of a Record, which have texts and calls and no tokens.

The reverse of `of_record.py`. Turns keep results in the order of their calls, so results that name
their calls by ids are put in that order, and what has no place in it is refused.
"""

from collections.abc import Sequence
from typing import Any, cast

from agentrl.databases.documents import ToolCall
from agentrl.rollout.chat import ChatRenderer, Message
from agentrl.rollout.demonstrations.call_ids import CallIds
from agentrl.rollout.demonstrations.layouts import Demonstration
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
    # The ids are given here, not made by a chat template.
    call_ids = CallIds(cast(ChatRenderer, None))
    turns: list[dict[str, Any]] = []
    added = [_kept(message) for message in messages[: starts[0]]]
    for at, following in zip(starts, [*starts[1:], len(messages)], strict=True):
        message = messages[at]
        calls = [ToolCall.model_validate(c["function"]) for c in message.get("tool_calls", ())]
        ids = [f"{at}.{number}" for number in range(len(calls))]
        call_ids.take(message, ids)
        answers = _in_order_of_calls(messages, range(at + 1, following), ids, call_ids)
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
        added = answers
    return turns


def _kept(message: Message) -> Message:
    """A message that no turn generated, without an id that names no call any more."""
    return {name: value for name, value in message.items() if name != "tool_call_id"}


def _text(at: int, message: Message) -> str:
    """What message `at` says, its thought first."""
    thought, text = message.get("reasoning_content", ""), message["content"]
    begin, end = THOUGHT
    if end in thought:
        raise ValueError(f"message {at + 1}: its thought has {end!r}, which ends it")
    # A content that begins like a thought stays content behind an empty thought.
    return f"{begin}{thought}{end}{text}" if thought or text.startswith(begin) else text


def _in_order_of_calls(
    messages: Sequence[Message], places: range, ids: Sequence[str], call_ids: CallIds
) -> list[Message]:
    """The messages behind a turn whose calls have these ids, with the results in their order."""
    found: dict[str, Message] = {}
    unasked: list[Message] = []
    for at in places:
        message = messages[at]
        if message["role"] != "tool":
            continue
        try:
            answered = call_ids.answered(message)
        except ValueError as error:
            raise ValueError(f"message {at + 1}: {error}") from None
        if answered is message:
            unasked.append(message)
            continue
        of_call = answered["tool_call_id"]
        if of_call not in ids:
            raise ValueError(f"message {at + 1}: it is the result of a call of an earlier turn")
        if of_call in found:
            raise ValueError(f"message {at + 1}: it is the second result of one call")
        found[of_call] = message
    if any(id not in found for id in ids[: len(found)]):
        raise ValueError(
            f"message {places.start}: a call without a result is before one with a result, and "
            "results are kept by their order"
        )
    results = iter([*(found[id] for id in ids if id in found), *unasked])
    return [
        _kept(next(results) if messages[at]["role"] == "tool" else messages[at]) for at in places
    ]
