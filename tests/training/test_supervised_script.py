"""Supervised training learns what it is shown."""

import pytest
import torch
from tiny import tiny_model

from agentrl.configs import OptimizerConfig
from agentrl.training.step.train_step import StepStatistics
from agentrl.training.supervised.script import SupervisedRow, train_supervised


def rows() -> list[SupervisedRow]:
    """Count on from a start; the start and what follows a wrong mask are never learnt."""
    return [
        SupervisedRow([2 + (start + i) % 40 for i in range(12)], [0] * 4 + [1] * 8)
        for start in range(40)
    ]


def test_the_model_learns_and_is_a_plain_model_again() -> None:
    model = tiny_model()
    seen: list[StepStatistics] = []
    train_supervised(
        model,
        rows(),
        steps=60,
        rows_per_step=16,
        optimizer=OptimizerConfig(learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=5),
        on_step=lambda step, statistics: seen.append(statistics),
    )
    assert len(seen) == 60
    assert seen[0].n_train_tokens == 16 * 8
    assert seen[-1].loss < 0.3 * seen[0].loss
    assert type(model).__name__ == "Qwen3ForCausalLM"
    prompt = torch.tensor([[2 + i for i in range(6)]])
    assert model(input_ids=prompt).logits[0, -1].argmax().item() == 8


def test_the_seed_gives_the_order() -> None:
    losses: list[list[float]] = []
    for seed in (1, 1, 2):
        run: list[float] = []
        train_supervised(
            tiny_model(),
            rows(),
            steps=3,
            rows_per_step=8,
            optimizer=OptimizerConfig(learning_rate=1e-3, lr_scheduler_type="cosine"),
            seed=seed,
            on_step=lambda step, statistics, run=run: run.append(statistics.loss),  # type: ignore[misc]
        )
        losses.append(run)
    assert losses[0] == losses[1] != losses[2]


def test_a_row_that_trains_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="row 1: no token after the first"):
        train_supervised(
            tiny_model(),
            [SupervisedRow([2, 3], [0, 1]), SupervisedRow([2, 3], [1, 0])],
            steps=1,
            rows_per_step=1,
            optimizer=OptimizerConfig(learning_rate=1e-3, lr_scheduler_type="cosine"),
        )
