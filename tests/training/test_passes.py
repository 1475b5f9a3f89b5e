"""Losses that depend on more than a micro-batch holds: the same gradient however it is divided."""

import pytest
import torch
from accelerate import Accelerator
from tiny import linear_rows, make_row, sequences_of, tiny_model
from torch import Tensor

from agentrl.configs import ComputeConfig, LossConfig
from agentrl.training.losses import BatchTotals, LossInputs, Scope
from agentrl.training.model.prepare import prepare_model
from agentrl.training.parallel import make_mesh
from agentrl.training.step.objective import Objective, TokenLosses
from agentrl.training.step.passes import NO_AUXILIARY_OUTPUTS, PolicyPasses
from agentrl.training.step.schedule import make_schedule
from agentrl.training.step.statistics import RunningStatistics

TREE = [(0, 6, -1), (6, 12, 0), (12, 17, 1), (17, 24, 1), (24, 30, 0)]


class SequenceRatio(Objective):
    """The mean over rows of -A * (the geometric mean of pi / mu over the row)."""

    scope = Scope.SEQUENCE

    def share(self, inputs: LossInputs, totals: BatchTotals) -> tuple[Tensor, TokenLosses]:
        ratio = torch.zeros_like(inputs.logprobs)
        for row in inputs.sequence[inputs.mask].unique():
            tokens = inputs.mask & (inputs.sequence == row)
            difference = (inputs.logprobs - inputs.behaviour_logprobs)[tokens]
            assert len(difference) == int(inputs.sequence_tokens[tokens][0]), "the whole row"
            ratio = torch.where(tokens, difference.mean().exp(), ratio)
        token_losses = -ratio * inputs.advantages / inputs.sequence_tokens
        return token_losses.sum() / totals.sequences, _token_losses(token_losses, inputs)


class BatchSpread(Objective):
    """The variance of pi over all tokens of the batch, with the entropy of all of them."""

    scope = Scope.BATCH
    with_entropy = True
    entropy_gradient = False

    def share(self, inputs: LossInputs, totals: BatchTotals) -> tuple[Tensor, TokenLosses]:
        probabilities = inputs.logprobs[inputs.mask].exp()
        assert len(probabilities) == totals.tokens, "the whole batch"
        return probabilities.var() * 100, _token_losses(torch.zeros_like(inputs.logprobs), inputs)


def _token_losses(token_losses: Tensor, inputs: LossInputs) -> TokenLosses:
    none = torch.zeros_like(inputs.mask)
    return TokenLosses(token_losses.detach(), none, none, none, none, reference_kl=None)


def gradients(objective: Objective, budget: int) -> tuple[list[Tensor], RunningStatistics]:
    mesh = make_mesh(Accelerator(cpu=True))
    model = tiny_model()
    prepare_model(model, mesh, ComputeConfig())
    rows = [sequences_of(row) for row in [*linear_rows(5), make_row("tree", 9, TREE)]]
    running = RunningStatistics(mesh.device)
    schedule = make_schedule(model, rows, budget, 1, mesh)
    PolicyPasses(model, schedule, objective, 16, mesh, NO_AUXILIARY_OUTPUTS).add_gradients(running)
    return [parameter.grad.full_tensor() for parameter in model.parameters()], running


@pytest.mark.parametrize("objective", [SequenceRatio, BatchSpread])
def test_any_division_into_micro_batches_has_the_gradient_of_the_whole(
    objective: type[Objective],
) -> None:
    whole, said = gradients(objective(LossConfig()), 10_000)
    assert any(gradient.abs().max() > 1e-3 for gradient in whole)
    for budget in (1, 60):
        parts, same = gradients(objective(LossConfig()), budget)
        for ours, theirs in zip(parts, whole, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(same._sums, said._sums)
