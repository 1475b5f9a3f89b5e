"""Advantages and returns from rewards and values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.training.step.gae import generalised_advantages, normalized, outcome_rewards


def test_hand_computed_numbers_of_one_row() -> None:
    """gamma 0.5, lambda 0.5, so that each step back keeps a quarter."""
    estimates = generalised_advantages(
        torch.tensor([0.0, 0.0, 1.0]),
        torch.tensor([0.5, 1.0, 2.0]),
        torch.tensor([0, 0, 0]),
        torch.tensor([0, 1, 2]),
        gamma=0.5,
        lam=0.5,
    )
    # deltas: 0.5 * 1 - 0.5 = 0, 0.5 * 2 - 1 = 0, 1 - 2 = -1
    assert estimates.advantages.tolist() == [-0.0625, -0.25, -1.0]
    assert estimates.returns.tolist() == [0.4375, 0.75, 1.0]


def test_rows_do_not_see_each_other_wherever_their_tokens_stand() -> None:
    sequence = torch.tensor([1, 0, 1, 0, 1])
    place = torch.tensor([2, 1, 0, 0, 1])
    rewards = outcome_rewards(torch.tensor([3.0, -2.0]), sequence, place)
    assert rewards.tolist() == [-2.0, 3.0, 0.0, 0.0, 0.0]
    estimates = generalised_advantages(
        rewards, torch.tensor([0.0, 1.0, 5.0, 2.0, 7.0]), sequence, place, gamma=1.0, lam=0.0
    )
    # one step: r + V' - V
    assert estimates.advantages.tolist() == [-2.0, 2.0, 2.0, -1.0, -7.0]


@settings(max_examples=settings.default.max_examples // 4)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 1000))
def test_with_lambda_1_returns_are_discounted_rewards_to_come(
    lengths: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(length) for length in lengths])
    order = torch.randperm(len(place), generator=generator)
    sequence, place = sequence[order], place[order]
    outcomes = torch.randn(len(lengths), generator=generator)
    values = torch.randn(len(place), generator=generator)
    rewards = outcome_rewards(outcomes, sequence, place)
    estimates = generalised_advantages(rewards, values, sequence, place, gamma=0.9, lam=1.0)
    steps_to_go = torch.tensor(lengths)[sequence] - 1 - place
    expected = outcomes[sequence] * 0.9**steps_to_go
    torch.testing.assert_close(estimates.returns, expected)
    torch.testing.assert_close(estimates.advantages, expected - values)


def test_a_rank_without_tokens_has_no_estimates() -> None:
    nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    estimates = generalised_advantages(nothing, nothing, none, none, gamma=1.0, lam=1.0)
    assert len(estimates.advantages) == len(estimates.returns) == 0


def test_normalization_takes_mean_and_spread_of_the_whole_batch() -> None:
    assert normalized(torch.tensor([1.0, 5.0]), 3.0, 4.0).tolist() == pytest.approx([-1.0, 1.0])
    assert normalized(torch.tensor([3.0]), 3.0, 0.0).tolist() == [0.0]
