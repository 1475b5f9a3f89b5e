"""Logprobs and entropies against autograd through their definitions."""

import pytest
import torch
from torch import Tensor

from agentrl.training.model.softmax import picked_logprobs

N, VOCABULARY = 7, 50


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(N, VOCABULARY, generator=generator)
    logits[0, 3] = 200.0  # one certain token, whose rivals have probability 0
    logits[1] -= 1e4
    targets = torch.randint(0, VOCABULARY, (N,), generator=generator)
    return logits, targets, torch.linspace(0.5, 1.5, N)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_are_those_of_the_definition(entropy_gradient: bool) -> None:
    logits, targets, temperatures = inputs()
    wanted = logits.double().requires_grad_()
    log_p = torch.log_softmax(wanted / temperatures[:, None], -1)
    expected = log_p.gather(-1, targets[:, None])[:, 0]
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    weights = torch.arange(1.0, N + 1)
    loss = (expected * weights).sum()
    if entropy_gradient:
        loss = loss + (expected_entropy * weights.flip(0)).sum()
    loss.backward()

    ours = logits.clone().requires_grad_()
    logprobs, entropy = picked_logprobs(
        ours * 1, targets, temperatures, entropy=True, entropy_gradient=entropy_gradient
    )
    assert entropy is not None and entropy.requires_grad == entropy_gradient
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=1e-5)
    loss = (logprobs * weights).sum()
    if entropy_gradient:
        loss = loss + (entropy * weights.flip(0)).sum()
    loss.backward()
    assert ours.grad is not None and wanted.grad is not None
    torch.testing.assert_close(ours.grad.double(), wanted.grad, atol=1e-5, rtol=1e-5)


def test_the_logits_memory_is_all_that_is_used() -> None:
    logits, targets, temperatures = inputs()
    leaf = logits.clone().requires_grad_()
    made = leaf * 1
    logprobs, entropy = picked_logprobs(
        made, targets, temperatures, entropy=False, entropy_gradient=False
    )
    assert entropy is None
    kept = [x for x in logprobs.grad_fn.saved_tensors if x is not None and x.ndim == 2]  # type: ignore[union-attr]
    assert [x.data_ptr() for x in kept] == [made.data_ptr()]


def test_a_second_backward_pass_is_refused() -> None:
    logits, targets, temperatures = inputs()
    leaf = logits.clone().requires_grad_()
    logprobs, _ = picked_logprobs(
        leaf * 1, targets, temperatures, entropy=False, entropy_gradient=False
    )
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()
