"""Merging changes nothing: any rows, any budget, any loss give what separate sequences give."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tiny import VOCABULARY, tiny_model
from torch import Tensor
from transformers import Qwen3ForCausalLM

from agentrl.configs import ComputeConfig, LossConfig
from agentrl.databases.token_tree import TokenTree
from agentrl.training.data.batch import collate_padded
from agentrl.training.data.sequences import TrainingSequence, count_totals
from agentrl.training.losses import (
    LOSS_FUNCTIONS,
    BatchTotals,
    LossInputs,
    Normalisation,
    normalise,
)
from agentrl.training.model.prepare import prepare_model
from agentrl.training.parallel import Mesh, make_mesh
from agentrl.training.step.objective import Objective, TokenLosses
from agentrl.training.step.passes import NO_AUXILIARY_OUTPUTS, PolicyPasses
from agentrl.training.step.schedule import Schedule, Section, make_schedule
from agentrl.training.step.statistics import RunningStatistics, StepStatistics

LOSSES = sorted(LOSS_FUNCTIONS)

Rows = list[list[TrainingSequence]]


@st.composite
def groups(draw: st.DrawFn) -> Rows:
    """Rows of two prompts: some begin alike for any length, in mid-turn too, some are trees.

    Lengths are up to 140 tokens, so that prompts that are shared are worth computing once. Any
    token may be trained, those of prompts and those that several rows share included.
    """
    seed = draw(st.integers(0, 2**16))
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(2, VOCABULARY, size) for size in (100, 30)]
    rows: Rows = []
    for _ in range(draw(st.integers(1, 6))):
        start = prompts[draw(st.integers(0, 1))]
        start = start[: draw(st.sampled_from([1, 3, len(start) - 1, len(start), len(start)]))]
        temperature = draw(st.sampled_from([1.0, 1.0, 0.7]))
        spine = np.concatenate([start, generator.integers(2, VOCABULARY, 20)])
        paths = [spine]
        for _ in range(draw(st.integers(0, 3))):  # further segments of the row
            before = paths[draw(st.integers(0, len(paths) - 1))]
            cut = draw(st.integers(1, len(before)))
            tail = generator.integers(2, VOCABULARY, draw(st.sampled_from([1, 1, 5, 20])))
            paths.append(np.concatenate([before[:cut], tail]))
        rows.append(_row(paths, temperature, generator))
    return rows


def _row(
    paths: list[np.ndarray], temperature: float, generator: np.random.Generator
) -> list[TrainingSequence]:
    sequences = []
    for tokens in paths:
        trained = generator.random(len(tokens)) < 0.5
        trained[0], trained[-1] = False, True
        sequences.append(
            TrainingSequence(
                TokenTree.line(
                    tokens,
                    mask=trained,
                    advantages=generator.normal(size=len(tokens)),
                    logprobs=-generator.uniform(2, 6, len(tokens)),
                    staleness=generator.integers(0, 3, len(tokens)),
                ),
                temperature=temperature,
                row_tokens=0,
            )
        )
    total = sum(len(sequence.trained) for sequence in sequences)
    return [replace(sequence, row_tokens=total) for sequence in sequences]


@dataclass(frozen=True)
class Trained:
    """The same weights, once with tree attention and once with transformers' own."""

    mesh: Mesh
    tree: Qwen3ForCausalLM
    plain: Qwen3ForCausalLM


def make_trained(*, checkpointing: bool = False) -> Trained:
    mesh = make_mesh(Accelerator(cpu=True))
    tree, plain = tiny_model(), tiny_model()
    prepare_model(tree, mesh, ComputeConfig(gradient_checkpointing=checkpointing))
    prepare_model(plain, mesh, ComputeConfig(), trees=False)
    return Trained(mesh, tree, plain)


@pytest.fixture
def trained() -> Trained:
    return make_trained()


def separate(rows: Rows) -> Schedule:
    """The sequences of a row beside each other on padded lines."""
    batches = tuple(collate_padded(row, [number] * len(row)) for number, row in enumerate(rows))
    return Schedule((Section(None, batches),), len(rows), count_totals(rows), divides_rows=False)


class MeasuredStatistics(RunningStatistics):
    """Also measures the terms that the loss is a sum of."""

    def __init__(self, mesh: Mesh, loss: LossConfig, totals: BatchTotals) -> None:
        super().__init__(mesh.device)
        self._normalisation = Normalisation(loss.normalisation)
        self._totals = totals
        self.absolute_loss = 0.0  # what the loss would be, were every token's term its absolute

    def add(self, share: Tensor, token_losses: TokenLosses, inputs: LossInputs) -> None:
        super().add(share, token_losses, inputs)
        terms = token_losses.token_losses.abs()
        self.absolute_loss += normalise(
            terms, inputs.sequence_tokens, self._normalisation, self._totals
        ).item()


