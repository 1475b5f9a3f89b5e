"""ms-swift's messages of single calls are trained as one turn, as its documentation has them."""

import json
from typing import Any

import pytest
from families import renderer_of

from agentrl.rollout.demonstrations import Demonstration, demonstrated_tree, read_demonstration
from agentrl.rollout.demonstrations.preferences import read_preference

QUESTION = {"role": "user", "content": "bins R5 and M1?"}
CALLS = [{"name": "stock", "arguments": {"bin": name}} for name in ("R5", "M1")]
SPOKEN = [{"role": "tool_call", "content": json.dumps(call)} for call in CALLS]
RESULTS = [{"role": "tool_response", "content": count} for count in ("46", "7")]
DONE = {"role": "assistant", "content": "53"}


def shown(*messages: dict[str, Any]) -> Demonstration:
    read = read_demonstration({"messages": [QUESTION, *messages]})
    assert isinstance(read, Demonstration)
    return read


@pytest.mark.parametrize("text", ["", "I count."])
def test_calls_that_follow_each_other_are_one_turn(text: str) -> None:
    said = [{"role": "assistant", "content": text}] if text else []
    theirs = shown(*said, *SPOKEN, *RESULTS, DONE)
    turn = {"role": "assistant", "content": text, "tool_calls": CALLS}
    results = [{**each, "role": "tool"} for each in RESULTS]
    assert theirs == shown(turn, *results, DONE)
    assert demonstrated_tree(renderer_of("qwen3"), theirs).parents == (-1,)


def test_a_call_behind_a_result_is_a_turn_of_its_own() -> None:
    theirs = shown(SPOKEN[0], RESULTS[0], SPOKEN[1], RESULTS[1], DONE)
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in theirs.messages] == roles


@pytest.mark.parametrize("mark", ["loss", "train"])
def test_a_turn_without_loss_is_context(mark: str) -> None:
    silent = [{**each, mark: False} for each in SPOKEN]
    assert shown(*silent, *RESULTS, DONE).trained == (False, False, False, False, True)
    with pytest.raises(ValueError, match=r"^message 3: is marked to be trained otherwise"):
        shown(SPOKEN[0], silent[1], *RESULTS, DONE)


def test_answers_of_a_pair_may_have_them() -> None:
    chosen, rejected = read_preference({"prompt": [QUESTION], "chosen": SPOKEN, "rejected": [DONE]})
    assert isinstance(chosen, Demonstration) and isinstance(rejected, Demonstration)
    assert len(chosen.messages[1]["tool_calls"]) == 2


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({**SPOKEN[0], "reasoning_content": "hm"}, "is a call of a turn, and has `reasoning_co"),
        ({"role": "tool_call", "content": "stock(R5)"}, "its content is no JSON of a call"),
        ({"role": "tool_call", "content": "[1]"}, "a tool call has no name of a function"),
        ({"role": "tool_call"}, "says nothing"),
        ({**SPOKEN[0], "tool_calls": CALLS}, "is a call of a turn, and has `tool_calls`"),
    ],
)
def test_what_is_no_call_is_named(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^message 2: {reason}"):
        shown(message, DONE)
