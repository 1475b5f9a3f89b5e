"""Where finished rollouts are forked, and what of them is replayed."""

import pytest
from stored_turn import make_turn

from agentrl.databases.documents import DispatchedSamplingTask, ToolCall
from agentrl.rollout.agents.recorded import recorded_turns
from agentrl.rollout.groups.fork_choice import fork_turns


def turns_of(untrained: set[int], of_other_models: set[int]) -> list[DispatchedSamplingTask]:
    """Six turns in one segment; a tool failed in each."""
    turns = []
    before = b""
    for number in range(6):
        turn = make_turn("r").model_copy(update={
            "id": f"r-{number}", "turn": number, "trained": number not in untrained,
            "tool_calls": [ToolCall(name="find", arguments={}, is_error=True)],
        })  # fmt: skip
        if number in of_other_models:
            none = {"output_ids": b"", "prompt_delta_ids": b"", "segment": -1, "trained": False}
            turn = turn.model_copy(update=none)
        else:
            length = 3 + 5 * len(before)
            turn = turn.model_copy(update={"prompt_len": length})
            before += b"."
        turns.append(turn)
    return turns


@pytest.mark.parametrize("at", ["entropy", "every", "after_tool_error"])
def test_no_fork_begins_at_a_turn_that_is_not_trained_or_of_another_model(at: str) -> None:
    assert fork_turns(turns_of(set(), set()), at, 9) == [1, 2, 3, 4, 5]
    assert fork_turns(turns_of({2}, {4}), at, 9) == [1, 3, 5]
    assert fork_turns(turns_of({2}, {4}), at, 1) == [1]
    assert fork_turns(turns_of(set(), {0}), at, 9) == [1, 2, 3, 4, 5]


def test_turns_of_other_models_are_among_the_recorded_answers_without_a_prompt() -> None:
    recorded = recorded_turns(turns_of(set(), {1, 3}))
    assert [turn.number for turn in recorded] == [0, 1, 2, 3, 4, 5]
    assert [len(turn.prompt) for turn in recorded] == [3, 0, 8, 0, 13, 18]
    assert [turn.generation is None for turn in recorded] == [n in (1, 3) for n in range(6)]
