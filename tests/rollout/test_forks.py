"""Forks as values: where a rollout is forked, what its turns are worth, what of it is trained."""

import random
from datetime import UTC, datetime
from typing import Any

import pytest
from stored_turn import make_turn

from agentrl.configs import ConfigError, RewardConfig, parse_config
from agentrl.databases.arrays import pack_floats, pack_ints
from agentrl.databases.documents import (
    DispatchedSamplingTask,
    Fork,
    Record,
    Split,
    Stretch,
    ToolCall,
    TurnStatus,
)
from agentrl.databases.records import turn_id
from agentrl.databases.token_tree import TokenTree
from agentrl.launcher.run_rows import demonstrations
from agentrl.policy_version import VersionSpan
from agentrl.rollout.agents.recorded import ForkedAnswers, recorded_turns
from agentrl.rollout.groups.fork_choice import fork_turns
from agentrl.rollout.groups.fork_values import fork_advantages
from agentrl.rollout.groups.group_rules import apply_group_rules
from agentrl.rollout.groups.row_building import NothingToTrain, build_row


def record(name: str, score: float, parent: str | None = None, turn: int = 0) -> Record:
    return Record(
        _id=name, task="a", task_id="a", rollout=0, attempt=0, split=Split.TRAIN, epoch=0,
        owner="test", query="?", score=score, n_turns=5, turns=["x"],
        fork=None if parent is None else Fork(record=parent, turn=turn),
    )  # fmt: skip


# Rollout p, right, with two forks at turn 1 and one at turn 3; rollout q, wrong, without.
GROUP = [
    record("p", 1.0),
    record("q", 0.0),
    record("f", 0.0, "p", 1),
    record("g", 1.0, "p", 1),
    record("h", 0.0, "p", 3),
]


def advantages(estimator: str) -> dict[str, dict[int, float]]:
    """By Record and first turn of a stretch."""
    found = fork_advantages(GROUP, estimator)
    return {
        each.id: {stretch.turn: pytest.approx(stretch.advantage) for stretch in stretches}
        for each, stretches in zip(GROUP, found, strict=True)
    }


def test_advantages_by_hand() -> None:
    # Before turn 3: p goes on to 1, h to 0, so V = 1/2.
    # Before turn 1: p goes on to that 1/2, f to 0, g to 1, so V = 1/2.
    # The prompt: p goes on to that 1/2, q to 0, so V = 1/4.
    assert advantages("mean") == {
        "p": {0: 0.25, 1: 0.0, 3: 0.5}, "q": {0: -0.25}, "f": {1: -0.5}, "g": {1: 0.5},
        "h": {3: -0.5},
    }  # fmt: skip
    # times B / (B - 1): 2 at the prompt, 3/2 at turn 1, 2 at turn 3
    assert advantages("leave_one_out") == {
        "p": {0: 0.5, 1: 0.0, 3: 1.0}, "q": {0: -0.5}, "f": {1: -0.75}, "g": {1: 0.75},
        "h": {3: -1.0},
    }  # fmt: skip
    # the scores 1 0 0 1 0 have the mean 0.4 and squares of 1.2 in all, so std = sqrt(0.3)
    scale = 0.3**0.5 + 1e-4
    assert advantages("mean_std")["p"] == {0: 0.25 / scale, 1: 0.0, 3: 0.5 / scale}


def test_along_a_rollout_the_advantages_sum_to_its_score_less_the_value_of_the_prompt() -> None:
    draw = random.Random(0)
    for _ in range(50):
        group = [record(f"r{number}", draw.random()) for number in range(3)]
        for parent in group[:2]:
            for turn in draw.sample(range(1, 5), 2):
                group += [
                    record(f"{parent.id}-{turn}-{n}", draw.random(), parent.id, turn)
                    for n in range(draw.randint(1, 3))
                ]
        found = fork_advantages(group, "mean")
        prompt = [
            score - sum(stretch.advantage for stretch in stretches)
            for (score, stretches) in zip([r.score or 0.0 for r in group[:3]], found, strict=False)
        ]
        assert prompt == pytest.approx([prompt[0]] * 3)
        # and siblings are compared with each other only
        assert sum(found[index][0].advantage for index in range(3)) == pytest.approx(0.0)


def test_forks_of_a_rollout_that_cannot_be_trained_are_compared_with_each_other() -> None:
    orphans = [record("q", 0.0), record("f", 0.0, "p", 1), record("g", 1.0, "p", 1)]
    found = fork_advantages(orphans, "mean")
    assert [[s.model_dump() for s in stretches] for stretches in found] == [
        [{"turn": 0, "advantage": 0.0}], [{"turn": 1, "advantage": -0.5}],
        [{"turn": 1, "advantage": 0.5}],
    ]  # fmt: skip


@pytest.mark.parametrize("estimator", ["opo", "score", "leave_one_out_clipped"])
def test_a_group_with_forks_has_no_advantages_by_another_estimator(estimator: str) -> None:
    with pytest.raises(ConfigError, match=f"--advantage {estimator}: rollouts of this run are"):
        apply_group_rules("a", GROUP, RewardConfig(advantage=estimator))


