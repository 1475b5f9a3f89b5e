"""Advantages on numbers computed by hand, and which Records they leave in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.configs import RewardConfig
from agentrl.rollout.rewarding import leave_one_out, mean, mean_std, reward_group


def test_advantages_of_one_right_of_four() -> None:
    scores = [1.0, 0.0, 0.0, 0.0]
    # mean 1/4; variance (9 + 1 + 1 + 1) / 16 / 3 = 1/4, so the standard deviation is 1/2
    assert mean(scores) == [0.75, -0.25, -0.25, -0.25]
    assert mean_std(scores) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-3)
    # each against the mean of the other three: 1 - 0, and 0 - 1/3
    assert leave_one_out(scores) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_every_estimator_is_centred(scores: list[float]) -> None:
    for estimator in (mean, mean_std, leave_one_out):
        assert sum(estimator(scores)) == pytest.approx(0.0, abs=1e-6)


def test_a_group_without_contrast_trains_nothing_unless_asked() -> None:
    assert [r.trained for r in reward_group([1.0, 1.0], RewardConfig())] == [False, False]
    kept = reward_group([1.0, 1.0], RewardConfig(drop_zero_advantage=False))
    assert [r.trained for r in kept] == [True, True]


def test_filters_come_after_scaling() -> None:
    config = RewardConfig(advantage="mean", adv_scaling=2.0, minimal_advantage=0.5)
    rewards = reward_group([1.0, 0.0], config)
    assert [(r.advantage, r.trained) for r in rewards] == [(1.0, True), (-1.0, False)]


def test_a_group_whose_attempts_all_failed_has_no_rewards() -> None:
    assert reward_group([], RewardConfig()) == []
