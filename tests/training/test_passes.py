"""Losses that depend on more than a micro-batch holds: the same gradient however it is divided."""

from collections.abc import Sequence

import pytest
import torch
from accelerate import Accelerator
from tiny import linear_rows, make_row, sequences_of, tiny_model
from torch import Tensor

from agentrl.configs import ComputeConfig, LossConfig
from agentrl.databases.documents import DBRecordData
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


def gradients(
    objective: Objective, budget: int, rows_of: Sequence[DBRecordData] = ()
) -> tuple[list[Tensor], RunningStatistics]:
    mesh = make_mesh(Accelerator(cpu=True))
    model = tiny_model()
    prepare_model(model, mesh, ComputeConfig())
    chosen = rows_of or [*linear_rows(5), make_row("tree", 9, TREE)]
    rows = [sequences_of(row) for row in chosen]
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


def test_tokens_of_an_agent_that_is_not_trained_have_no_gradient_and_count_for_nothing() -> None:
    """Two turns of a conversation: the second one is another agent's, in a branch of its own."""
    nodes = [(0, 6, -1), (6, 14, 0), (14, 24, 0)]
    both, one = make_row("row", 1, nodes), make_row("row", 1, nodes, trained_nodes=[1])
    assert 0 < one.n_train_tokens < both.n_train_tokens
    config = LossConfig()
    theirs = one.tree.places([2])
    for row in (both, one):
        columns = row.tree.columns
        advantages = columns["advantages"].copy()
        advantages[:] = 0.0
        advantages[theirs] = 100.0
        row.tree = row.tree.with_columns(advantages=advantages)
    assert any(
        gradient.abs().max() > 0 for gradient in gradients(Objective(config), 10_000, [both])[0]
    )
    nothing, _ = gradients(Objective(config), 10_000, [one])
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in nothing)
    # With an advantage for the trained agent, what the other one's tokens say changes no bit.
    found = []
    for of_other in (0.0, 100.0):
        advantages = one.tree["advantages"].copy()
        advantages[:], advantages[theirs] = 1.0, of_other
        logprobs = one.tree["logprobs"].copy()
        logprobs[theirs] -= of_other
        row = one.model_copy(update={
            "tree": one.tree.with_columns(advantages=advantages, logprobs=logprobs)})  # fmt: skip
        found.append(gradients(Objective(config), 10_000, [row])[0])
    assert any(gradient.abs().max() > 0 for gradient in found[0])
    assert all(map(torch.equal, *found))
