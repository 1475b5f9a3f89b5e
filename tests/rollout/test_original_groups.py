"""What of a group is trained by the flags of the original AgentRL, on numbers computed by hand."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from agentrl.configs import RewardConfig
from agentrl.databases.diagnosis import GroupEnd, barren_groups
from agentrl.databases.documents import Record, Split, StopReason, TurnStatus
from agentrl.rollout.groups.group_rules import apply_group_rules, moved_by_turns, turn_advantages


def group(scores: Sequence[float], turns: Sequence[int] = (), **values: Any) -> list[Record]:
    return [
        Record(
            _id=f"a-t{rollout}-a0", task="a", task_id="a", rollout=rollout, attempt=0,
            split=Split.TRAIN, epoch=0, owner="test", query="?", score=score,
            n_turns=turns[rollout] if turns else 3, **values,
        )
        for rollout, score in enumerate(scores)
    ]  # fmt: skip


def left_out(records: Sequence[Record], task: str = "a", **flags: Any) -> list[str | None]:
    config = RewardConfig(**{"drop_zero_advantage": False, **flags})
    return [reward.left_out for reward in apply_group_rules(task, records, config)]


def advantages(records: Sequence[Record], **flags: Any) -> list[float]:
    config = RewardConfig(advantage="leave_one_out_clipped", **flags)
    return [reward.advantage for reward in apply_group_rules("a", records, config)]


def test_an_advantage_is_the_score_less_the_mean_of_the_others() -> None:
    # 1 - (1 + 0 + 0) / 3 and 0 - (1 + 1 + 0) / 3; times 2
    assert advantages(group([1.0, 1.0, 0.0, 0.0])) == pytest.approx([2 / 3, 2 / 3, -2 / 3, -2 / 3])
    doubled = advantages(group([1.0, 1.0, 0.0, 0.0]), adv_scaling=2.0)
    assert doubled == pytest.approx([4 / 3, 4 / 3, -4 / 3, -4 / 3])


def test_a_wrong_record_is_never_reinforced_and_a_right_one_never_discouraged() -> None:
    # 0.5 - 0.2 = 0.3 is above 0, but 0.5 is wrong; 0.6 - 0.8 = -0.2 is below, but 0.6 is right
    assert advantages(group([0.5, 0.3, 0.1])) == pytest.approx([0.0, 0.0, -0.3])
    assert advantages(group([0.6, 1.0, 0.6])) == pytest.approx([0.0, 0.4, 0.0])
    assert advantages(group([1.0])) == [0.0]


def test_efficient_rewarding_makes_no_wrong_record_right() -> None:
    # moved to 0.55, 0.35, 0.2 + 1/30 and 0 - 1/30: what is moved above 0.5 is as wrong as before
    efficient = {"efficient_rewarding": True}
    wrong = advantages(group([0.45, 0.45, 0.2, 0.0], [9, 2, 4, 3]), **efficient)
    assert max(wrong) == 0.0 and wrong[0] == 0.0
    # and what is moved below it is as right: 0.65 and 0.45 against 1 and 0
    right = advantages(group([0.55, 0.55, 1.0, 0.0], [3, 9, 6, 5]), **efficient)
    assert min(right[:3]) >= 0.0


def test_a_turn_that_failed_has_an_advantage_of_at_most_0() -> None:
    statuses = [TurnStatus.COMPLETED, TurnStatus.FORMAT_ERROR, TurnStatus.TOOL_FAILED]
    assert turn_advantages(0.5, statuses) == [0.5, 0.0, 0.0]
    assert turn_advantages(-0.5, statuses) == [-0.5, -0.5, -0.5]


def test_a_group_whose_scores_are_within_a_tenth_is_left_out() -> None:
    close = group([0.5, 0.55, 0.59])
    assert left_out(close, min_score_spread=0.1) == ["min_score_spread"] * 3
    assert left_out(group([0.0, 0.125]), min_score_spread=0.1) == [None, None]
    assert left_out(close) == [None] * 3


def test_groups_that_were_left_out_because_their_scores_are_equal_are_too_hard_or_too_easy() -> (
    None
):
    out = {"min_score_spread": 4}
    ended = GroupEnd(datetime.now(UTC), 0, out, [0.0] * 4, given_up=[], scorer_error=None)
    said = "too hard for this model, and --min_score_spread leaves such groups out"
    assert said in barren_groups([ended])


@pytest.mark.parametrize(
    ("scores", "wrong", "right"),
    [
        # m = 2 right: at most 3 wrong and 4 right
        ([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], 3, 2),
        # m = 1 wrong: at most 2 wrong and 3 right; 0.3 counts as right
        ([1.0, 1.0, 1.0, 1.0, 0.3, 1.0, 1.0, 0.0], 1, 3),
        # m = 0
        ([1.0, 1.0, 1.0, 1.0], 0, 2),
        ([0.0, 0.0, 0.0, 0.0], 1, 0),
    ],
)
def test_a_balanced_group_has_one_more_wrong_and_two_more_right_records_than_the_smaller_number(
    scores: list[float], wrong: int, right: int
) -> None:
    out = left_out(group(scores), balance_sample=True)
    kept = [score for score, why in zip(scores, out, strict=True) if why is None]
    assert (kept.count(0.0), len(kept) - kept.count(0.0)) == (wrong, right)
    assert set(out) <= {None, "balance_sample"}


def test_which_records_a_balanced_group_has_is_drawn_at_random_by_the_task() -> None:
    records = group([1.0, *[0.0] * 5])
    drawn = {tuple(left_out(records, f"task-{n}", balance_sample=True)) for n in range(200)}
    assert len(drawn) == 10  # two of five


def test_balance_sample_alone_decides() -> None:
    records = group([1.0, 0.0], [1, 1], stop_reason=StopReason.MAX_TURNS)
    flags = {"min_turns": 1, "reserve_context_error_count": 0}
    assert left_out(records, balance_sample=True, **flags) == [None, None]
    assert left_out(records, **flags) == ["min_turns", "reserve_context_error_count"]


def test_right_records_of_few_turns_are_left_out_however_small_their_score() -> None:
    records = group([1.0, 0.3, 0.0, 1.0], [1, 1, 1, 2])
    assert left_out(records, min_turns=1) == ["min_turns", "min_turns", None, None]


def test_of_records_at_a_limit_so_many_stay_and_all_with_efficient_rewarding() -> None:
    records = group([0.0, 0.0, 0.0], stop_reason=StopReason.MAX_TURNS)
    for count in (0, 1, 2):
        assert left_out(records, reserve_context_error_count=count).count(None) == count
    efficient = {"efficient_rewarding": True, "reserve_context_error_count": 0}
    assert left_out(records, **efficient) == [None] * 3


def test_efficient_rewarding_moves_scores_by_the_rank_of_turns() -> None:
    # right: 2, 5, 5 turns have ranks 0, 1.5, 1.5 around 1: +0.1, -0.05, -0.05
    # wrong: 1, 4, 9 turns: fewer turns down, -0.1, 0, +0.1
    records = group([1.0, 1.0, 1.0, 0.0, 0.0, 0.4], [2, 5, 5, 1, 4, 9])
    moved = moved_by_turns(records, range(6))
    assert moved == pytest.approx([1.1, 0.95, 0.95, -0.1, 0.0, 0.5])
    assert sum(moved) == pytest.approx(3.4)
    # what is left out has no rank: of two right ones the faster gets +0.1, the other -0.1
    assert moved_by_turns(records, [0, 1, 3]) == pytest.approx([1.1, 0.9, 1.0, 0.0, 0.0, 0.4])
    # one of its kind has nothing to be compared with
    assert moved_by_turns(group([1.0, 0.0], [3, 1]), [0, 1]) == [1.0, 0.0]


def test_advantages_are_of_the_moved_scores() -> None:
    records = group([1.0, 1.0, 0.0], [2, 4, 3])
    # 1.1 - (0.9 + 0) / 2, 0.9 - (1.1 + 0) / 2, 0 - (1.1 + 0.9) / 2
    found = advantages(records, efficient_rewarding=True)
    assert found == pytest.approx([0.65, 0.35, -1.0])


def test_a_minimal_advantage_keeps_what_reaches_it_and_replaces_the_drop_of_zero() -> None:
    records = group([1.0, 1.0, 0.0, 0.0])  # advantages 0.5 and -0.5
    flags = {"advantage": "mean", "drop_zero_advantage": True}
    at = ["minimal_advantage"] * 2
    assert left_out(records, minimal_advantage=0.5, **flags) == [None, None, *at]
    assert left_out(records, minimal_advantage=0.6, **flags) == [*at, *at]
    same = group([1.0, 1.0])
    assert left_out(same, minimal_advantage=-0.5, **flags) == [None, None]
    assert left_out(same, minimal_advantage=0.0, **flags) == ["drop_zero_advantage"] * 2
