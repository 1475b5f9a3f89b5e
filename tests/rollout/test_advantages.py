"""Estimators of the advantage: numbers by hand, the user's own, and the greedy baseline."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.configs import ConfigError, RewardConfig
from agentrl.databases.documents import Record, Split, TokenCounts
from agentrl.rollout.groups.advantages import (
    ESTIMATORS,
    find_estimator,
    leave_one_out,
    mean,
    mean_std,
    opo,
    remax,
)
from agentrl.rollout.groups.group_rules import apply_group_rules


def group(*scores: float, tokens: tuple[int, ...] = (), first: int = 0) -> list[Record]:
    return [
        Record(
            _id=f"a-t{rollout}-a0", task="a", task_id="a", rollout=rollout, attempt=0,
            split=Split.TRAIN,
            epoch=0, owner="test", query="?", score=score, n_turns=1,
            tokens=TokenCounts(generated=tokens[rollout - first] if tokens else 7),
        )
        for rollout, score in enumerate(scores, start=first)
    ]  # fmt: skip


def test_advantages_of_one_right_of_four() -> None:
    scores = [1.0, 0.0, 0.0, 0.0]
    # mean 1/4; variance (9 + 1 + 1 + 1) / 16 / 3 = 1/4, so the standard deviation is 1/2
    assert mean(scores) == [0.75, -0.25, -0.25, -0.25]
    assert mean_std(scores) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-3)
    # each against the mean of the other three: 1 - 0, and 0 - 1/3
    assert leave_one_out(scores) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_opo_weighs_the_baseline_by_lengths() -> None:
    # (10 * 1 + 30 * 0 + 60 * 0.5) / 100 = 0.4
    assert opo([1.0, 0.0, 0.5], [10, 30, 60]) == pytest.approx([0.6, -0.4, 0.1])
    records = group(1.0, 0.0, 0.5, tokens=(10, 30, 60))
    assert ESTIMATORS["opo"](records, [1.0, 0.0, 0.5]) == pytest.approx([0.6, -0.4, 0.1])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.integers(1, 50))
def test_opo_of_equal_lengths_is_the_mean_baseline(scores: list[float], length: int) -> None:
    assert opo(scores, [length] * len(scores)) == pytest.approx(mean(scores), abs=1e-9)


def test_remax_compares_with_the_greedy_attempt_and_does_not_train_it() -> None:
    rewards = apply_group_rules("a", group(0.25, 1.0, 0.0), RewardConfig(advantage="remax"))
    assert [reward.advantage for reward in rewards] == [0.0, 0.75, -0.25]
    assert [reward.left_out for reward in rewards] == ["greedy_baseline", None, None]


def test_a_group_whose_greedy_attempt_failed_has_no_baseline_and_trains_nothing() -> None:
    assert remax([1.0, 0.0], None) == [0.0, 0.0]
    rewards = apply_group_rules("a", group(1.0, 0.0, first=1), RewardConfig(advantage="remax"))
    assert [reward.left_out for reward in rewards] == ["drop_zero_advantage"] * 2


def test_a_score_of_0_is_no_advantage_of_0() -> None:
    config = RewardConfig(advantage="score", drop_zero_advantage=True)
    rewards = apply_group_rules("a", group(0.0, 1.0), config)
    assert [(reward.advantage, reward.left_out) for reward in rewards] == [(0.0, None), (1.0, None)]


def test_the_users_estimator_gets_the_records_and_goes_through_the_same_rules(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def best(records):\n"
        "    top = max(record.score for record in records)\n"
        "    return [record.score - top for record in records]\n"
    )
    config = RewardConfig(advantage=f"{file}:best", adv_scaling=2.0)
    rewards = apply_group_rules("a", group(1.0, 0.5), config)
    assert [reward.advantage for reward in rewards] == [0.0, -1.0]
    assert [reward.left_out for reward in rewards] == ["drop_zero_advantage", None]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "returned [1.0] for 2 records"),
        ("return [0.0, float('nan')]", "not a finite number for each"),
        ("return records[0].reward", "fails: AttributeError"),
    ],
)
def test_what_is_wrong_with_a_users_estimator_is_one_sentence(
    tmp_path: Path, body: str, message: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(records):\n    {body}\n")
    with pytest.raises(ConfigError) as error:
        find_estimator(f"{file}:mine")(group(1.0, 0.0), [1.0, 0.0])
    assert message in str(error.value)
    assert "task a" in str(error.value)


def test_an_estimator_that_is_not_there_is_refused_when_it_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(ConfigError, match="has no function 'mine'"):
        find_estimator(f"{tmp_path}/mine.py:mine")
