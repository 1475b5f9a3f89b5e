"""A step in one process: what its result may and may not depend on."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tiny import linear_rows, make_row, sequences_of, tiny_model
from torch import Tensor

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig, OptimizerConfig
from agentrl.databases.documents import DBRecordData
from agentrl.databases.token_tree import TokenTree
from agentrl.training.data.batch import collate_forest
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.model.logprobs import token_logprobs
from agentrl.training.model.prepare import prepare_model
from agentrl.training.parallel import make_mesh
from agentrl.training.step.objective import Objective
from agentrl.training.step.optimizer import make_optimizer, make_scheduler
from agentrl.training.step.statistics import StepStatistics
from agentrl.training.step.train_step import train_step

TREE = [(0, 10, -1), (10, 22, 0), (22, 27, 1), (27, 34, 1), (34, 40, 0)]


def budget_of(tokens: int) -> LearnerConfig:
    """Micro-batches of so many tokens, all else as it is by default."""
    return LearnerConfig(ComputeConfig(micro_batch_tokens=tokens))


def one_step(
    rows: list[DBRecordData], loss: LossConfig, config: LearnerConfig
) -> tuple[StepStatistics, list[Tensor]]:
    model = tiny_model()
    mesh = make_mesh(Accelerator(cpu=True))
    prepare_model(model, mesh, config.compute)
    # with a usual epsilon the first step is the gradient's sign, rounding of zeros included
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-3))
    scheduler = make_scheduler(optimizer, OptimizerConfig(), 10)
    sequences = [sequences_of(row) for row in rows]
    statistics = train_step(model, optimizer, scheduler, sequences, Objective(loss), config, mesh)
    return statistics, [parameter.full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(),
        LossConfig(token_level_loss=False),
        LossConfig(loss_calculator="MINIRL"),
        LossConfig(loss_calculator="CrossEntropy", skip_length_normalization=True),
        LossConfig(
            entropy_coef=0.1, normalize_advantages=True, advantage_decay=0.9,
            strict_in_bound=True,
            proximal_policy="loglinear", rollout_is="token", rollout_is_threshold=2.0,
        ),
    ],
    ids=["token", "sequence", "minirl", "none", "layers"],
)  # fmt: skip
def test_micro_batches_chunks_and_recomputation_do_not_change_the_step(loss: LossConfig) -> None:
    rows = [*linear_rows(7), make_row("tree", 9, TREE)]
    whole, weights = one_step(rows, loss, budget_of(10_000))
    assert whole.n_micro_batches == 1
    parts, same_weights = one_step(
        rows,
        loss,
        LearnerConfig(
            ComputeConfig(
                gradient_checkpointing=True,
                micro_batch_tokens=40,
                pad_to_multiple_of=4,
                loss_seq_chunk_size=3,
            )
        ),
    )
    assert parts.n_micro_batches > 4
    assert parts.loss == pytest.approx(whole.loss, rel=1e-4, abs=1e-6)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    assert parts.mismatch_kl == pytest.approx(whole.mismatch_kl, rel=1e-4)
    for ours, theirs in zip(same_weights, weights, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=1e-3)


def test_a_tree_trains_like_its_paths_as_separate_rows() -> None:
    loss, config = LossConfig(loss_calculator="CrossEntropy"), budget_of(64)
    tree = make_row("tree", 0, TREE)
    statistics, _ = one_step([tree], loss, config)
    assert statistics.n_train_tokens == tree.n_train_tokens

    # by hand: every trained token once, after the tokens on its way from the root
    model = tiny_model()
    ids = torch.tensor(tree.tree["ids"])
    terms = []
    for path, trained in (
        ([*range(0, 27)], [*range(0, 27)]),
        ([*range(0, 22), *range(27, 34)], [*range(27, 34)]),
        ([*range(0, 10), *range(34, 40)], [*range(34, 40)]),
    ):
        log_p = torch.log_softmax(model(input_ids=ids[path][None]).logits[0], -1)
        for place, token in enumerate(path):
            if token in trained and tree.tree["mask"][token]:
                terms.append(-log_p[place - 1, ids[token]])
    assert len(terms) == tree.n_train_tokens
    mean = torch.stack(terms).mean()
    mean.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert statistics.loss == pytest.approx(mean.item(), rel=1e-5)
    assert statistics.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def test_a_step_that_is_not_finite_leaves_the_weights_alone() -> None:
    model = tiny_model()
    mesh = make_mesh(Accelerator(cpu=True))
    prepare_model(model, mesh, ComputeConfig())
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-2))
    scheduler = make_scheduler(optimizer, OptimizerConfig(), 10)
    row = make_row("a", 0, [(0, 9, -1)])
    bad = row.model_copy(update={"tree": row.tree.with_columns(advantages=np.nan)})
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        train_step(
            model,
            optimizer,
            scheduler,
            [sequences_of(bad)],
            Objective(LossConfig()),
            budget_of(512),
            mesh,
        )
    for ours, start in zip(model.parameters(), tiny_model().parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), start)


def test_statistics_describe_the_trained_tokens() -> None:
    rows = [make_row(f"r{i}", i, [(0, 20, -1)], version=i) for i in range(3)]
    model = tiny_model()
    mesh = make_mesh(Accelerator(cpu=True))
    prepare_model(model, mesh, ComputeConfig())
    optimizer = make_optimizer(model, OptimizerConfig())
    scheduler = make_scheduler(optimizer, OptimizerConfig(), 10)
    statistics = train_step(
        model,
        optimizer,
        scheduler,
        [sequences_of(row, 3) for row in rows],
        Objective(LossConfig(log_entropy=True)),
        budget_of(512),
        mesh,
    )
    assert statistics.staleness_max == 3
    assert statistics.staleness_mean == pytest.approx(2.0)
    assert statistics.ratio_min < statistics.ratio_mean < statistics.ratio_max
    assert statistics.entropy is not None and 0 < statistics.entropy < torch.log(torch.tensor(64.0))
    assert statistics.mismatch_kl > 0
    assert statistics.learning_rate == OptimizerConfig().learning_rate
    in_a_row = statistics.n_train_tokens // 3
    assert statistics.staleness_histogram == (0, in_a_row, in_a_row, in_a_row, 0, 0, 0, 0)
    assert 0 < statistics.effective_sample_size < 1
    assert statistics.reference_kl is None and statistics.grad_norms is None


def test_the_gradient_norm_of_each_layer_is_told_on_demand() -> None:
    config = replace(budget_of(512), optimizer=OptimizerConfig(log_grad_norms=True))
    statistics, _ = one_step(linear_rows(3), LossConfig(), config)
    norms = statistics.grad_norms
    assert norms is not None
    assert set(norms) == {
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm",
    }  # fmt: skip
    assert min(norms.values()) > 0
    squares = sum(norm**2 for norm in norms.values())
    assert squares**0.5 == pytest.approx(statistics.grad_norm, rel=1e-5)


def test_bf16_computes_in_bfloat16_and_leaves_weights_and_temperatures_in_float32() -> None:
    model = tiny_model()
    prepare_model(model, make_mesh(Accelerator(cpu=True)), ComputeConfig(bf16=True))
    line = TokenTree.line(np.arange(2, 12), mask=np.arange(10) > 0)
    sequence = TrainingSequence(line, temperature=0.7, row_tokens=9)
    logprobs, _ = token_logprobs(model, collate_forest([sequence], [0]), 4)
    ids, targets = torch.arange(2, 12)[None], torch.arange(3, 12)
    reference = tiny_model()
    for weight in reference.parameters():  # not `bfloat16()`, which rounds the rotary buffers too
        weight.data = weight.data.bfloat16()
    logits = reference(input_ids=ids).logits[0, :9].float()
    expected = torch.log_softmax(logits / 0.7, -1).gather(-1, targets[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    logprobs.sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
