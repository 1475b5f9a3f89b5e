"""Logprobs and entropy from logits, against autograd through log_softmax."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.training.token_probabilities import token_probabilities


def by_autograd(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits.double() / temperatures[:, None], dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


@given(
    rows=st.integers(0, 5),
    vocabulary=st.integers(1, 40),
    spread=st.sampled_from([0.1, 3.0, 100.0]),
    weight_of_entropy=st.sampled_from([None, 0.0, 0.7]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_log_softmax(
    rows: int, vocabulary: int, spread: float, weight_of_entropy: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = spread * torch.randn(rows, vocabulary, generator=generator)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    temperatures = 0.5 + torch.rand(rows, generator=generator)
    coefficients = torch.randn(rows, generator=generator)
    gradients, values = [], []
    for compute in (by_autograd, token_probabilities):
        logits = start.clone().requires_grad_()
        asked = {} if compute is by_autograd else {"with_entropy": True}
        logprobs, entropy = compute(logits, targets, temperatures, **asked)
        loss = (coefficients * logprobs).sum()
        if weight_of_entropy is not None:
            loss = loss + (weight_of_entropy * coefficients * entropy).sum()
        loss.backward()
        values += [logprobs, entropy]
        gradients.append(logits.grad)
    for expected, ours in zip(values[:2], values[2:], strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5 * (1 + spread))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5 * (1 + spread))


def test_a_target_of_no_probability_has_a_finite_logprob_and_gradient() -> None:
    logits = torch.tensor([[0.0, -500.0]], requires_grad=True)
    logprobs, entropy = token_probabilities(
        logits, torch.tensor([1]), torch.ones(1), with_entropy=True
    )
    assert entropy is not None
    (logprobs + entropy).sum().backward()
    assert logprobs.item() == -500.0
    assert torch.equal(logits.grad, torch.tensor([[-1.0, 1.0]]))


def test_a_second_backward_pass_is_refused_instead_of_wrong() -> None:
    """The first writes its gradient over what it has kept."""
    logits = torch.randn(3, 5, requires_grad=True)
    logprobs, _ = token_probabilities(
        logits, torch.tensor([0, 1, 2]), torch.ones(3), with_entropy=False
    )
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_logits_in_bfloat16_are_computed_in_float32() -> None:
    logits = torch.randn(4, 50, dtype=torch.bfloat16, requires_grad=True)
    targets, temperatures = torch.arange(4), torch.full((4,), 0.7)
    logprobs, _ = token_probabilities(logits, targets, temperatures, with_entropy=False)
    assert logprobs.dtype == torch.float32
    expected, _ = by_autograd(logits.detach(), targets, temperatures)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16