def test_the_group_rules_give_stretches_scaled_and_keep_what_has_any_gradient() -> None:
    config = RewardConfig(advantage="mean", adv_scaling=2.0)
    outcomes = dict(zip("pqfgh", apply_group_rules("a", GROUP, config), strict=True))
    assert outcomes["p"].stretches == (
        Stretch(turn=0, advantage=0.5), Stretch(turn=1, advantage=0.0),
        Stretch(turn=3, advantage=1.0),
    )  # fmt: skip
    assert (outcomes["p"].advantage, outcomes["f"].advantage) == (1.0, -1.0)
    assert all(outcome.left_out is None for outcome in outcomes.values())
    alike = [record("p", 1.0), record("q", 1.0), record("f", 1.0, "p", 1)]
    left = [outcome.left_out for outcome in apply_group_rules("a", alike, config)]
    assert left == ["drop_zero_advantage"] * 3


def test_a_minimal_advantage_is_reached_by_any_stretch_of_a_rollout() -> None:
    # p has 0.25 up to turn 1, and -0.5 after: the greatest in size is below the least.
    group = [record("p", 0.0), record("q", 0.0), record("f", 1.0, "p", 1)]
    config = RewardConfig(advantage="mean", minimal_advantage=0.2)
    outcomes = apply_group_rules("a", group, config)
    assert [stretch.advantage for stretch in outcomes[0].stretches] == [0.25, -0.5]
    assert outcomes[0].advantage == -0.5
    assert [outcome.left_out for outcome in outcomes] == [None, "minimal_advantage", None]


def turns_of(*logprobs: float, failed: int | None = None) -> list[DispatchedSamplingTask]:
    """Turns of two tokens with these logprobs; a call of turn `failed` fails."""
    first = make_turn("r")
    turns = []
    for number, logprob in enumerate(logprobs):
        call = ToolCall(name="find", arguments={}, result="?", is_error=number == failed)
        turns.append(
            first.model_copy(
                update={
                    "id": f"r-{number}", "turn": number, "tool_calls": [call],
                    "output_logprobs": pack_floats([logprob, logprob]),
                }
            )
        )  # fmt: skip
    return turns


def test_where_a_rollout_is_forked() -> None:
    turns = turns_of(-9.0, -0.5, -2.0, -0.1, -1.0, failed=2)
    assert fork_turns(turns, "entropy", 2) == [2, 4]
    assert fork_turns(turns, "every", 9) == [1, 2, 3, 4]
    assert fork_turns(turns, "every", 2) == [1, 3]
    assert fork_turns(turns, "after_tool_error", 9) == [3]
    assert fork_turns(turns_of(-1.0, failed=0), "after_tool_error", 9) == []
    turns[2].trained = turns[4].trained = False  # as of another agent of a program
    assert fork_turns(turns, "entropy", 2) == fork_turns(turns, "every", 2) == [1, 3]
    for at in ("entropy", "every"):
        assert fork_turns(turns_of(-1.0), at, 3) == []  # the first turn is no fork


def line(n_turns: int) -> list[DispatchedSamplingTask]:
    """A conversation in one segment: prompt 1 2, then turns [10 11] [20 21] … with [5] between."""
    turns, length = [], 0
    for number in range(n_turns):
        delta = [1, 2] if number == 0 else [5]
        ids = [10 * (number + 1), 10 * (number + 1) + 1]
        turns.append(
            DispatchedSamplingTask(
                _id=f"r-{number}", record_id="r", turn=number, segment=0, service="s",
                messages=[], prompt_delta_ids=pack_ints(delta), prompt_len=length + len(delta),
                output_ids=pack_ints(ids), output_logprobs=pack_floats([-1.0, -1.0]),
                output_text="", finish_reason="stop",
                versions=[VersionSpan(version=number, start=0, end=2)],
                generate_latency_s=0.0, created_at=datetime.now(UTC),
            )
        )  # fmt: skip
        length += len(delta) + len(ids)
    return turns


