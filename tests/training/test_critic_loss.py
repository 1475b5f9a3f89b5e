"""The critic's loss and figures, on numbers that can be checked by hand."""

import pytest
import torch
from accelerate import Accelerator

from agentrl.training.parallel import make_mesh
from agentrl.training.step.critic_loss import Moments, explained_variance, value_loss

OLD = torch.tensor([0.0, 0.0, 0.0])
VALUES = torch.tensor([0.3, -0.3, 0.1])
RETURNS = torch.tensor([1.0, 1.0, 1.0])


def test_without_clip_it_is_half_the_squared_error() -> None:
    token_losses = value_loss(VALUES, OLD, RETURNS, None)
    assert token_losses.tolist() == pytest.approx([0.245, 0.845, 0.405])


def test_a_value_beyond_the_clip_towards_its_return_gets_no_gradient() -> None:
    values = VALUES.clone().requires_grad_()
    token_losses = value_loss(values, OLD, RETURNS, 0.2)
    # the first is taken for 0.2, the second went away from its return, the third is within
    assert token_losses.tolist() == pytest.approx([0.32, 0.845, 0.405])
    token_losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -1.3, -0.9])


def test_moments_are_of_each_quantity_over_all_tokens() -> None:
    make_mesh(Accelerator(cpu=True))
    moments = Moments(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([5.0, 5.0, 5.0]))
    assert moments[0] == pytest.approx((3.0, 14 / 3))
    assert moments[1] == (5.0, 0.0)


def test_explained_variance_is_1_for_perfect_values_and_0_for_a_constant() -> None:
    assert explained_variance(0.0, 2.0) == 1.0
    assert explained_variance(2.0, 2.0) == 0.0
    assert explained_variance(3.0, 2.0) == -0.5
    assert explained_variance(0.0, 0.0) == 0.0, "there is nothing to explain"