@dataclass(frozen=True)
class Outcome:
    """What a step over a schedule gives."""

    statistics: StepStatistics
    gradients: list[Tensor]
    absolute_loss: float  # see `MeasuredStatistics`


def outcome(model: Qwen3ForCausalLM, schedule: Schedule, loss: LossConfig, mesh: Mesh) -> Outcome:
    """Runs the passes of a step, without the optimizer."""
    model.train()
    model.zero_grad()  # an exception in an earlier example may have left a part of its gradients
    running = MeasuredStatistics(mesh, loss, schedule.totals)
    PolicyPasses(model, schedule, Objective(loss), 16, mesh, NO_AUXILIARY_OUTPUTS).add_gradients(
        running
    )
    gradients = [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    statistics = running.reduce(schedule.totals, norm, 0.0, 0, mesh.dp_group)
    return Outcome(statistics, gradients, running.absolute_loss)


def assert_same(merged: Outcome, separated: Outcome) -> None:
    statistics, expected = merged.statistics, separated.statistics
    assert statistics.staleness_histogram == expected.staleness_histogram
    ours, theirs = (
        {name: value for name, value in vars(said).items() if isinstance(value, float)}
        for said in (statistics, expected)
    )
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for one, other in zip(merged.gradients, separated.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5 * expected.grad_norm)


def assert_equal(rows: Rows, loss: LossConfig, trained: Trained, budget: int) -> Schedule:
    mesh = trained.mesh
    schedule = make_schedule(trained.tree, rows, budget, 4, mesh)
    separated = outcome(trained.plain, separate(rows), loss, mesh)
    assert_same(outcome(trained.tree, schedule, loss, mesh), separated)
    return schedule


@given(rows=groups(), budget=st.integers(1, 400), loss=st.sampled_from(LOSSES))
@settings(
    max_examples=settings.default.max_examples * 3 // 10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_rows_in_any_budget_train_like_separate_sequences(
    rows: Rows, budget: int, loss: str, trained: Trained
) -> None:
    config, mesh = LossConfig(loss_calculator=loss, log_entropy=True), trained.mesh
    separated = outcome(trained.plain, separate(rows), config, mesh)
    # The loss sums terms of both signs, each with a float32 rounding of up to some 1e-6 of itself.
    # Where they cancel to less than a hundredth of their sizes, no order of summation gives the
    # loss to 1e-4: such rows have no loss to compare.
    # (Said by `not`, so that a loss of NaN is no excuse.)
    assume(not abs(separated.statistics.loss) < 0.01 * separated.absolute_loss)
    schedule = make_schedule(trained.tree, rows, budget, 4, mesh)
    assert_same(outcome(trained.tree, schedule, config, mesh), separated)


def siblings(count: int, prompt: int, length: int, *, trains_prompt: bool = False) -> Rows:
    """Rows on one prompt; with `trains_prompt` some of its tokens are trained, in every row."""
    generator = np.random.default_rng(count)
    start = generator.integers(2, VOCABULARY, prompt)
    rows = []
    for _ in range(count):
        (row,) = _row(
            [np.concatenate([start, generator.integers(2, VOCABULARY, length)])], 1.0, generator
        )
        if not trains_prompt:
            mask = row.tokens["mask"] & (np.arange(len(row)) >= prompt)
            row = replace(row, tokens=row.tokens.with_columns(mask=mask), row_tokens=mask.sum())
        rows.append([row])
    return rows


@pytest.mark.parametrize("trains_prompt", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_group_over_the_budget_computes_its_prompt_once(
    trains_prompt: bool, checkpointing: bool
) -> None:
    rows = siblings(5, 120, 20, trains_prompt=trains_prompt)
    trained = make_trained(checkpointing=checkpointing)
    schedule = assert_equal(rows, LossConfig(log_entropy=True), trained, 160)
    (section,) = schedule.sections
    assert section.prefix is not None and section.prefix.tokens == 120
    lines = [batch.input_ids.shape[1] for batch in section.batches]
    assert len(lines) == 3 and max(lines) <= 40


def test_a_token_that_siblings_share_is_one_prediction_with_all_their_weights(
    trained: Trained,
) -> None:
    rows = siblings(4, 50, 10, trains_prompt=True)
    (batch,) = assert_equal(rows, LossConfig(log_entropy=True), trained, 1000).batches
    assert len(batch.prediction) == sum(row[0].row_tokens for row in rows)
    predictions = torch.stack([batch.positions, batch.targets])
    assert len(batch.targets) == predictions.unique(dim=1).shape[1]
    assert len(batch.targets) < len(batch.prediction)