def test_a_fork_s_row_trains_its_own_turns_and_a_forked_rollout_s_by_stretches() -> None:
    forked = record("p", 1.0).model_copy(
        update={
            "stretches": [Stretch(turn=0, advantage=0.25), Stretch(turn=2, advantage=-0.5)]
        }
    )  # fmt: skip
    row = build_row(forked, line(3), 0.5, 1.0, 0)
    assert row.tree["mask"].tolist() == [0, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert row.tree["advantages"][row.tree["mask"] == 1].tolist() == [0.25] * 4 + [-0.5] * 2
    # The row says which turns have failed, whatever their stretch.
    failed = [t.model_copy(update={"status": TurnStatus.TOOL_FAILED}) for t in line(3)[1:]]
    row = build_row(forked, [line(1)[0], *failed], 0.5, 1.0, 0)
    assert row.tree["capped"][row.tree["mask"] == 1].tolist() == [0, 0, 1, 1, 1, 1]
    fork = record("f", 0.0, "p", 2).model_copy(
        update={"stretches": [Stretch(turn=2, advantage=-0.5)]}
    )
    shared = [turn.model_copy(update={"replayed": turn_id("p", turn.turn)}) for turn in line(2)]
    turns = [*shared, line(3)[2]]
    row = build_row(fork, turns, -0.5, 1.0, 0)
    assert row.tree["mask"].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    # Only its own tokens make it old.
    assert (row.policy_versions, row.n_train_tokens) == ([2], 2)
    assert row.tree["advantages"][-2:].tolist() == [-0.5, -0.5]
    with pytest.raises(NothingToTrain, match="within 7 tokens"):
        build_row(fork, turns, -0.5, 1.0, 0, longest=7)
    # Its own turn came before the second of the shared ones, as with several conversations at once;
    # it was made by an earlier attempt at the fork.
    own = {"replayed": turn_id("f-a0", 1)}
    turns = [shared[0], line(2)[1].model_copy(update=own), line(3)[2].model_copy(
        update={"replayed": turn_id("p", 1)})]  # fmt: skip
    row = build_row(fork, turns, -0.5, 1.0, 0)
    assert row.tree["mask"].tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert row.tree["advantages"][5:7].tolist() == [-0.5, -0.5]


def test_a_later_attempt_at_a_fork_tells_the_shared_turns_from_its_own() -> None:
    params = {"max_tokens": 4}
    rollout = [turn.model_copy(update={"id": turn_id("p", turn.turn), "record_id": "p",
                                       "params": params}) for turn in line(3)]  # fmt: skip
    earlier = [turn.model_copy(update={"id": turn_id("f-a0", turn.turn), "record_id": "f-a0"})
               for turn in rollout]  # fmt: skip
    answers = ForkedAnswers(recorded_turns(rollout), 1, [recorded_turns(earlier)])
    asked = recorded_turns(rollout)
    # Its own turn is asked for first, by a conversation beside that of the shared one.
    taken = [answers.take(asked[number].prompt, params) for number in (2, 0, 1)]
    assert [turn and turn.stored.id for turn in taken] == ["f-a0-2", "p-0", "f-a0-1"]
    answers = ForkedAnswers(recorded_turns(rollout), 1, [recorded_turns(earlier)])
    answers.take(asked[1].prompt, params)
    assert not answers.reached


def test_a_row_is_left_out_if_all_of_its_trained_turns_have_the_advantage_0() -> None:
    group = [record("p", 0.0), record("q", 0.0), record("f", 1.0, "p", 1)]
    outcome = apply_group_rules("a", group, RewardConfig(advantage="mean"))[2]
    assert (outcome.advantage, outcome.left_out) == (0.5, None)
    shared = line(1)[0].model_copy(update={"replayed": turn_id("p", 0)})
    own = [turn.model_copy(update={"status": TurnStatus.TOOL_FAILED}) for turn in line(3)[1:]]
    # The only turn that is not failed is trained in another row.
    with pytest.raises(NothingToTrain, match="of record f is 0") as nothing:
        build_row(group[2], [shared, *own], 0.5, 1.0, 0, drops_zero=True)
    assert nothing.value.reason == "drop_zero_advantage"
    assert build_row(group[2], [shared, *own], 0.5, 1.0, 0).n_train_tokens == 4
    row = build_row(group[2], [shared, own[0], line(3)[2]], 0.5, 1.0, 0, drops_zero=True)
    assert row.tree["advantages"][row.tree["mask"] == 1].tolist() == [0.0] * 2 + [0.5] * 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--fork_turns", "1", "--advantage", "opo"), "--advantage mean_std, mean or leave_one"),
        (("--fork_turns", "1", "--efficient_rewarding", "true"), "--efficient_rewarding true"),
        (("--forks", "3"), "--forks 3: has no effect without --fork_turns"),
    ],
)
def test_flags_that_forks_do_not_go_with_are_refused(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(list(flags))


def test_a_group_counts_with_its_forks_where_samplers_run_ahead() -> None:
    flags: list[Any] = ["--num_generations", "4", "--fork_turns", "2", "--forks", "3"]
    assert parse_config(flags).group_size == 28


@pytest.mark.parametrize("first", ["rollout", "fork"])
def test_demonstrations_of_a_rollout_and_its_forks_have_what_they_share_once(first: str) -> None:
    forked = line(3)
    forks = [
        [
            turn.model_copy(
                update={"id": turn_id(name, turn.turn)}
                | ({"replayed": forked[turn.turn].id} if turn.turn < 2 else {})
            )
            for turn in line(3)
        ]
        for name in ("f", "g")
    ]
    chosen = [("r", forked), ("f", forks[0])] if first == "rollout" else [
        ("f", forks[0]), ("g", forks[1])
    ]  # fmt: skip
    trees = [row.made for row in demonstrations(chosen, 100)]
    assert all(isinstance(tree, TokenTree) for tree in trees)
    assert [tree["mask"].tolist() for tree in trees if isinstance(tree, TokenTree)] == [
        [0, 0, 1, 1, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
    ]  # fmt: skip
