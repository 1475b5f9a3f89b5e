"""Advantages and rules on numbers computed by hand, and what holds for every group."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.configs import RewardConfig
from agentrl.databases.documents import Record, Split, StopReason, TurnStatus
from agentrl.rollout.groups.group_rules import apply_group_rules, ranked_by_turns, turn_advantages


def record(rollout: int, score: float, turns: int = 3, **values: Any) -> Record:
    return Record(
        _id=f"a-t{rollout}-a0", task="a", task_id="a", rollout=rollout, attempt=0,
            split=Split.TRAIN,
        epoch=0, owner="test", query="?", score=score, n_turns=turns, **values,
    )  # fmt: skip


def group(*scores: float, turns: Sequence[int] = ()) -> list[Record]:
    return [
        record(rollout, score, turns[rollout] if turns else 3)
        for rollout, score in enumerate(scores)
    ]


def left_out(records: Sequence[Record], task: str = "a", **flags: Any) -> list[str | None]:
    """Which rule left each Record out. Records without contrast stay, unless a test asks."""
    config = RewardConfig(**{"drop_zero_advantage": False, **flags})
    return [reward.left_out for reward in apply_group_rules(task, records, config)]


def test_efficiency_of_three_right_records_by_hand() -> None:
    # ranks by turns: 2 -> 0, 5 and 5 share (1 + 2) / 2; the middle rank is 1
    # 0.2 * (1 - 0) / 2 = 0.1 and 0.2 * (1 - 1.5) / 2 = -0.05; the wrong one is not ranked
    added = ranked_by_turns([5, 2, 1, 5], [0, 1, 3])
    assert added == pytest.approx([-0.05, 0.1, 0.0, -0.05])
    assert ranked_by_turns([2, 9], [0]) == [0.0, 0.0]  # nothing to compare with
    assert ranked_by_turns([4, 4], [0, 1]) == [0.0, 0.0]


def test_the_bonus_moves_a_group_that_is_all_right_by_a_tenth_and_no_standard_deviation() -> None:
    records = group(1.0, 1.0, turns=[2, 4])
    rewards = apply_group_rules("a", records, RewardConfig(efficiency_bonus=True))
    assert [reward.advantage for reward in rewards] == pytest.approx([0.1, -0.1])
    assert [reward.left_out for reward in rewards] == [None, None]


def test_a_group_without_contrast_trains_nothing_unless_asked() -> None:
    records = group(1.0, 1.0)
    assert left_out(records, drop_zero_advantage=True) == ["drop_zero_advantage"] * 2
    assert left_out(records) == [None, None]


def test_filters_come_after_scaling() -> None:
    config = RewardConfig(advantage="mean", adv_scaling=2.0, minimal_advantage=0.5)
    rewards = apply_group_rules("a", group(1.0, 0.0), config)
    assert [(r.advantage, r.left_out) for r in rewards] == [
        (1.0, None),
        (-1.0, "minimal_advantage"),
    ]


def test_right_records_that_took_no_more_than_min_turns_are_left_out_as_shortcuts() -> None:
    records = group(1.0, 1.0, 0.0, turns=[2, 3, 1])
    assert left_out(records, min_turns=2) == ["min_turns", None, None]


def test_of_records_that_ended_at_a_limit_so_many_stay_as_are_reserved() -> None:
    records = [
        record(0, 0.0, stop_reason=StopReason.MAX_TURNS),
        record(1, 0.0, stop_reason=StopReason.MAX_PROMPT_TOKENS),
        record(2, 0.0, stop_reason=StopReason.MAX_TOKENS),
        record(3, 0.0, stop_reason=StopReason.ANSWERED),
        record(4, 1.0, stop_reason=StopReason.REPETITION),
    ]
    for count in range(4):
        out = left_out(records, reserve_context_error_count=count)
        assert out[:3].count(None) == count
        assert out[3:] == [None, None]
    assert left_out(records) == [None] * 5


def test_a_group_balanced_equally_has_as_many_right_records_as_wrong_ones() -> None:
    out = left_out(group(1.0, 0.0, 0.0, 1.0, 0.0, 0.0), balance_equally=True)
    assert (out[0], out[3]) == (None, None)
    assert [out[i] for i in (1, 2, 4, 5)].count(None) == 2


def test_where_all_are_right_or_all_wrong_there_is_nothing_to_balance() -> None:
    assert left_out(group(0.6, 0.9, 1.0), balance_equally=True) == [None] * 3


def test_rules_follow_each_other_and_the_first_that_leaves_a_record_out_is_named() -> None:
    # The shortcut is left out first, so that one right record remains to be balanced with.
    records = group(1.0, 1.0, 0.0, 0.0, turns=[1, 4, 4, 4])
    out = left_out(records, min_turns=1, balance_equally=True, minimal_advantage=0.1)
    assert out[:2] == ["min_turns", None]
    assert sorted(map(str, out[2:])) == ["balance_equally", "minimal_advantage"]


def test_which_records_are_drawn_depends_on_the_task() -> None:
    records = group(1.0, *[0.0] * 7)
    drawn = {tuple(left_out(records, task=f"task-{n}", balance_equally=True)) for n in range(50)}
    assert len(drawn) == 7  # each of the wrong ones, in some task


def test_only_completed_turns_are_reinforced_and_all_are_discouraged() -> None:
    statuses = [
        TurnStatus.COMPLETED, TurnStatus.FORMAT_ERROR, TurnStatus.TOOL_FAILED,
        TurnStatus.REPEAT_ERROR, TurnStatus.TRUNCATED, TurnStatus.COMPLETED,
    ]  # fmt: skip
    assert turn_advantages(0.5, statuses) == [0.5, 0.0, 0.0, 0.0, 0.0, 0.5]
    assert turn_advantages(-0.5, statuses) == [-0.5] * 6


def test_a_good_record_of_failed_turns_only_has_no_gradient_and_is_left_out() -> None:
    failed = {TurnStatus.FORMAT_ERROR: 2}
    mixed = {TurnStatus.FORMAT_ERROR: 1, TurnStatus.COMPLETED: 1}
    records = [
        record(0, 1.0, turn_statuses=failed),
        record(1, 1.0, turn_statuses=mixed),
        record(2, 0.0, turn_statuses=failed),
    ]
    out = left_out(records, drop_zero_advantage=True)
    assert out == ["drop_zero_advantage", None, None]


def test_a_group_whose_attempts_all_failed_has_no_rewards() -> None:
    assert apply_group_rules("a", [], RewardConfig()) == []


scores = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-10, 10))
groups = st.lists(
    st.tuples(scores, st.integers(1, 9), st.sampled_from(StopReason)), min_size=1, max_size=12
).map(lambda drawn: [record(i, s, n, stop_reason=r) for i, (s, n, r) in enumerate(drawn)])
configs = st.builds(
    RewardConfig,
    advantage=st.sampled_from(["mean_std", "mean", "leave_one_out"]),
    adv_scaling=st.floats(0.1, 4),
    drop_zero_advantage=st.booleans(),
    min_score_spread=st.sampled_from([0.0, 0.1]),
    minimal_advantage=st.none() | st.floats(-1, 1),
    balance_sample=st.booleans(),
    balance_equally=st.booleans(),
    efficient_rewarding=st.booleans(),
    efficiency_bonus=st.booleans(),
    min_turns=st.integers(0, 4),
    reserve_context_error_count=st.none() | st.integers(0, 4),
)


@given(groups, configs)
def test_the_advantages_of_every_group_sum_to_zero(
    records: list[Record], config: RewardConfig
) -> None:
    rewards = apply_group_rules("a", records, config)
    assert sum(reward.advantage for reward in rewards) == pytest.approx(0.0, abs=1e-5)


@given(st.lists(st.tuples(scores, st.integers(1, 9)), min_size=1, max_size=12))
def test_efficiency_sums_to_zero_favours_fewer_turns_and_stays_within_its_spread(
    drawn: list[tuple[float, int]],
) -> None:
    members = [place for place, (score, _) in enumerate(drawn) if score >= 0.5]
    added = ranked_by_turns([turns for _, turns in drawn], members)
    assert sum(added) == pytest.approx(0.0, abs=1e-9)
    assert max(map(abs, added)) <= 0.1 + 1e-9
    right = [(turns, b) for (score, turns), b in zip(drawn, added, strict=True) if score >= 0.5]
    for turns, b in right:
        assert all(b > other for more, other in right if more > turns)


@given(groups, configs, st.randoms(use_true_random=False))
def test_rewards_do_not_depend_on_the_order_of_records(
    records: list[Record], config: RewardConfig, rng: random.Random
) -> None:
    shuffled = rng.sample(records, len(records))
    first = dict(zip([r.id for r in records], apply_group_rules("a", records, config), strict=True))
    again = dict(
        zip([r.id for r in shuffled], apply_group_rules("a", shuffled, config), strict=True)
    )
    # A sum in another order may round otherwise, so what hangs on the last bit is not compared.
    for name, reward in first.items():
        assert again[name].advantage == pytest.approx(reward.advantage, abs=1e-6)
    if config.minimal_advantage is None and not config.drop_zero_advantage:
        assert [again[name].left_out for name in first] == [r.left_out for r in first.values()]


@given(groups, configs)
def test_the_same_group_always_has_the_same_rewards(
    records: list[Record], config: RewardConfig
) -> None:
    assert apply_group_rules("a", records, config) == apply_group_rules("a", records, config)


def test_agents_with_rewards_of_their_own_are_compared_with_themselves() -> None:
    records = [
        record(0, 1.0, agent_rewards={"planner": 1.0, "critic": 0.0}),
        record(1, 1.0, agent_rewards={"planner": 0.0}),
        record(2, 1.0, agent_rewards={"critic": 4.0}),
        record(3, 1.0),
    ]
    config = RewardConfig(advantage="mean", adv_scaling=2.0)
    outcomes = apply_group_rules("a", records, config)
    assert [outcome.agent_advantages for outcome in outcomes] == [
        {"planner": 1.0, "critic": -4.0}, {"planner": -1.0}, {"critic": 4.0}, {},
    ]  # fmt: skip
    assert [outcome.advantage for outcome in outcomes] == [0.0] * 4
    # A Record without contrast in its score is trained by its agents' rewards.
    assert [outcome.left_out for outcome in outcomes] == [None, None, None, "drop_zero_advantage"]
    least = apply_group_rules("a", records, RewardConfig(advantage="mean", minimal_advantage=1.0))
    assert [outcome.left_out is None for outcome in least] == [False, False, True, False]
